"""Grading: honest solutions pass, and no program that does not solve its task scores anything."""

from __future__ import annotations

import sys

import pytest

from confined_python import Sandbox
from confined_python.errors import UserError
from confined_python.grading import Suite, grade

ADD = Suite(tests=("assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert not add(0, 0)"))
CHECK = Suite(
    tests=(
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate([1, 2], k=1) == [2], 'msg'\n"
        "    assert abs(candidate([0.5], k=0)[0] - 0.5) < 1e-6\n",
    ),
    entry_point="tail",
)
LOOP = Suite(
    tests=(
        "def check(candidate):\n    import random\n    for _ in range(5):\n        n = random.randint(1, 9)\n"
        "        assert candidate(n) == n * n\n    try:\n        candidate('x')\n        assert False\n"
        "    except Exception:\n        pass\n",
    ),
    entry_point="square",
)
NODES = Suite(
    tests=("assert depth(root) == 2",),
    setup="root = Node(1)\nroot.left = Node(2)",
)
TREE = """
class Node:
    def __init__(self, value):
        self.value, self.left, self.right = value, None, None
def depth(node):
    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
"""


@pytest.mark.parametrize(
    ("program", "suite"),
    [
        ("def add(a, b):\n    return a + b", ADD),
        ("import numpy\ndef add(a, b):\n    return numpy.int64(a + b)", ADD),
        ("def add(a, b):\n    print('noise')\n    return a + b\nif __name__ == '__main__':\n    add(1, 1)", ADD),
        ("def tail(items, k):\n    return items[k:]", CHECK),
        ("def square(n):\n    return n ** 2", LOOP),
        (TREE, NODES),
        ("def f(x):\n    return float('nan') if x else float('inf')", Suite(("assert f(1) != f(1)", "assert f(0) > 1e300"))),
        ("def f(g):\n    return g(3)", Suite(("assert f(lambda x: x + 1) == 4",))),
        ("def enc(s):\n    return s[::-1]\ndef dec(s):\n    return s[::-1]", Suite(("assert dec(enc('abc')) == 'abc'",))),
    ],
)  # fmt: skip
def test_an_honest_solution_passes(strongest: Sandbox, program: str, suite: Suite) -> None:
    result = grade(strongest, program, suite)
    assert result.all_passed, result


TABLE = """
class Table:
    def __init__(self): self.kept, self.open = {}, False
    def __contains__(self, key): return key in self.kept
    def __setitem__(self, key, value): self.kept[key] = value
    def __delitem__(self, key): del self.kept[key]
    def __getitem__(self, key): return list(self.kept)[key] if isinstance(key, slice) else self.kept[key]
    def __iter__(self): return iter(self.kept)
    def __enter__(self):
        self.open = True
        return self
    def __exit__(self, *raised): self.open = False
"""
FUTURE = "from __future__ import annotations\ndef add(a: Number, b: Number) -> Number:\n    return a + b"
GUARDED = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(int(input()), int(input())))"
PICKLED = "import pickle\nclass Two:\n    n = 2\nTWO = pickle.loads(pickle.dumps(Two()))\ndef two():\n    return TWO.n"
CLASSVAR = (
    "from dataclasses import dataclass\nfrom typing import ClassVar, Dict\n@dataclass\nclass Fast:\n"
    "    seen: ClassVar[Dict[int, int]] = {}\n    n: int = 3\ndef three():\n    return Fast().n"
)


