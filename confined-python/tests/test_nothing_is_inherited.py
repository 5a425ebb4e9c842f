"""A program finds nothing of what was run, judged or asked before it, wherever it looks; on each rung."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confined_python import Sandbox
from confined_python.grading import Suite, grade

SEARCH = Path(__file__).with_name("searching.py").read_text()
PLANTED = "needle-[0-9a-f]{32}"
LOOK = f"{SEARCH}\nfound({PLANTED!r})"
KEPT = "kept = ctypes.create_string_buffer(('need' + 'le-' + 'ab' * 16).encode(), 4096)"  # not freed: that may be used again
HERE = f"{SEARCH}\n{KEPT}\nfound({PLANTED!r}, ['heap'])"


def needle() -> str:
    return f"needle-{secrets.token_hex(16)}"


def of_all_kinds(sandbox: Sandbox) -> None:
    """What other conversations and tasks leave: runs, sessions, gradings, each with a needle of its own."""
    sandbox.run(f"kept = [{needle()!r}] * 9\nprint(kept)\n1 / 0", stdin=needle())
    with sandbox.session() as session:
        session.run(f"kept = {needle()!r}")
        session.run(f"kept + {needle()!r}")
    suite = Suite((f"assert f({needle()!r}) == 1, {needle()!r}",), setup=f"secret = {needle()!r}")
    assert grade(sandbox, f"def f(x): return 1  # {needle()}", suite).all_passed
    needs_objects = Suite((f"assert f(lambda x: x) == {needle()!r}",))
    assert not grade(sandbox, "def f(x): return 1", needs_objects).all_passed


def test_a_run_and_a_session_find_nothing_of_what_was_before(sandbox: Sandbox) -> None:
    there = sandbox.run(HERE, timeout=60.0)
    assert there.value == {"heap": ["needle-" + "ab" * 16]}, "the search does find"
    for _ in range(2):
        of_all_kinds(sandbox)
        result = sandbox.run(LOOK, timeout=60.0)
        assert result.ok and result.value == {}, result
        of_all_kinds(sandbox)
        with sandbox.session() as session:
            assert session.run(LOOK, timeout=60.0).value == {}


def forged(name: str) -> str:
    """Knows the function's name and nothing else."""
    return f"{SEARCH}\ndef {name}(*args):\n    return solved({name!r}, args)\n"


def test_no_grading_pays_a_forged_answer(sandbox: Sandbox) -> None:
    """On each rung, one after the other and at the same time, with the right answer in between."""
    suite = Suite(tuple(f"assert scale({given}) == {given * 7}" for given in (3, 14, 159)))
    right = "def scale(x):\n    return 7 * x"
    programs = [forged("scale"), right, forged("scale"), forged("scale")]
    expected = [program == right for program in programs]
    assert [grade(sandbox, program, suite).all_passed for program in programs] == expected
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda program: grade(sandbox, program, suite).all_passed, programs)) == expected
