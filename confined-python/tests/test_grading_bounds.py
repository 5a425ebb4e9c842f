"""What a program or its text can cost who grades it: bounded time, one deadline a grade, and no more than its own score."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from confined_python import Sandbox
from confined_python.grading import Suite, grade
from confined_python.literals import NotPlainError, decode, encode

MODULUS = 2**61 - 1  # integers that differ by a multiple of it have one hash


def cpu_s(call: Any) -> float:
    """What a call costs this thread, however busy the machine is."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


SLOW = {  # with a timeout of one second
    "slow calls": "import time\ndef f(x):\n    time.sleep(0.3)\n    return x",
    "calls that spin": "import time\ndef f(x):\n    end = time.monotonic() + 0.3\n    while time.monotonic() < end: pass\n    return x",
    "a slow load and slow calls": "import time\ntime.sleep(0.7)\ndef f(x):\n    time.sleep(0.7)\n    return x",
    "a call without an end": "def f(x):\n    while True: pass",
    "a process that ends": "import os\ndef f(x): os._exit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_one_deadline_holds_for_a_whole_grade(strongest: Sandbox, name: str) -> None:
    loop = Suite(("for i in range(500):\n    assert f(i) == i", "for i in range(500):\n    assert f(i) == i"))
    started = time.monotonic()
    assert not grade(strongest, SLOW[name], loop, timeout=1.0).all_passed
    assert time.monotonic() - started < 20.0, "500 calls of a third of a second take 150"


def test_a_deadline_holds_for_statements_in_the_solutions_process_too(strongest: Sandbox) -> None:
    tests = tuple(f"g = lambda y: y + {n}\nassert f(g) is g" for n in range(60))
    started = time.monotonic()
    graded = grade(strongest, "import time\ndef f(g):\n    time.sleep(0.5)\n    return g", Suite(tests), timeout=1.0)
    assert graded.forgeable and not graded.all_passed
    assert time.monotonic() - started < 15.0, "sixty statements take 30"


def test_what_passed_before_the_deadline_has_passed(strongest: Sandbox) -> None:
    suite = Suite(("assert f(0) == 0", "assert f(60) == 60", "assert f(0) == 0"))
    graded = grade(strongest, "import time\ndef f(x):\n    time.sleep(x)\n    return x", suite, timeout=3.0)
    assert graded.passed == (True, False, False)


def colliding_small(count: int) -> list[int]:
    """Integers that meet each other in a set's table by their way through it, though no two have one hash."""
    size = 1 << (3 * count).bit_length()
    slots, at = [], 1
    for _ in range(count // 2):
        slots.append(at)
        at = (5 * at + 1) % size
    return slots + [1 + size * n for n in range(1, count // 2 + 1)]


@pytest.mark.parametrize("count", [30_000, 120_000])
@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "tuples", "small integers", "nested"])
def test_values_chosen_to_collide_are_not_taken_in(kind: str, count: int) -> None:
    numbers = [{"i": hex(n * MODULUS)} for n in range(count)]
    form: Any = {
        "set": {"s": numbers},
        "frozenset": {"z": numbers},
        "dict": {"d": [[number, None] for number in numbers]},
        "tuples": {"s": [{"t": ["x", number]} for number in numbers]},
        "small integers": {"s": [{"i": hex(n)} for n in colliding_small(count)]},
        "nested": {"l": [{"s": numbers[start : start + 3000]} for start in range(0, count, 3000)]},
    }[kind]

    def take_in() -> None:
        with pytest.raises(NotPlainError, match="at once"):
            decode(form, most_hashed=5000)

    assert cpu_s(take_in) < 2.0, "30,000 took four seconds, four times as many sixteen times that"


def test_the_bound_on_what_is_hashed_leaves_honest_values() -> None:
    honest: list[Any] = [
        {f"name {n}": n for n in range(50_000)},
        set(range(4000)),
        {(x, y): x * y for x in range(20) for y in range(20)},
        [{1, 2}, frozenset({"a", b"b", 1.5, (1, None)})] * 10,
        list(range(100_000)),
        10**5000,
    ]
    for value in honest:
        assert decode(encode(value), most_hashed=5000) == value


def test_a_run_gives_no_value_that_collides_and_grading_takes_large_ones(strongest: Sandbox) -> None:
    hostile = f"[n * {MODULUS} for n in range(20_000)]"
    made = "class S(set):\n    def __init__(self, items): self.items = items\n    def __iter__(self): return iter(self.items)\n"
    answers: list[Any] = []
    assert cpu_s(lambda: answers.append(strongest.run(f"{made}S({hostile})"))) < 2.0
    assert answers[0].ok and not answers[0].value_is_plain and answers[0].value_repr
    large = Suite(("assert f(20000) == set(range(20000))", "assert len(f(g(f(9)))) == 9"))
    graded = grade(strongest, "def f(n): return set(range(n))\ndef g(s): return len(s)", large, timeout=60.0)
    assert graded.all_passed, graded
    program = f"{made}def f(n): return S({hostile})\ndef g(s): return 9"
    assert cpu_s(lambda: answers.append(grade(strongest, program, large, timeout=1.0))) < 2.0
    assert not answers[1].all_passed


def test_hostile_frames_are_answers_like_any_other(strongest: Sandbox) -> None:
    """What the solution's process says about a call, written by the program itself."""
    said = {
        "no object": "[]",
        "deep": "[" * 50_000,
        "an answer that is no text": '{"answer": {"i": "0x5"}}',
        "an answer that is no form": '{"answer": "5"}',
        "a deep answer": '{"answer": "' + "[" * 50_000 + '"}',
        "a question of its own": '{"need": ["f", "[]"], "verdicts": [["pass"]]}',
        "verdicts": '{"verdicts": [["pass"]], "status": "ok"}',
        "a broken row": '{"broken": "the row", "unsplittable": "it is"}',
        "an error that is no text": '{"error": ' + "[" * 900 + "]" * 900 + "}",
        "half a character": '{"answer": "\\\\"\\\\ud800\\\\""}',
    }
    for name, body in said.items():
        program = (
            f"import os, struct\nBODY = {body!r}.encode()\ndef f(x):\n"
            "    os.write(4, struct.pack('!I', len(BODY)) + BODY)\n    return 5"
        )
        graded = grade(strongest, program, Suite(("assert f(1) == 6",)), timeout=5.0)
        assert not graded.all_passed and not graded.forgeable, (name, graded)


def test_a_long_answer_of_many_objects_is_not_read(strongest: Sandbox) -> None:
    program = (
        "import os, struct\nBODY = b'{\"answer\":\"6\",\"j\":[' + b'{},' * 5_000_000 + b'{}]}'\ndef f(x):\n"
        "    os.write(4, struct.pack('!I', len(BODY)) + BODY)\n    return 6"
    )
    tracemalloc.start()
    try:
        assert not grade(strongest, program, Suite(("assert f(1) == 6",)), timeout=20.0).all_passed
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


ODD = (
    "\ud800", "\0", "x = '\ud83d'", "def f(x): return {'\ud800': 1}", "(" * 30_000, "1 if 1 else " * 20_000 + "1",
    "def f(x): raise Exception('\ud800' * 100_000)", "def f(x):\n class E(Exception):\n  def __str__(self): raise E\n raise E",
    "raise SystemExit('\ud800')", "raise SystemExit(10 ** 400)", "raise SystemExit(object())", "'a' * 10 ** 7", "10 ** 100_000",
    "x = []\nx.append(x)\nx", "x = {}\nx[1] = x\nx", "def f(x):\n a = []\n a.append(a)\n return a", "def f(x): return 10 ** 100_000",
    "def f(x): return float('nan')", "def f(x): return complex('nan')", "def f(x): return b'y' * 10 ** 6", "def f(x): return 'x' * 10 ** 7",
    "\u2028" * 100, "\x1b]0;x\x07", "class S(str):\n def __str__(self): return 5\ndef f(x): return S('2')",
    "class I(int):\n def __int__(self): return 'x'\ndef f(x): return I(2)", "# coding: utf-7\n+AAo-", "f = 5", "f = print", "del f",
    "def f(x): yield", "async def f(x): return 2", "import os\nos.close(4)", "import os\nos.close(3)", "import os\nos.close(1)",
)  # fmt: skip


def test_no_program_is_more_than_a_fail(strongest: Sandbox) -> None:
    """Half characters, depth, digits, width: nothing raises here, and the next program is run."""
    for program in ODD:
        assert not grade(strongest, program, Suite(("assert f(1) == 2",)), timeout=5.0).all_passed, program[:80]
        strongest.run(program, timeout=5.0)
    assert strongest.run("6 * 7").value == 42