@pytest.mark.parametrize(
    ("program", "suite"),
    [
        (TABLE, Suite(("assert 'a' not in t", "t['a'] = 1\nt['b'] = 2\nassert 'b' in t and t[0:1] == ['a']"), setup="t = Table()")),
        (TABLE, Suite(("t = Table()\nt[1] = 2\ndel t[1]\nassert 1 not in t",))),
        (TABLE, Suite(("with Table() as t:\n    assert t.open\nassert not t.open",))),
        (FUTURE, Suite(ADD.tests, imports="import math")),
        ("def add(a, b):\n    return sys.maxsize and a + b", Suite(ADD.tests, imports="from __future__ import annotations\nimport sys")),
        (GUARDED, ADD),
        (PICKLED, Suite(("assert two() == 2",))),
        (CLASSVAR, Suite(("assert three() == 3",))),
        ("import math\ndef f(n):\n    return math.factorial(n) % 7\nmath.factorial(2000)", Suite(("assert f(3) == 6",))),
        ("def same(items):\n    return items", Suite(("long = list(range(10 ** 9, 10 ** 9 + 200_000))\nassert same(long) == long",))),
    ],
    ids=["in", "del", "with", "future", "future of the row", "main", "pickle", "ClassVar", "last line", "long"],
)  # fmt: skip
def test_a_right_program_passes_however_it_is_written(strongest: Sandbox, program: str, suite: Suite) -> None:
    result = grade(strongest, program, suite, timeout=20)
    assert result.all_passed, result


def test_a_name_that_is_missing_where_python_evaluates_it_is_an_error(strongest: Sandbox) -> None:
    """Our own `from __future__ import annotations` is not the program's."""
    forgotten = "def add(a: Lisst[int], b) -> Optional[int]:\n    return a + b"
    if sys.version_info < (3, 14):  # which evaluates no annotation either
        result = grade(strongest, forgotten, ADD)
        assert not any(result.passed) and "NameError" in result.why
    assert strongest.run("def f(x: int): pass\nf.__annotations__['x'] is int").value is True


def test_an_object_does_not_say_itself_what_is_in_it(strongest: Sandbox) -> None:
    liar = "class L:\n    def __contains__(self, item): return True\n{more}def f(n): return L()"
    for more in ("", "    def __iter__(self): return iter([])\n"):
        result = grade(strongest, liar.replace("{more}", more), Suite(("assert 42 in f(3)",)))
        assert not result.all_passed and result.compared is (not more), result


def test_an_exception_that_ends_a_loop_of_the_tests_is_no_answer(strongest: Sandbox) -> None:
    loop = Suite(("assert all(map(lambda c: sq(c[0]) == c[1], [(2, 4), (3, 9)]))",))
    assert not grade(strongest, "def sq(x): raise StopIteration", loop).all_passed
    steps = Suite(
        ("it = g()\nassert next(it) == 1\ntry:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass",)
    )
    assert grade(strongest, "def g():\n    yield 1", steps).all_passed


def test_what_forgeable_means(strongest: Sandbox) -> None:
    """Stated so that the docs stay true: a compared value is safe there too, a bare expression is not."""
    liar = "class L(int):\n    def __eq__(self, o): return True\ndef apply(f, x): return L(7)"
    compared = grade(strongest, liar, Suite(("assert apply(lambda x: x, 3) == 3",)))
    assert compared.forgeable and not compared.all_passed
    bare = grade(strongest, liar, Suite(("assert apply(lambda x: x, 3) in (3,)",)))
    assert bare.forgeable and bare.all_passed
    for test in ("assert depth(root) == 2", "assert depth(root) in (2,)"):
        liar_of_nodes = f"class Node:\n    def __init__(self, v): pass\n{liar}\ndef depth(n): return L(7)"
        graded = grade(strongest, liar_of_nodes, Suite((test,), setup=NODES.setup))
        assert not graded.forgeable and not graded.all_passed


def test_bad_tests_are_an_error_of_the_caller(strongest: Sandbox) -> None:
    with pytest.raises(UserError, match="no Python"):
        grade(strongest, "x = 1", Suite(("assert (",)))
    with pytest.raises(UserError, match="no_such_library"):
        grade(strongest, "x = int", Suite(("assert x() == 0",), setup="import no_such_library"))
    with pytest.raises(UserError, match="at least one test"):
        Suite(())
