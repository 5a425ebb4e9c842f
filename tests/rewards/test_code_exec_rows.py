"""Rows of `code_exec`, as classes: nothing is paid for nothing, and rows that would pay for it are refused by their number."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from typing import Any

import pytest

from confined_python.grading import Suite, grade
from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import Score
from toolgrpo.rewards.code_exec import rows_refused
from toolgrpo.sandbox import Sandbox

NAMES = sorted(
    name
    for name in dir(builtins)
    if name.isidentifier() and not name.startswith("_") and name[0].islower() and callable(getattr(builtins, name))
)


def score(programs: list[str], rows: list[dict[str, Any]], metrics: dict[str, float] | None = None) -> list[Score]:
    columns = {key: [row.get(key) for row in rows] for key in {key for row in rows for key in row}}
    return get_reward("code_exec")(
        completions=[[{"role": "assistant", "content": f"```python\n{program}\n```"}] for program in programs],
        log_metric=({} if metrics is None else metrics).__setitem__,
        **columns,
    )


def rows_about(name: str, right: str) -> list[dict[str, Any]]:
    """Rows of every form whose function is called `name` and gives the sum of two squares."""
    asserts = [f"assert {name}({a}, {b}) == {a * a + b * b}" for a, b in ((1, 2), (0, 0), (5, 3))]
    other = "float" if name != "float" else "int"
    body = "\n".join(f"    {line.replace(name, 'candidate', 1)}" for line in asserts)
    return [
        {"tests": asserts},
        {"tests": asserts, "answer": right},
        {"tests": asserts, "entry_point": name},
        {"tests": [f"assert {other}({name}(1, 2)) == {other}(5)"], "answer": right},
        {"tests": f"def check(candidate):\n{body}\n", "entry_point": name},
        {"tests": "def check(candidate):\n    for n in range(3):\n        assert candidate(n, 1) == n * n + 1\n"
                  "    return None\ncheck(" + name + ")", "entry_point": name},
    ]  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES[::3], "max", "pow", "sorted", "sum", "own"])
def test_a_function_with_the_name_of_pythons_own_is_the_programs(name: str) -> None:
    right = f"def {name}(a, b):\n    return a * a + b * b"
    rows = rows_about(name, right)
    for program, earned in ((right, 1.0), ("pass", 0.0), (f"def {name}(a, b):\n    return a", 0.0)):
        assert score([program] * len(rows), rows) == [earned] * len(rows), program


def test_pythons_own_functions_stay_the_tests_where_they_ask_another() -> None:
    """A program cannot choose how it is judged by taking their names."""
    tests = {"tests": ["assert len(three()) == 3", "assert sorted(three()) == [1, 2, 3]"]}
    liar = "def three(): return []\ndef len(x): return 3\ndef sorted(x): return [1, 2, 3]"
    assert score([liar, "def three(): return [2, 1, 3]"], [tests] * 2) == [0.0, 1.0]
    of_sum = {**check("assert candidate([1, 2]) == sum([1, 2])"), "entry_point": "sum"}
    assert score(["def sum(x): return 0", "def sum(x): return x[0] + x[1]"], [of_sum] * 2) == [0.0, 1.0]


def test_a_module_that_only_the_program_imports_is_the_tests_too() -> None:
    rows = [{"tests": ["assert size((1, 2)) == sys.getsizeof((1, 2))"]}] * 3
    lie = "class sys:\n    getsizeof = staticmethod(lambda x: 0)\ndef size(x): return 0"
    assert score(["import sys\ndef size(x): return sys.getsizeof(x)", "pass", lie], rows) == [1.0, 0.0, 0.0]


OF_F: dict[str, Any] = {"tests": ["assert f(2) == 4"]}


def check(body: str) -> dict[str, Any]:
    return {"tests": f"def check(candidate):\n    {body}", "entry_point": "f"}


ABOUT_NOTHING: dict[str, dict[str, Any]] = {
    "no call": {"tests": ["assert 1 + 1 == 2"]},
    "no call, with an entry point": check("assert 1 + 1 == 2"),
    "calls of Python's own": {"tests": ["assert len(str(5)) == 1"]},
    "calls of the tests' own": {"tests": ["g = lambda x: x\nassert g(2) == 2"]},
    "only definitions": {"tests": ["def test_it():\n    assert f(1) == 2"]},
    "a class of tests": {"tests": ["class TestIt:\n    def test(self):\n        assert f(1) == 2"]},
    "an empty check": check("pass"),
    "a check without asserts": check("for n in range(3):\n        candidate(n)"),
    "a check that compares and goes on": check("candidate(2) == 4"),
    "asserts that always hold": {"tests": ["assert f(2) or True", "assert (f(2) == 4, 'a tuple')"]},
    "a check that swallows": check("try:\n        assert candidate(2) == 4\n    except Exception:\n        pass"),
    "a rebound entry point": {"tests": ["f = lambda x: 2 * x", "assert f(2) == 4"]},
    "a rebound entry point, named": {"tests": ["def f(x):\n    return 2 * x\nassert f(2) == 4"], "entry_point": "f"},
    "a rebound candidate": check("candidate = lambda x: 2 * x\n    assert candidate(2) == 4"),
    "a set-up that defines it": {**OF_F, "test_setup_code": "def f(x):\n    return 2 * x"},
    "imports that define it": {"tests": ["assert sqrt(4) == 2"], "test_imports": "from math import sqrt"},
    "no Python": {"tests": "assert (", "entry_point": "f"},
    "a check of nobody": {"tests": "def check():\n    pass", "entry_point": "f"},
    "no check": {"tests": "def test(f):\n    assert f(1) == 2", "entry_point": "f"},
}


def test_rows_whose_tests_ask_nothing_are_refused_and_end_no_training() -> None:
    names, rows = list(ABOUT_NOTHING), [OF_F, *ABOUT_NOTHING.values()]
    for program, right in (("pass", 0.0), ("def f(x): return 2 * x", 1.0)):
        graded, *dropped = score([program] * len(rows), rows)
        assert graded == right
        for name, one in zip(names, dropped, strict=True):
            assert isinstance(one, DropEpisode) and "the tests of" in one.reason, name
    refused = rows_refused(rows)
    assert list(refused) == list(range(1, len(rows))) and all("the tests of" in why for why in refused.values())
    imports = {"test_imports": ["import math", "import json"], "test_setup_code": ["two = 2"]}  # as MBPP has them
    listed = {"tests": ["assert f(1) == math.floor(two)"], **imports}
    assert score(["def f(x): return 2 * x"], [listed]) == [1.0] and not rows_refused([listed])


EXPECTING = {
    "except Exception": "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False",
    "except BaseException": "try:\n    f(-1)\nexcept BaseException:\n    pass\nelse:\n    assert False",
    "a bare except": "failed = False\ntry:\n    f(-1)\nexcept:\n    failed = True\nassert failed",
    "suppress": "import contextlib\nreached = False\nwith contextlib.suppress(Exception):\n    f(-1)\n    reached = True\nassert not reached",
    "finally": "def ends():\n    try:\n        f(-1)\n        return False\n    finally:\n        return True\nassert ends()\n"
    "try:\n    f(-1)\n    assert False, 'it goes on'\nexcept AssertionError:\n    raise\nexcept Exception:\n    pass",
}  # fmt: skip
NO_ANSWERS = {
    "not defined": "pass",
    "the process ends": "import os\ndef f(x): os._exit(0)",
    "no time": "def f(x):\n    while True: pass",
    "a frame of its own": "import os, struct\ndef f(x):\n    os.write(4, struct.pack('!I', 2) + b'{}')\n    return x",
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=1) as opened:
        yield opened


@pytest.mark.parametrize("test", EXPECTING.values(), ids=EXPECTING)
def test_only_an_exception_of_the_program_is_the_expected_one(sandbox: Sandbox, test: str) -> None:
    honest = "def f(x):\n    if x < 0:\n        raise RuntimeError('negative')\n    return x"
    assert grade(sandbox, honest, Suite((test,))).all_passed
    for name, program in NO_ANSWERS.items():
        assert not grade(sandbox, program, Suite((test,)), timeout=1.0).all_passed, name


RAISED = [
    name
    for name in dir(builtins)
    if isinstance(kind := getattr(builtins, name), type) and issubclass(kind, Exception)
    and name not in ("MemoryError", "UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError", "ExceptionGroup")
]  # fmt: skip


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_an_expected_exception_of_python_is_that_exception(sandbox: Sandbox, every: int) -> None:
    """Every so many of them, one of the program's own below it, and those of modules; no other one is taken for it."""
    imports = "import decimal, zipfile\n"
    for kind in [*RAISED[::every], "decimal.InvalidOperation", "zipfile.BadZipFile"]:
        suite = Suite(
            (f"{imports}try:\n    f(1)\nexcept {kind} as error:\n    caught = error\nassert caught.args == ('no',)",)
        )
        own = f"{imports}class Own({kind}): pass\ndef f(x): raise Own('no')"
        for right in (f"{imports}def f(x): raise {kind}('no')", own):
            assert grade(sandbox, right, suite).all_passed, kind
        for name in ("Other", kind.rpartition(".")[2]):
            other = f"class {name}(BaseException): pass\ndef f(x): raise {name}('no')"
            assert not grade(sandbox, other, suite).all_passed, kind
    test = "try:\n    f('x')\n    raise AssertionError\nexcept ValueError as error:\n    assert 'invalid literal' in str(error)"
    assert grade(sandbox, "def f(x): return int(x)", Suite((test,))).all_passed
    assert not grade(sandbox, "def f(x): raise ValueError", Suite((test,))).all_passed


