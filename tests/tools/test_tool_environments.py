"""Stateful tools: one instance an episode, contained, always closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tool_calls import attempt
from toolgrpo.episode.dropped import EnvironmentLost
from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.errors import PluginError
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.base import AfterTurn
from toolgrpo.tools.toolbox import ToolboxSession

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tools"


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    with load_tools(FIXTURES / "counter_environment.py", workers=1) as box:
        yield box


async def say(session: ToolboxSession, *attempts: CallAttempt) -> list[str]:
    return [result.content for result in await session.call(attempts)]


def test_its_public_methods_are_the_tools(toolbox: Toolbox) -> None:
    assert toolbox.names == ["bump", "die", "look", "process_id"]


def test_a_function_must_not_be_named_like_a_method() -> None:
    def bump() -> str:
        """Bump."""
        return ""

    with pytest.raises(PluginError, match="'bump'"):
        load_tools([bump], environment=f"{FIXTURES / 'counter_environment.py'}:Counter", workers=1)


def test_each_episode_has_an_instance_and_a_process_of_its_own(toolbox: Toolbox) -> None:
    async def episode(goal: int) -> tuple[Any, ...]:
        async with toolbox.session({"goal": goal, "prompt": [{"role": "user", "content": "x"}]}) as session:
            first = await say(session, attempt("bump"), attempt("bump", by="2"), attempt("look"))
            return session.observation, first, await session.reward(), (await say(session, attempt("process_id")))[0]

    async def both() -> list[tuple[Any, ...]]:
        return list(await asyncio.gather(episode(6), episode(12)))

    one, two = asyncio.run(both())
    assert one[:3] == ("count to 6", ["1", "3", "3 of 6"], 0.5)
    assert two[:3] == ("count to 12", ["1", "3", "3 of 12"], 0.25)
    assert one[3] != two[3]


def test_it_can_be_tried_by_hand(toolbox: Toolbox) -> None:
    bump, look = {"name": "bump", "arguments": {"by": 2}}, '{"name": "look"}'
    assert [r.content for r in run_tool(toolbox, [bump, bump, look], row={"goal": 6})] == ["2", "4", "4 of 6"]
    assert run_tool(toolbox, look, row={"goal": 6}).content == "0 of 6"
    with toolbox.session({"goal": 9}) as session:
        assert session.observation == "count to 9"
        assert session.run(bump).content == "2" and session.run(look).content == "2 of 9"
        assert session.run({"name": "jump"}).error is ToolErrorKind.UNKNOWN_TOOL


def test_a_row_that_lacks_what_reset_asks_for_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "goal.py").write_text(
        "class Goal:\n    def reset(self, goal: int, **row): self.goal = goal\n"
        '    def look(self) -> int:\n        "Look."\n        return self.goal\n\nENVIRONMENT = Goal\n'
    )
    with load_tools(tmp_path / "goal.py", workers=1) as box:
        with pytest.raises(PluginError, match=r"'goal'.*run_tool\(.*row="):
            run_tool(box, {"name": "look"})
        assert run_tool(box, {"name": "look"}, row={"goal": 3}).content == "3"


def test_close_always_runs(toolbox: Toolbox, tmp_path: Path) -> None:
    marker = tmp_path / "closed"

    async def fails() -> None:
        async with toolbox.session({"marker": str(marker)}) as session:
            await say(session, attempt("bump", by=4))
            raise KeyError("the episode failed")

    with pytest.raises(KeyError):
        asyncio.run(fails())
    assert marker.read_text() == "4"


def test_a_reset_that_raises_is_the_plugins_error(toolbox: Toolbox) -> None:
    async def run() -> None:
        async with toolbox.session({"goal": "bad"}):
            pass

    with pytest.raises(PluginError, match=r"Counter: reset raised .*\['goal'\].*this goal is bad"):
        asyncio.run(run())


def test_answers_of_an_environment_are_never_cached(tmp_path: Path) -> None:
    async def two() -> list[str]:
        async with box.session({"goal": 5}) as session:
            return await say(session, attempt("bump"), attempt("bump"))

    with load_tools(FIXTURES / "counter_environment.py", cache_tools=True, workers=1) as box:
        assert asyncio.run(two()) == ["1", "2"]
    path = tmp_path / "cached_environment.py"
    path.write_text(
        "from toolgrpo.tools import tool\n"
        "class E:\n    def reset(self, **row): ...\n"
        "    @tool(cache=True)\n    def go(self) -> str:\n        '''Go.'''\n"
        "ENVIRONMENT = E\n"
    )
    with pytest.raises(PluginError, match=r"'go'.*in_process"):
        load_tools(path)


def test_a_class_written_for_trl_works_unchanged() -> None:
    async def play(guess: int) -> tuple[Any, ...]:
        async with box.session({"prompt": "guess", "answer": 7}) as session:
            return session.observation, await say(session, attempt("guess", number=guess)), await session.reward()

    with load_tools(environment=f"{FIXTURES / 'trl_environment.py'}:Guess", workers=1) as box:
        assert box.names == ["guess"]
        assert asyncio.run(play(7)) == (None, ["right"], 1.0)
        assert asyncio.run(play(8)) == (None, ["wrong"], 0.0)


WALK = '''
class Walk:
    def reset(self, says="self.at / 4", over="self.at > 2", **row):
        self.at, self.says, self.over = 0, says, over
    def go(self, by: int) -> int:
        """Go.

        Args:
            by: How far.
        """
        self.at += by
        return self.at
    def step_reward(self):
        return eval(self.says)
    def state_key(self) -> str:  # asked for by earlier versions
        return f"at {self.at}"

class Ending(Walk):
    def episode_over(self):
        return eval(self.over)
'''


def test_it_gives_a_reward_after_the_calls_of_a_turn_and_one_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(WALK)
    with load_tools(environment=f"{tmp_path / 'walk.py'}:Walk", workers=1) as box:
        assert box.names == ["go"]

        async def episode(*steps: str, **row: str) -> list[AfterTurn]:
            async with box.session(row) as session:
                return [await _after(session, by) for by in steps]

        assert asyncio.run(episode("1", "2")) == [(0.25, False), (0.75, False)]
        for says, words in (
            ("None", "step_reward must be a finite number, got None"),
            ("float('nan')", "must be a finite number"),
            ("1 / 0", "step_reward failed: ZeroDivisionError"),
        ):
            with pytest.raises(PluginError, match=words):
                asyncio.run(episode("1", says=says))


async def _after(session: ToolboxSession, by: str) -> AfterTurn:
    await session.call([attempt("go", by=by)])
    return await session.after_turn()


def test_it_says_after_a_turn_that_the_episode_is_over(tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(WALK)
    engine = ScriptedEngine([ByteChat.say(f'call go {{"by": {by}}}') for by in (1, 2, 3)])
    with load_tools(environment=f"{tmp_path / 'walk.py'}:Ending", workers=1) as box:
        assert box.names == ["go"]
        done = run_episode(engine, box)
        with pytest.raises(PluginError, match="episode_over must be True or False, got perhaps"):
            run_episode(ScriptedEngine([ByteChat.say('call go {"by": 1}')]), box, row={"over": "'perhaps'"})
    assert done.stop_reason is StopReason.STOP_TOOL and [result.content for result in done.results] == ["1", "3"]
    assert [result.ends_episode for result in done.results] == [False, True] and len(engine.requests) == 2


CUSTOMER = """
import os

