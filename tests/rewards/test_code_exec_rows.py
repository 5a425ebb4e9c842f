"""Rows of `code_exec`, as classes: nothing is paid for nothing, and rows that would pay for it are refused by their number."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from toolgrpo.errors import RewardError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.unscored import Score
from toolgrpo.sandbox import Sandbox
from toolgrpo.sandbox.grading import grade
from toolgrpo.sandbox.grading.split_plan import Suite

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
    check = {"tests": "def check(candidate):\n    assert candidate([1, 2]) == sum([1, 2])", "entry_point": "sum"}
    assert score(["def sum(x): return 0", "def sum(x): return x[0] + x[1]"], [check] * 2) == [0.0, 1.0]


def test_a_module_that_only_the_program_imports_is_the_tests_too() -> None:
    rows = [{"tests": ["assert size((1, 2)) == sys.getsizeof((1, 2))"]}] * 3
    lie = "class sys:\n    getsizeof = staticmethod(lambda x: 0)\ndef size(x): return 0"
    assert score(["import sys\ndef size(x): return sys.getsizeof(x)", "pass", lie], rows) == [1.0, 0.0, 0.0]


ABOUT_NOTHING: dict[str, dict[str, Any]] = {
    "no call": {"tests": ["assert 1 + 1 == 2"]},
    "no call, with an entry point": {"tests": "def check(candidate):\n    assert 1 + 1 == 2", "entry_point": "f"},
    "calls of Python's own": {"tests": ["assert len(str(5)) == 1"]},
    "calls of the tests' own": {"tests": ["g = lambda x: x\nassert g(2) == 2"]},
    "only definitions": {"tests": ["def test_it():\n    assert f(1) == 2"]},
    "a class of tests": {"tests": ["class TestIt:\n    def test(self):\n        assert f(1) == 2"]},
    "an empty check": {"tests": "def check(candidate):\n    pass", "entry_point": "f"},
    "a check without asserts": {"tests": "def check(candidate):\n    for n in range(3):\n        candidate(n)", "entry_point": "f"},
    "a check that compares and goes on": {"tests": "def check(candidate):\n    candidate(2) == 4", "entry_point": "f"},
    "asserts that always hold": {"tests": ["assert f(2) or True", "assert (f(2) == 4, 'a tuple')"]},
    "a check that swallows": {
        "tests": "def check(candidate):\n    try:\n        assert candidate(2) == 4\n    except Exception:\n        pass", "entry_point": "f",
    },
    "a rebound entry point": {"tests": ["f = lambda x: 2 * x", "assert f(2) == 4"]},
    "a rebound entry point, named": {"tests": ["def f(x):\n    return 2 * x\nassert f(2) == 4"], "entry_point": "f"},
    "a rebound candidate": {
        "tests": "def check(candidate):\n    candidate = lambda x: 2 * x\n    assert candidate(2) == 4", "entry_point": "f",
    },
    "a set-up that defines it": {"tests": ["assert f(2) == 4"], "test_setup_code": "def f(x):\n    return 2 * x"},
    "imports that define it": {"tests": ["assert sqrt(4) == 2"], "test_imports": "from math import sqrt"},
}  # fmt: skip


@pytest.mark.parametrize("name", ABOUT_NOTHING)
def test_a_row_whose_tests_ask_nothing_is_refused_by_its_number(name: str) -> None:
    rows: list[dict[str, Any]] = [{"tests": ["assert f(2) == 4"]}, ABOUT_NOTHING[name]]
    for program in ("pass", "def f(x): return 2 * x"):
        with pytest.raises(RewardError, match=r"row 1: the tests of a code task (never ask the program|pass whatever)"):
            score([program] * 2, rows)


@pytest.mark.parametrize("tests", ["assert (", "def check():\n    pass", "def test(f):\n    assert f(1) == 2"])
def test_tests_that_cannot_be_read_are_refused_by_their_number(tests: str) -> None:
    with pytest.raises(RewardError, match="row 1: the tests of"):
        score(["pass"] * 2, [{"tests": ["assert f(2) == 4"]}, {"tests": tests, "entry_point": "f"}])


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