CHANGES = {  # a function that changes its argument, with what stands in it before and after
    "a list": ("x.sort()", [3, 1, 2], [1, 2, 3]),
    "a list that shrinks": ("del x[1:]", [3, 1, 2], [3]),
    "lists of a list": ("[row.reverse() for row in x]", [[1, 2], [3, 4]], [[2, 1], [4, 3]]),
    "a list of a dict": ("x['a'].append(x.pop('b'))", {"a": [1], "b": 2}, {"a": [1, 2]}),
    "a dict": ("x.update(a=2)", {"a": 1, "b": 1}, {"a": 2, "b": 1}),
    "a set": ("x.discard(1)", {1, 2}, {2}),
    "bytes": ("x.append(66)", bytearray(b"A"), bytearray(b"AB")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_function_may_change_its_argument_in_place(sandbox: Sandbox, name: str) -> None:
    change, before, after = CHANGES[name]
    suite = Suite((f"x = {before!r}\nkept = x\nf(x)\nassert x == {after!r} and kept is x",))
    graded = grade(sandbox, f"def f(x): {change}", suite)
    assert graded.all_passed and not graded.forgeable, graded
    for wrong in ("def f(x): pass", "def f(x): return x", "pass", f"def f(x):\n    {change}\n    raise ValueError"):
        assert not grade(sandbox, wrong, suite).all_passed, wrong


def test_what_is_done_to_an_argument_is_kept_from_tests_that_look_at_the_result(sandbox: Sandbox) -> None:
    emptied = "def f(x):\n    x.clear()\n    return []"
    assert not grade(sandbox, emptied, Suite(("x = [2, 1]\nassert f(x) == sorted(x)",))).all_passed


OBJECTS = {  # what the program gives, a test of it, and programs that are wrong about it
    "a generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(600)) == list(range(600))", "def f(n): return iter([0])"),
    "a generator without an end": (
        "def f(n):\n    while True:\n        yield n\n        n += 1",
        "import itertools\ng = f(3)\nassert next(g) == 3 and list(itertools.islice(g, 3)) == [4, 5, 6]", "def f(n): yield n",
    ),
    "a view of a dict": ("def f(n): return {n: 1}.items()", "assert dict(f(2)) == {2: 1} and len(f(2)) == 1", "def f(n): return {n: 2}.items()"),
    "a deque": ("import collections\ndef f(n): return collections.deque([n])", "assert list(f(2)) == [2] and 2 in f(2) and f(2)[0] == 2", "def f(n): return [1]"),
    "a range": ("def f(n): return range(n)", "assert f(2) == range(2) and list(f(2)) == [0, 1]", "def f(n): return [0, 1]"),
    "a match": ("import re\ndef f(s): return re.match('a(b+)', s)", "assert f('abb').group(1) == 'bb' and not f('b')", "def f(s): return s"),
    "a fraction": ("from fractions import Fraction as F\ndef f(n): return F(1, n)", "from fractions import Fraction\nassert f(3) == Fraction(1, 3)", "def f(n): return 1 / n"),
    "a decimal": ("from decimal import Decimal as D\ndef f(n): return D('0.1') * n", "from decimal import Decimal\nassert f(3) == Decimal('0.3')", "def f(n): return n * 0.1"),
    "a date": ("import datetime as d\ndef f(day): return day + d.timedelta(1)", "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)", "def f(day): return day"),
    "a class of Python": ("def f(x): return type(x)", "assert f(3) is int and f('') == str", "def f(x): return int"),
    "a class as an argument": ("def f(x, kind): return [i for i in x if isinstance(i, kind)]", "assert f([1, 'a'], str) == ['a']", "def f(x, kind): return x"),
    "a method": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()",
        "s = Stack()\ns.push(1)\ns.push([2])\nassert s.items == [1, [2]] and s.pop() == [2] and s.pop() == 1\n"
        "try:\n    s.pop()\n    assert False\nexcept IndexError:\n    pass",
        "class Stack:\n    items = [1, [2]]\n    def push(self, x): pass\n    def pop(self): return [2]",
    ),
    "objects in a list": (
        "class P:\n    def __init__(self, a): self.a = a\ndef top(ps): return max(p.a for p in ps)", "assert top([P(2), P(5), P(3)]) == 5",
        "class P:\n    def __init__(self, a): self.a = a\ndef top(ps): return ps[0].a",
    ),
    "an object that is built on": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef length(n): return 0 if n is None else 1 + length(n.next)",
        "root = Node(1)\nroot.next = Node(2)\nassert length(root) == 2 and root.next.v == 2 and root.next.next is None",
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef length(n): return 1",
    ),
    "a text of an object": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __repr__(self): return f'V({self.x})'\n    def __len__(self): return self.x",
        "assert str(V(3)) == 'V(3)' and repr(V(2)) == 'V(2)' and len(V(4)) == 4 and not V(0)", "class V:\n    def __init__(self, x): self.x = x",
    ),
}  # fmt: skip
BELIEVE_ME = """
class Liar:
    def __init__(self, *a, **k): pass
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
    def __iter__(self): return iter([self, self])
    def __next__(self): return self
    def __len__(self): return 1
    def __eq__(self, o): return True
    def __bool__(self): return True
    def __getitem__(self, k): return self
    __hash__ = None
    __ne__ = __lt__ = __gt__ = __contains__ = __eq__
"""


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_no_plain_literal_is_graded_all_the_same(sandbox: Sandbox, name: str) -> None:
    right, test, wrong = OBJECTS[name]
    suite = Suite((test,))
    graded = grade(sandbox, right, suite)
    assert graded.all_passed and not graded.forgeable, graded
    liar = BELIEVE_ME + "\n".join(f"{called} = Liar()" for called in ("f", "Stack", "P", "top", "Node", "length", "V"))
    for program in (wrong, "pass", liar):
        graded = grade(sandbox, program, suite)
        assert not graded.all_passed and not graded.forgeable, (program, graded)


