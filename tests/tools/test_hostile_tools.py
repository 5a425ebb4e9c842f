"""Hostile tools: each costs its own call, or as a method its own episode, and nothing else.

Every case runs beside two honest calls on the same single worker, and is followed by an honest call.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import all_end, has_ended

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.dropped import EnvironmentLost
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.toolbox import ToolboxSession

pytestmark = pytest.mark.e2e

HOSTILE = Path(__file__).parents[1] / "fixtures" / "tools" / "hostile_tools.py"
ENVIRONMENT = HOSTILE.with_name("hostile_environment.py")
TIMEOUT_S = 2.0
TIMEOUT, DIED, RAISED = ToolErrorKind.TIMEOUT, ToolErrorKind.DIED, ToolErrorKind.RAISED
NEVER_ANSWER = ("python_loop", "regex_loop", "sleep_forever", "async_sleep_forever", "async_block", "print_forever")


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "tools.log"


@pytest.fixture(scope="module")
def toolbox(log_path: Path) -> Iterator[Toolbox]:
    with load_tools(HOSTILE, tool_timeout_s=TIMEOUT_S, workers=1, max_result_chars=1000, log_path=log_path) as box:
        yield box


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        *((name, TIMEOUT, "no answer within 2 s") for name in NEVER_ANSWER),
        ("segfault", DIED, "SIGSEGV"),
        ("exit_hard", DIED, "exit code 3"),
        ("exit_softly", RAISED, "SystemExit: bye"),
        ("raise_base", RAISED, "BaseException: from below"),
        ("raise_unreadable", RAISED, "Unreadable"),
        ("recurse", RAISED, "RecursionError"),
        ("allocate", RAISED, "out of memory (a tool may use 4096 MB)"),
        ("return_too_much", None, "characters left out ...]"),
        ("unserialisable", ToolErrorKind.BAD_RESULT, "returned a lock"),
        ("circular", ToolErrorKind.BAD_RESULT, "returned a list"),
        ("change_directory", None, "/"),
        ("close_descriptors", DIED, ""),
        ("kill_parent", DIED, ""),
        ("lone_surrogate", None, "a?b"),
        ("fork_and_return", None, ""),
    ],
)
def test_costs_its_own_call_only(toolbox: Toolbox, name: str, error: ToolErrorKind | None, says: str) -> None:
    beside = [attempt("nap", seconds=0.4), attempt("length", words=["a", "b"])]
    before, hostile, after = call_all(toolbox, beside[0], attempt(name), beside[1])
    assert hostile.error == error and says in hostile.content and len(hostile.content) < 1200, hostile.content
    if name != "kill_parent":  # the one who starts workers is gone: whatever ran is gone with it
        assert (before.content, after.content) == ("slept 0.4", "2")
    assert run_tool(toolbox, {"name": "length", "arguments": {"words": ["a"] * 3}}).content == "3"
    assert run_tool(toolbox, {"name": "where"}).content == os.getcwd()


def test_nonsense_on_the_wire_is_the_death_of_its_worker_only(toolbox: Toolbox) -> None:
    (result,) = call_all(toolbox, attempt("write_nonsense"))
    assert result.error in (DIED, TIMEOUT)
    assert run_tool(toolbox, {"name": "polite", "arguments": {"text": "hello"}}).content == "hello"


def test_a_child_and_a_daemon_that_left_everything_end_with_the_call(toolbox: Toolbox, tmp_path: Path) -> None:
    assert all_end(int(run_tool(toolbox, {"name": "leave_child"}).content))
    path = tmp_path / "pid"
    assert run_tool(toolbox, {"name": "leave_daemon", "arguments": {"path": str(path)}}).content == "gone"
    assert all_end(int(path.read_text()))


def test_a_helper_that_may_stay_ends_with_its_worker() -> None:
    with load_tools(HOSTILE, tool_timeout_s=TIMEOUT_S, workers=1) as box:
        pid = int(run_tool(box, {"name": "start_helper"}).content)
        assert run_tool(box, {"name": "polite", "arguments": {"text": "x"}}).ok
        assert not has_ended(pid)
        assert run_tool(box, {"name": "exit_hard"}).error is DIED
        assert all_end(pid)


def test_a_call_that_freezes_its_worker_has_its_deadline_and_those_behind_it_do_not_wait(toolbox: Toolbox) -> None:
    """Sent first, so that it alone has begun when the worker falls silent: its own process decides, not the silence."""
    frozen, *others = call_all(toolbox, attempt("regex_loop"), *[attempt("length", words=["a"])] * 8)
    assert frozen.error is TIMEOUT, frozen.content
    assert [other.content for other in others] == ["1"] * 8


def test_isolated_calls_have_a_process_each(toolbox: Toolbox) -> None:
    results = call_all(toolbox, *(attempt("isolated_process_id") for _ in range(4)), attempt("process_id"))
    assert len({result.content for result in results}) == 5


def test_the_log_is_bounded_and_holds_what_tools_printed(toolbox: Toolbox, log_path: Path) -> None:
    assert run_tool(toolbox, {"name": "print_gigabyte"}).content == "printed"
    assert 0 < log_path.stat().st_size <= 17 * 1024 * 1024
    assert b"the limit of this log is reached" in log_path.read_bytes()[-200:]


def test_nothing_is_left_running_after_close() -> None:
    with load_tools(HOSTILE, tool_timeout_s=TIMEOUT_S, workers=2) as box:
        pid = int(run_tool(box, {"name": "process_id"}).content)
        call_all(box, attempt("sleep_forever"), attempt("leave_child"))
    assert all_end(pid)


# The same as methods of environments: beside every case another episode counts on in an instance of its own.


@pytest.fixture(scope="module")
def environments(log_path: Path) -> Iterator[Toolbox]:
    with load_tools(ENVIRONMENT, tool_timeout_s=60, workers=1, log_path=log_path.with_name("environments.log")) as box:
        yield box


async def call(session: ToolboxSession, name: str) -> ToolResult:
    (result,) = await session.call([attempt(name)])
    return result


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, TIMEOUT) for name in ("regex_loop", "async_block", "print_forever")),
        *((name, DIED) for name in ("segfault", "close_descriptors")),
        *((name, RAISED) for name in ("exit_softly", "allocate")),
        *(("unserialisable", ToolErrorKind.BAD_RESULT), ("change_directory", None)),
    ],
)
def test_costs_its_own_call_or_episode(environments: Toolbox, name: str, error: ToolErrorKind | None) -> None:
    async def hostile() -> None:
        async with environments.session({}) as session:
            assert (await call(session, "bump")).content == "1"
            result = await call(session, name)
            assert result.error == error, result.content
            after, where = await call(session, "bump"), await call(session, "where")
            if error in (TIMEOUT, DIED):
                assert after.error is DIED and "the environment is gone" in after.content
                with pytest.raises(EnvironmentLost, match=f"{name}: "):  # no number, and not 0
                    await session.reward()
            else:
                assert (after.content, where.content, await session.reward()) == ("2", os.getcwd(), 2.0)

    async def honest() -> None:
        async with environments.session({}) as session:
            counted = []
            for _ in range(5):
                counted.append((await call(session, "bump")).content)
                await asyncio.sleep(0.1)
            assert (counted, await session.reward()) == (["1", "2", "3", "4", "5"], 5.0)

    async def both() -> None:
        await asyncio.gather(hostile(), honest())

    asyncio.run(both())


def test_a_child_that_a_method_started_ends_with_its_episode(environments: Toolbox) -> None:
    with environments.session({}) as session:
        pid = int(session.run({"name": "leave_child"}).content)
        assert session.run({"name": "bump"}).ok
        os.kill(pid, 0)  # it may stay while the episode runs
    assert all_end(pid)


def test_a_reward_and_a_close_that_hang_are_given_up() -> None:
    async def run(*, rewarded: bool) -> int:
        async with box.session({}) as session:
            pid = int((await call(session, "process_id")).content)
            if rewarded:
                with pytest.raises(EnvironmentLost, match="reward: no answer within 3 s"):
                    await session.reward()
            return pid

    async def both() -> tuple[int, int]:
        return await asyncio.gather(run(rewarded=True), run(rewarded=False))

    with load_tools(environment=f"{ENVIRONMENT}:Stuck", tool_timeout_s=3, workers=1) as box:
        assert all_end(*asyncio.run(both()))


# Hundreds of episodes with random faults among them: no lost or wrong answer, nothing leaked, workers restored.

FAULTS = (
    "segfault", "exit_hard", "exit_softly", "raise_base", "recurse", "change_directory",
    "fork_and_return", "unserialisable", "leave_child", "close_descriptors", "sleep_forever", "regex_loop",
    "async_sleep_forever",
)  # fmt: skip


def soak(toolbox: Toolbox, episodes: int, seed: int) -> list[str]:
    """What honest episodes were told that is wrong."""
    rng = random.Random(seed)
    wrong: list[str] = []

    async def episode(i: int, fault: str | None, room: asyncio.Semaphore) -> None:
        async with room, toolbox.session({}) as session:
            if fault is not None:
                assert len(await session.call([attempt(fault)])) == 1
                return
            results = await session.call([attempt("length", words=["a"] * (i % 7)), attempt("nap", seconds=0.01)])
            if [result.content for result in results] != [str(i % 7), "slept 0.01"]:
                wrong.extend(result.content for result in results)

    async def run() -> None:
        room = asyncio.Semaphore(24)
        faults = [rng.choice(FAULTS) if rng.random() < 0.15 else None for _ in range(episodes)]
        await asyncio.gather(*(episode(i, fault, room) for i, fault in enumerate(faults)))

    asyncio.run(run())
    return wrong


def settled() -> tuple[int, int]:
    """The descriptors and threads of this process, once they have not changed for two seconds.

    Workers that were being replaced when the last answer came are there then.
    """
    deadline = time.monotonic() + 120
    seen: list[tuple[int, int]] = []
    while len(seen) < 20 or len(set(seen[-20:])) > 1:
        assert time.monotonic() < deadline, seen[-20:]
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        time.sleep(0.1)
    return seen[-1]


@pytest.mark.parametrize(("episodes", "rounds"), [(120, 2), pytest.param(1000, 8, marks=pytest.mark.slow)])
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_faults_cost_their_own_calls(tmp_path: Path, episodes: int, rounds: int) -> None:
    with load_tools(HOSTILE, workers=2, tool_timeout_s=1.0, log_path=tmp_path / "tools.log") as toolbox:
        assert soak(toolbox, episodes, seed=0) == []
        before = settled()
        for seed in range(1, rounds):
            assert soak(toolbox, episodes, seed) == []
        assert all(now <= then for now, then in zip(settled(), before, strict=True))
