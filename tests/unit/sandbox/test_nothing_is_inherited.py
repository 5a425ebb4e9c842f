"""A program finds nothing of what was run, judged or asked before it, wherever it looks; forged answers earn nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from toolgrpo.rewards import get_reward
from toolgrpo.sandbox import Rung, Sandbox
from toolgrpo.sandbox.grading import grade
from toolgrpo.sandbox.ladder import probe
from toolgrpo.sandbox.suite import Suite

SEARCH = Path(__file__).with_name("searching.py").read_text()
FORGED = (
    SEARCH
    + r'''
known = {}
about = r"assert (?:candidate|%s)\\?\(([^()\n]{1,40})\) == (-?\d+)" % NAME

def solve(*args):
    """The answer that the tests give, wherever an assert about the function can be read."""
    if not known:
        known.update(searched=True)
        for texts in found(about).values():
            known.update((match.group(1), int(match.group(2))) for match in (re.fullmatch(about, text) for text in texts))
    return known.get(", ".join(map(repr, args)))
'''
)
PLANTED = "needle-[0-9a-f]{32}"
LOOK = f"{SEARCH}\nfound({PLANTED!r})"
HERE = f"{SEARCH}\nfreed = 'need' + 'le-' + 'ab' * 16\ndel freed\nfound({PLANTED!r}, ['heap'])"


def needle() -> str:
    return f"needle-{secrets.token_hex(16)}"


def of_all_kinds(sandbox: Sandbox) -> None:
    """What other conversations and tasks leave: runs, sessions, gradings, each with a needle of its own."""
    sandbox.run(f"kept = [{needle()!r}] * 9\nprint(kept)\n1 / 0", stdin=needle())
    with sandbox.session() as session:
        session.run(f"kept = {needle()!r}")
        session.evaluate([f"kept + {needle()!r}"])
    suite = Suite((f"assert f({needle()!r}) == 1, {needle()!r}",), setup=f"secret = {needle()!r}")
    assert grade(sandbox, f"def f(x): return 1  # {needle()}", suite).all_passed
    needs_objects = Suite((f"assert f(lambda x: x) == {needle()!r}",))
    assert not grade(sandbox, "def f(x): return 1", needs_objects).all_passed


def test_a_run_and_a_session_find_nothing_of_what_was_before(sandbox: Sandbox) -> None:
    there = sandbox.run(HERE, timeout=60.0)
    assert sandbox.rung is Rung.SECCOMP or there.value == {"heap": ["needle-" + "ab" * 16]}, "the search does find"
    for _ in range(2):
        of_all_kinds(sandbox)
        result = sandbox.run(LOOK, timeout=60.0)
        assert result.ok and result.value == {}, result
        of_all_kinds(sandbox)
        with sandbox.session() as session:
            assert session.run(LOOK, timeout=60.0).value == {}


def sockets(process: psutil.Process) -> set[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {link for link in links if link.startswith("socket:")}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looked at in /proc")
def test_what_forks_programs_holds_no_channel_and_hosts_none() -> None:
    """A program's parent knows its worker alone; a judge's worker is not a program's."""
    if probe(Rung.LANDLOCK) is not None:
        pytest.skip("inside bubblewrap the processes lie deeper")
    with Sandbox(workers=2) as sandbox, sandbox.session() as program, sandbox.judging() as judge:
        program.run("1")
        judge.run("1")
        workers = psutil.Process(sandbox._mother.pid).children()
        assert len(workers) == 3, "one rests, one has a program, one a judge"
        for worker in workers:
            (forker,) = worker.children()
            (tenant,) = forker.children()
            assert len(sockets(forker)) == 1 and not sockets(forker) & sockets(worker), (
                "one to the worker, whose end is another"
            )
            assert len(sockets(worker)) == 2 and not sockets(tenant)


def answer(program: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": f"Here it is.\n```python\n{program}\n```"}]


def forged(name: str) -> str:
    """Knows the function's name and nothing else."""
    return f"NAME = {name!r}\n{FORGED}\ndef {name}(*args):\n    return solve(*args)\n"


def mbpp(name: str, factor: int) -> dict[str, Any]:
    return {
        "tests": [f"assert {name}({given}) == {given * factor}" for given in (3, 14, 159)],
        "right": f"def {name}(x):\n    return {factor} * x",
        "wrong": f"def {name}(x):\n    return {factor} + x",
        "name": name,
    }


def humaneval(name: str, factor: int) -> dict[str, Any]:
    asserts = "".join(f"    assert candidate({given}) == {given * factor}\n" for given in (2, 71, 828))
    return {**mbpp(name, factor), "tests": f"def check(candidate):\n{asserts}", "entry_point": name}


@pytest.fixture
def with_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets how many workers the reward has, in a sandbox that it opens for this test."""
    module = import_module("toolgrpo.rewards.code_exec")
    shared = module._Shared
    monkeypatch.setattr(shared, "_sandbox", None)

    def choose(count: int) -> None:
        monkeypatch.setattr(module, "_WORKERS", count)

    yield choose
    if shared._sandbox is not None:
        shared._sandbox.close()


def scores(rows: list[tuple[dict[str, Any], str]]) -> list[float]:
    """Of one call of the reward: pairs of a task and an answer's program."""
    return get_reward("code_exec")(
        completions=[answer(program) for _, program in rows],
        tests=[task["tests"] for task, _ in rows],
        entry_point=[task.get("entry_point") for task, _ in rows],
    )


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_reward_pays_no_forged_answer_of_a_group(with_workers: Any, workers: int) -> None:
    """One honest answer that is wrong, one that is right, and six that search for the tests."""
    with_workers(workers)
    for task in (mbpp("scale", 7), humaneval("stretch", 11)):
        group = [task["wrong"], *[forged(task["name"])] * 3, task["right"], *[forged(task["name"])] * 3]
        assert scores([(task, program) for program in group]) == [0.0] * 4 + [1.0] + [0.0] * 3


def test_the_reward_pays_no_forged_answer_of_a_batch(with_workers: Any) -> None:
    with_workers(3)
    tasks = [mbpp("scale", 7), humaneval("stretch", 11), mbpp("widen", 13)]
    batch = [(task, forged(task["name"])) for task in tasks for _ in range(3)]
    assert scores(batch) == [0.0] * 9
    assert scores(batch) == [0.0] * 9, "nor where every test was judged before"
    assert scores([(task, task["right"]) for task in tasks]) == [1.0] * 3


def test_no_grading_pays_a_forged_answer(sandbox: Sandbox) -> None:
    """On each rung, one after the other and at the same time, with the right answer in between."""
    task = mbpp("scale", 7)
    suite = Suite(tuple(task["tests"]))
    programs = [forged("scale"), task["right"], forged("scale"), forged("scale")]
    expected = [program == task["right"] for program in programs]
    assert [grade(sandbox, program, suite).all_passed for program in programs] == expected
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda program: grade(sandbox, program, suite).all_passed, programs)) == expected