POINT = (
    "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
    "    def __add__(self, o): return P(self.x + o.x)\ndef make(x): return P(x)"
)


def test_objects_of_the_program_are_not_their_own_judge(sandbox: Sandbox) -> None:
    for test in (
        "assert P(1) + P(2) == P(3)",
        "assert make(1) == make(1) and make(1).x == 1",
        "assert P(2) in [P(1), P(2)] and P(2).x == 2",
    ):
        graded = grade(sandbox, POINT, Suite((test,)))
        assert not graded.all_passed and graded.compared and not graded.forgeable, test
        graded = grade(sandbox, POINT, Suite((test,), forgeable=True))
        assert graded.all_passed and graded.forgeable, "where the row allows it"


IN_PLACE_AND_MORE: dict[str, Any] = {
    "tests": ["x = [1, 1, 2]\nassert f(x) == 2 and x == [1, 2]"],
    "answer": "def f(x):\n    x[:] = sorted(set(x))\n    return len(x)",
}
COMPARED: dict[str, Any] = {"tests": ["assert P(1) + P(2) == P(3)"], "answer": POINT}
WRONG_ANSWER: dict[str, Any] = {**OF_F, "answer": "def f(x): return x"}
GRADED: list[dict[str, Any]] = [
    OF_F,
    {**OF_F, "answer": "the text 4"},
    {**OF_F, "answer": "Here:\n```python\ndef f(x): return 2 * x\n```"},
    IN_PLACE_AND_MORE,
    {**COMPARED, "allow_forgeable": True},
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("never ask the program", {"tests": ["assert 1 == 1"]}),
    ("are no Python", {"tests": ["assert ("]}),
    ("must be a text or .*at least one", {"tests": []}),
    ("must be true, false or absent", {**OF_F, "allow_forgeable": "yes"}),
    ("cannot run in the sandbox", {**OF_F, "test_imports": "import no_such_library"}),
    ("which a program can forge", {"tests": ["assert f(lambda x: x) == 4"]}),
    (r"does not pass its tests \(AssertionError", WRONG_ANSWER),
    ("does not pass .*no g", {"tests": ["assert g(2) == 4"], "answer": "def f(x): return 2 * x"}),
    ("does not pass .*compare an object of the program", COMPARED),
    ("does not pass", {"tests": ["assert f(2) is f(2) and f(2) == [4]"], "answer": "L = [4]\ndef f(x): return L"}),
]