class Customer:
    def reset(self, says="self.left.pop(0)", **row):
        self.left, self.says = ["And a blue one?", None], says

    def next_user_message(self, answer: str):
        assert answer in ("red", "blue")
        return eval(self.says)

class Later(Customer):
    async def next_user_message(self, answer: str):
        return super().next_user_message(answer)
"""


def _replies(box: Toolbox, *answers: str, **row: str) -> list[str | None]:
    async def episode() -> list[str | None]:
        async with box.session(row) as session:
            return [await session.next_user_message(answer) for answer in answers]

    return asyncio.run(episode())


@pytest.mark.parametrize("name", ["Customer", "Later"])
def test_it_may_speak_for_the_user_needs_no_tools_then_and_fails_aloud(name: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(CUSTOMER)
    with load_tools(environment=f"{tmp_path / 'one.py'}:{name}", workers=1) as box:
        assert box.names == [] and box.speaks
        assert _replies(box, "red", "blue") == ["And a blue one?", None]
        failures: tuple[tuple[str, type[Exception], str], ...] = (
            ("3", PluginError, "next_user_message must return a string or None, got a int"),
            ("1 / 0", PluginError, "next_user_message failed: ZeroDivisionError"),
            ("os._exit(1)", EnvironmentLost, "next_user_message: "),
        )
        for says, error, words in failures:
            with pytest.raises(error, match=words):
                _replies(box, "red", says=says)


def test_next_user_message_takes_the_answer(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(CUSTOMER.replace("(self, answer: str)", "(self)"))
    with pytest.raises(PluginError, match=r"called with what the assistant said last.*answer: str\) -> str \| None"):
        load_tools(environment=f"{tmp_path / 'one.py'}:Customer", workers=1)


def test_an_environment_that_does_not_speak_is_not_asked(toolbox: Toolbox) -> None:
    assert not toolbox.speaks and _replies(toolbox, "red") == [None]


def test_generators_that_the_file_made_are_another_ones_in_each_episode(tmp_path: Path) -> None:
    """Each episode is a fork of one process, in which the file was imported."""
    (tmp_path / "drawing.py").write_text(
        "import random\nimport numpy\nrng, of_numpy = random.Random(), numpy.random.default_rng()\n"
        "seeded = numpy.random.default_rng(7)\n\n"
        "class Drawing:\n    own = random.Random(7)\n\n"
        "    def reset(self, **row):\n        return f'{rng.random()} {of_numpy.random()} {seeded.random()} {self.own.random()}'\n\n"
        "    def look(self) -> str:\n        'Look.'\n        return ''\n\n"
        "    def get_reward(self):\n        return True\n"
    )
    with load_tools(environment=f"{tmp_path / 'drawing.py'}:Drawing", workers=1) as box:
        seen = []
        for _ in range(3):
            with box.session({}) as session:
                seen.append(str(session.observation).split())
    assert [len(set(drawn)) for drawn in zip(*seen, strict=True)] == [3, 3, 1, 1], "those with a seed keep it"
