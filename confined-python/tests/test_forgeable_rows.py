"""Tests that need objects of the solution: the tests alone decide it, and no exit passes for them."""

from __future__ import annotations

import pytest

from confined_python import Sandbox
from confined_python.grading import Suite, grade

STATEMENTS = {  # each needs a function of its own in the solution's process
    "a loop with a lambda": Suite(("for i in range(3):\n    assert apply(lambda x: x + i, i) == 2 * i",)),
    "a set-up in the test": Suite(("g = lambda x: x + 1\nassert apply(g, 3) == 4",)),
    "several": Suite(("assert apply(abs, -2) in (2,)", "f = abs\nassert apply(f, -3) == 3", "apply(abs, 1)")),
    "a check": Suite(
        ("def check(c):\n    for i in range(2):\n        assert c(lambda x: x, i) == i",), entry_point="apply"
    ),
}
RIGHT = "def apply(f, x):\n    return f(x)"
EXITS = {
    "SystemExit": "def apply(f, x): raise SystemExit(0)",
    "SystemExit without a code": "def apply(f, x): raise SystemExit",
    "sys.exit": "import sys\ndef apply(f, x): sys.exit(0)",
    "exit by the name": "def apply(f, x): exit(0)",
    "os._exit": "import os\ndef apply(f, x): os._exit(0)",
    "KeyboardInterrupt": "def apply(f, x): raise KeyboardInterrupt",
    "GeneratorExit": "def apply(f, x): raise GeneratorExit",
    "its own BaseException": "class E(BaseException): pass\ndef apply(f, x): raise E",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef apply(f, x): raise SystemExit(0)",
    "a thread that exits": "import threading, os, time\ndef apply(f, x):\n"
    "    threading.Thread(target=os._exit, args=(0,)).start()\n    time.sleep(60)",
    "a trace that exits": "import sys\ndef apply(f, x):\n    def leave(*a): raise SystemExit(0)\n    sys.settrace(leave)\n"
    "    return f(x) + 1",
    "assertions that hold": "import builtins\nbuiltins.AssertionError = type('E', (SystemExit,), {})\ndef apply(f, x): return 99",
    "a frame of its own": "import os, struct\nBODY = b'{\"status\":\"ok\",\"exit_code\":0,\"value\":true}'\n"
    "def apply(f, x):\n    os.write(4, struct.pack('!I', len(BODY)) + BODY)\n    return 99",
    "frames ahead of time": "import os, struct\nBODY = b'{\"status\":\"ok\",\"exit_code\":0,\"answer\":\"true\"}'\n"
    "for _ in range(50): os.write(4, struct.pack('!I', len(BODY)) + BODY)\ndef apply(f, x): return 99",
}  # fmt: skip


@pytest.mark.parametrize("suite", STATEMENTS.values(), ids=STATEMENTS)
def test_no_exit_passes_for_a_statement(strongest: Sandbox, suite: Suite) -> None:
    honest = grade(strongest, RIGHT, suite)
    assert honest.all_passed and honest.forgeable, honest
    for name, program in EXITS.items():
        if name == "frames ahead of time" and any("in (2,)" in test for test in suite.tests):
            continue  # a bare expression believes what the solution's process says: this is what forgeable means
        result = grade(strongest, program, suite, timeout=2.0)
        assert not result.all_passed and result.forgeable, (name, result)


LIAR = """
class Liar(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __bool__(self): return True
    __hash__ = int.__hash__
"""
DEEP = "def nest(n, x):\n    for _ in range(n): x = [x]\n    return x\n"
CHAIN = Suite(("assert abs(g(f(2)) - 5) < 1",))
LOOP = Suite(
    ("def check(c):\n    n = 0\n    while n < 100:\n        n += c(n)\n    assert abs(n - 100) < 1",),
    entry_point="step",
)
CHOOSING = {  # answers that an earlier judge turned away
    "a list nested 99 deep": (DEEP + LIAR + "def f(x): return nest(99, x)\ndef g(x): return Liar(7)", CHAIN),
    "a dict nested 98 deep": (DEEP + LIAR + "def f(x): return {1: nest(98, x)}\ndef g(x): return Liar(7)", CHAIN),
    "a tuple nested 100 deep": (LIAR + "def f(x):\n    for _ in range(100): x = (x,)\n    return x\ndef g(x): return Liar(7)", CHAIN),
    "an object": (LIAR + "def f(x): return object()\ndef g(x): return Liar(7)", CHAIN),
    "an exit": ("def f(x): return 1\ndef g(x): raise SystemExit(0)", CHAIN),
    "a loop without an end": (LIAR + "def step(n): return Liar(0)", LOOP),
    "a loop of many calls": (LIAR + "def step(n): return Liar(0) if n else 1 / 20", LOOP),
    "a loop that exits": ("def step(n):\n    if n > 10: raise SystemExit(0)\n    return 0.01", LOOP),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOOSING)
def test_no_answer_makes_tests_forgeable(strongest: Sandbox, name: str) -> None:
    program, suite = CHOOSING[name]
    result = grade(strongest, program, suite, timeout=1.0)
    assert not result.all_passed and not result.forgeable, result


def test_a_loop_may_make_as_many_calls_as_its_time_allows(strongest: Sandbox) -> None:
    loop = Suite(("for i in range(700):\n    assert f(i) == i * i",))
    result = grade(strongest, "def f(x): return x * x", loop, timeout=60.0)
    assert result.all_passed and not result.forgeable, result
    assert not grade(strongest, "def f(x): return x * x if x < 650 else 0", loop, timeout=60.0).all_passed


@pytest.mark.parametrize(
    ("tests", "is_forgeable"),
    [
        (("assert f(1) == 1", "assert f(f(1)) == 1", "assert f(str(f(1))) == '1'"), False),
        (("x = f(1)\nassert x + 1 == 2 and f([x, (x, {x: x})])",), False),
        (("import numpy\nassert f(numpy.array([f(1), 2])) is not None",), False),
        (("def helper(y):\n    return y\nassert f(helper(2)) == 2",), False),
        (("x = f(1)\nassert f(lambda: x)() == x",), True),
        (("assert f(1) == 1", "assert f(lambda: 1)() == 1"), True),
        (("class P:\n    pass\nassert f(P())",), True),
        (("assert f(1) == 1\nfor g in (len, abs):\n    assert f(g) is g",), True),
    ],
)
def test_the_tests_alone_decide_it(strongest: Sandbox, tests: tuple[str, ...], is_forgeable: bool) -> None:
    for program in ("def f(x): return x", "def f(x): raise SystemExit(0)", DEEP + "def f(x): return nest(99, 1)"):
        assert grade(strongest, program, Suite(tests)).forgeable is is_forgeable, program
    assert grade(strongest, "def f(x): return x", Suite(tests)).all_passed
    refused = grade(strongest, "def f(x): return x", Suite(tests), refuse_forgeable=True)
    assert refused.all_passed is not is_forgeable


def test_what_a_comparison_needs_of_the_set_up_is_there(strongest: Sandbox) -> None:
    suite = Suite(("assert depth(root) == EXPECTED",), setup="root = Node()\nEXPECTED = 1")
    assert grade(strongest, "class Node: pass\ndef depth(node): return 1", suite).all_passed
    assert not grade(strongest, "class Node: pass\ndef depth(node): return 2", suite).all_passed