def test_rows_that_cannot_be_graded_right_are_named_before_a_training() -> None:
    """By their number and with the reason; all others are graded right."""
    refused = rows_refused([*GRADED, *(row for _, row in REFUSED), *GRADED])
    assert list(refused) == list(range(len(GRADED), len(GRADED) + len(REFUSED)))
    for (why, row), said in zip(REFUSED, refused.values(), strict=True):
        assert re.search(why, said), (row, said)


def test_how_a_row_is_graded_is_found_by_its_own_answer() -> None:
    rows = [IN_PLACE_AND_MORE, {**COMPARED, "allow_forgeable": True}]
    assert score([row["answer"] for row in rows], rows) == [1.0, 1.0]
    assert score(["def f(x): return 2", COMPARED["answer"].replace("+ o.x", "")], rows) == [0.0, 0.0]


def test_an_episode_of_a_row_whose_own_answer_fails_is_dropped_and_counted() -> None:
    metrics: dict[str, float] = {}
    dropped, right = score(["def f(x): return 2 * x"] * 2, [WRONG_ANSWER, {**OF_F, "answer": ""}], metrics)
    assert isinstance(dropped, DropEpisode) and "its own answer does not pass" in dropped.reason and right == 1.0
    assert metrics["code_exec/refused"] == 0.5
