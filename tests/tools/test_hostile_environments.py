"""The hostile tools as methods of environments: each costs its call, or its own episode, and nothing else.

Beside every case another episode counts on in an instance of its own, before, meanwhile and after.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import all_end

from tests.support.tool_calls import attempt
from toolgrpo.episode.dropped import EnvironmentLost
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.tools import Toolbox, load_tools
from toolgrpo.tools.toolbox import ToolboxSession

pytestmark = pytest.mark.e2e

HOSTILE = Path(__file__).parents[1] / "fixtures" / "tools" / "hostile_environment.py"
TIMEOUT, DIED, RAISED = ToolErrorKind.TIMEOUT, ToolErrorKind.DIED, ToolErrorKind.RAISED
COSTS_THE_EPISODE = (TIMEOUT, DIED)


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    log_path = tmp_path_factory.mktemp("log") / "tools.log"
    with load_tools(HOSTILE, tool_timeout_s=60, workers=1, max_result_chars=1000, log_path=log_path) as box:
        yield box


async def call(session: ToolboxSession, name: str) -> ToolResult:
    (result,) = await session.call([attempt(name)])
    return result


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("regex_loop", TIMEOUT),
        ("async_block", TIMEOUT),
        ("segfault", DIED),
        ("exit_softly", RAISED),
        ("allocate", RAISED),
        ("print_forever", TIMEOUT),
        ("unserialisable", ToolErrorKind.BAD_RESULT),
        ("change_directory", None),
        ("close_descriptors", DIED),
    ],
)
def test_costs_its_own_call_or_episode(toolbox: Toolbox, name: str, error: ToolErrorKind | None) -> None:
    async def hostile() -> None:
        async with toolbox.session({}) as session:
            assert (await call(session, "bump")).content == "1"
            result = await call(session, name)
            assert result.error == error, result.content
            after, where = await call(session, "bump"), await call(session, "where")
            if error in COSTS_THE_EPISODE:
                assert after.error is DIED and "the environment is gone" in after.content
                with pytest.raises(EnvironmentLost, match=f"{name}: "):  # no number, and not 0
                    await session.reward()
            else:
                assert (after.content, where.content, await session.reward()) == ("2", os.getcwd(), 2.0)

    async def honest() -> None:
        async with toolbox.session({}) as session:
            counted = []
            for _ in range(5):
                counted.append((await call(session, "bump")).content)
                await asyncio.sleep(0.1)
            assert counted == ["1", "2", "3", "4", "5"]
            assert await session.reward() == 5.0

    async def both() -> None:
        await asyncio.gather(hostile(), honest())

    asyncio.run(both())


def test_a_child_that_a_method_started_ends_with_its_episode(toolbox: Toolbox) -> None:
    async def run() -> int:
        async with toolbox.session({}) as session:
            pid = int((await call(session, "leave_child")).content)
            assert (await call(session, "bump")).ok
            os.kill(pid, 0)  # it may stay while the episode runs
            return pid

    assert all_end(asyncio.run(run()))


def test_a_reward_and_a_close_that_hang_are_given_up() -> None:
    async def run() -> int:
        async with box.session({}) as session:
            assert session.observation == "ready"
            pid = int((await call(session, "process_id")).content)
            with pytest.raises(EnvironmentLost, match="reward: no answer within 3 s"):
                await session.reward()
            return pid

    async def closing() -> int:
        async with box.session({}) as session:
            return int((await call(session, "process_id")).content)

    with load_tools(environment=f"{HOSTILE}:Stuck", tool_timeout_s=3, workers=1) as box:
        assert all_end(asyncio.run(run()))
        assert all_end(asyncio.run(closing()))
