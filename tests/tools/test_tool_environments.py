"""Stateful tools: one instance an episode, contained, always closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.dropped import Drop, DropCause, EnvironmentLost
from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.errors import PluginError
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import Toolbox, load_tools, run_tool

pytestmark = pytest.mark.filterwarnings("ignore:the model will see only")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "tools"


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    with load_tools(FIXTURES / "counter_environment.py", workers=1) as box:
        yield box


async def episode(box: Toolbox, row: dict[str, Any], *attempts: CallAttempt) -> tuple[Any, ...]:
    """The first observation, the answers to these calls of one turn, and the reward."""
    async with box.session(row) as session:
        results = await session.call(attempts)
        return session.observation, [result.content for result in results], await session.reward()


def written(folder: Path, text: str, name: str = "") -> str:
    """An environment's file, and the class in it that is meant."""
    (folder / "one.py").write_text(text)
    return f"{folder / 'one.py'}:{name}"


def test_a_function_must_not_be_named_like_a_method() -> None:
    def bump() -> str:
        """Bump."""
        return ""

    with pytest.raises(PluginError, match="'bump'"):
        load_tools([bump], environment=f"{FIXTURES / 'counter_environment.py'}:Counter", workers=1)


def test_each_episode_has_an_instance_and_a_process_of_its_own(toolbox: Toolbox) -> None:
    async def both() -> list[tuple[Any, ...]]:
        calls = attempt("bump"), attempt("bump", by="2"), attempt("look"), attempt("process_id")
        return await asyncio.gather(*(episode(toolbox, {"goal": goal, "prompt": "x"}, *calls) for goal in (6, 12)))

    assert toolbox.names == ["bump", "die", "look", "process_id"], "its public methods"
    one, two = asyncio.run(both())
    assert one[1].pop() != two[1].pop()
    assert one == ("count to 6", ["1", "3", "3 of 6"], 0.5)
    assert two == ("count to 12", ["1", "3", "3 of 12"], 0.25)


def test_it_can_be_tried_by_hand(toolbox: Toolbox) -> None:
    bump, look = {"name": "bump", "arguments": {"by": 2}}, '{"name": "look"}'
    assert [r.content for r in run_tool(toolbox, [bump, bump, look], row={"goal": 6})] == ["2", "4", "4 of 6"]
    assert run_tool(toolbox, look, row={"goal": 6}).content == "0 of 6"
    with toolbox.session({"goal": 9}) as session:
        assert session.observation == "count to 9"
        assert session.run(bump).content == "2" and session.run(look).content == "2 of 9"
        assert session.run({"name": "jump"}).error is ToolErrorKind.UNKNOWN_TOOL


def test_state_may_belong_to_its_thread(tmp_path: Path) -> None:
    """A connection of sqlite3 does. Each reply was sent a moment before its thread was free, which took another at times."""
    text = (
        "import sqlite3\nclass Shop:\n    def reset(self, **row): self.shop = sqlite3.connect(':memory:')\n"
        '    def count(self) -> int:\n        "Count."\n'
        "        return self.shop.execute('select count(*) from sqlite_master').fetchone()[0]\n"
    )
    count = {"name": "count", "arguments": {}}
    with load_tools(environment=written(tmp_path, text, "Shop"), workers=1) as box:
        assert {result.content for _ in range(10) for result in run_tool(box, [count] * 100, row={})} == {"0"}


def test_a_tool_has_the_name_of_its_method(tmp_path: Path) -> None:
    """Not that of the function behind it: `wrapper` was offered and could not be called, and an alias was refused."""
    text = (
        "def doubled(method):\n    async def wrapper(self, by: int, *, to: int = 0) -> int:\n"
        '        "Bump."\n        return 2 * method(self, by) + to\n    return wrapper\n'
        "class Counter:\n    def reset(self, **row): self.count = 0\n    @doubled\n"
        "    def bump(self, by: int) -> int:\n        self.count += by\n        return self.count\n    more = bump\n"
    )
    calls = [{"name": name, "arguments": {"by": 1}} for name in ("bump", "more")]
    with load_tools(environment=written(tmp_path, text, "Counter"), workers=1) as box:
        assert box.names == ["bump", "more"]
        assert [result.content for result in run_tool(box, calls, row={})] == ["2", "4"]


def test_what_it_says_can_be_encoded(tmp_path: Path) -> None:
    """As results can: half a character ended the run with a UnicodeEncodeError of the tokenizer."""
    text = (
        "class Half:\n    def reset(self, **row): return 'a\\ud83d'\n"
        "    def next_user_message(self, answer): return None if answer == 'bye' else 'b\\ud83d'\n"
    )
    engine = ScriptedEngine([ByteChat.say("hi"), ByteChat.say("bye")])
    with load_tools(environment=written(tmp_path, text, "Half"), workers=1) as box:
        trajectory = run_episode(engine, box)
    assert trajectory.metadata["observation"] == "a?" and ByteChat.text(trajectory.ids) == "hi|>user:b?|>bye|"


def test_an_environment_is_closed_beside_a_call_that_does_not_end(tmp_path: Path) -> None:
    text = (
        f"import time\nclass Slow:\n    def reset(self, **row): pass\n    def close(self): open({str(tmp_path / 'closed')!r}, 'w')\n"
        '    def nap(self):\n        "Nap."\n        time.sleep(1000)\n'
    )
    engine = ScriptedEngine([ByteChat.say("call nap {}")])
    with load_tools(environment=written(tmp_path, text, "Slow"), workers=1) as box:
        trajectory = run_episode(engine, box, deadline_s=2.0)
    assert trajectory.stop_reason is StopReason.DEADLINE and (tmp_path / "closed").exists()


def test_a_row_that_lacks_what_reset_asks_for_is_told_so(tmp_path: Path) -> None:
    text = (
        "class Goal:\n    def reset(self, goal: int, **row): self.goal = goal\n"
        '    def look(self) -> int:\n        "Look."\n        return self.goal\n'
    )
    with load_tools(environment=written(tmp_path, text, "Goal"), workers=1) as box:
        with pytest.raises(PluginError, match=r"'goal'.*run_tool\(.*row="):
            run_tool(box, {"name": "look"})
        assert run_tool(box, {"name": "look"}, row={"goal": 3}).content == "3"


def test_what_init_asks_for_is_no_column(tmp_path: Path) -> None:
    text = (
        "class Goal:\n    def __init__(self, size): self.size = size\n    def reset(self, **row): pass\n"
        '    def look(self) -> int:\n        "Look."\n        return self.size\n'
    )
    said = r"'size'.* made without arguments: give those of __init__ defaults"
    with (
        load_tools(environment=written(tmp_path, text, "Goal"), workers=1) as box,
        pytest.raises(PluginError, match=said),
    ):
        run_tool(box, {"name": "look"}, row={"size": 3})


def test_close_always_runs(toolbox: Toolbox, tmp_path: Path) -> None:
    marker = tmp_path / "closed"
    with pytest.raises(KeyError), toolbox.session({"marker": str(marker)}) as session:
        session.run({"name": "bump", "arguments": {"by": 4}})
        raise KeyError("the episode failed")
    assert marker.read_text() == "4"


def test_a_value_of_its_object_must_not_hide_a_method(tmp_path: Path) -> None:
    text = (
        "class E:\n    def reset(self, hide='', later='', **row):\n        self.later = later\n        vars(self).update({hide: 0.0})\n"
        "    def look(self) -> str:\n        'Look.'\n        vars(self).update({self.later: 0.0})\n        return 'x'\n"
        "    def reward(self): return 1.0\n"
    )
    with load_tools(environment=written(tmp_path, text, "E"), workers=1) as box:
        for name in ("look", "reward"):
            with pytest.raises(PluginError, match=f"self.{name} is set to a float"):
                asyncio.run(episode(box, {"hide": name}))
        with pytest.raises(PluginError, match="E: reward failed: TypeError"):
            asyncio.run(episode(box, {"later": "reward"}, attempt("look")))
        assert asyncio.run(episode(box, {}, attempt("look"))) == (None, ["x"], 1.0)


def test_a_reset_that_raises_is_the_plugins_error(toolbox: Toolbox) -> None:
    with pytest.raises(PluginError, match=r"Counter: reset raised .*\['goal'\].*this goal is bad"):
        asyncio.run(episode(toolbox, {"goal": "bad"}))


def test_answers_of_an_environment_are_never_cached(tmp_path: Path) -> None:
    with load_tools(FIXTURES / "counter_environment.py", cache_tools=True, workers=1) as box:
        assert asyncio.run(episode(box, {"goal": 2}, attempt("bump"), attempt("bump")))[1] == ["1", "2"]
    text = (
        "from toolgrpo.tools import tool\nclass E:\n    def reset(self, **row): ...\n"
        "    @tool(cache=True)\n    def go(self) -> str:\n        '''Go.'''\n"
    )
    with pytest.raises(PluginError, match=r"'go'.*in_process"):
        load_tools(environment=written(tmp_path, text, "E"))


def test_a_class_written_for_trl_works_unchanged() -> None:
    with load_tools(environment=f"{FIXTURES / 'trl_environment.py'}:Guess", workers=1) as box:
        assert box.names == ["guess"]
        for number, said, reward in ((7, "right", 1.0), (8, "wrong", 0.0)):
            played = episode(box, {"prompt": "guess", "answer": 7}, attempt("guess", number=number))
            assert asyncio.run(played) == (None, [said], reward)


WALK = '''
class Walk:
    def reset(self, says="self.at / 4", over="self.at > 2", **row):
        self.at, self.says, self.over = 0, says, over
    def go(self, by: int) -> int:
        """Go."""
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
    with load_tools(environment=written(tmp_path, WALK, "Walk"), workers=1) as box:
        assert box.names == ["go"]

        with box.session({}) as session:
            for by, reward in ((1, 0.25), (2, 0.75)):
                session.run({"name": "go", "arguments": {"by": by}})
                assert box.wait_for(session.after_turn()) == (reward, False)
        for says, words in (("None", "number, got None"), ("float('nan')", "number"), ("1 / 0", "ZeroDivisionError")):
            with box.session({"says": says}) as session, pytest.raises(PluginError, match=f"step_reward .*{words}"):
                box.wait_for(session.after_turn())


def test_it_says_after_a_turn_that_the_episode_is_over(tmp_path: Path) -> None:
    engine = ScriptedEngine([ByteChat.say(f'call go {{"by": {by}}}') for by in (1, 2, 3)])
    with load_tools(environment=written(tmp_path, WALK, "Ending"), workers=1) as box:
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
    with box.session(row) as session:
        return [box.wait_for(session.next_user_message(answer)) for answer in answers]


@pytest.mark.parametrize("name", ["Customer", "Later"])
def test_it_may_speak_for_the_user_needs_no_tools_then_and_fails_aloud(name: str, tmp_path: Path) -> None:
    with load_tools(environment=written(tmp_path, CUSTOMER, name), workers=1) as box:
        assert box.names == [] and box.speaks
        assert _replies(box, "red", "blue") == ["And a blue one?", None]
        for says, words in (("3", "got a int"), ("1 / 0", "ZeroDivisionError")):
            with pytest.raises(PluginError, match=f"next_user_message .*{words}"):
                _replies(box, "red", says=says)
        with pytest.raises(EnvironmentLost, match="next_user_message: "):
            _replies(box, "red", says="os._exit(1)")


def test_it_must_take_the_answer_and_one_that_does_not_speak_is_not_asked(toolbox: Toolbox, tmp_path: Path) -> None:
    without = written(tmp_path, CUSTOMER.replace("(self, answer: str)", "(self)"), "Customer")
    with pytest.raises(PluginError, match=r"answer: str\) -> str \| None"):
        load_tools(environment=without, workers=1)
    assert not toolbox.speaks and _replies(toolbox, "red") == [None]


def test_generators_that_the_file_made_are_another_ones_in_each_episode(tmp_path: Path) -> None:
    """Each episode is a fork of one process, in which the file was imported."""
    text = (
        "import random\nimport numpy\nrng, of_numpy = random.Random(), numpy.random.default_rng()\n"
        "seeded = numpy.random.default_rng(7)\n\nclass Drawing:\n    own = random.Random(7)\n\n"
        "    def reset(self, **row):\n        return f'{rng.random()} {of_numpy.random()} {seeded.random()} {self.own.random()}'\n\n"
        "    def look(self) -> str:\n        'Look.'\n        return ''\n"
    )
    seen = []
    with load_tools(environment=written(tmp_path, text, "Drawing"), workers=1) as box:
        for _ in range(3):
            with box.session({}) as session:
                seen.append(str(session.observation).split())
    assert [len(set(drawn)) for drawn in zip(*seen, strict=True)] == [3, 3, 1, 1], "those with a seed keep it"


# DropEpisode crosses the process boundary: from a tool, and from every method of an environment.

TOOLS = '''
from toolgrpo import DropEpisode
from toolgrpo.tools import tool

def fetch(page: str) -> str:
    """Fetch a page."""
    raise DropEpisode(f"{page}: no network")

async def fetch_later(page: str) -> str:
    """Fetch a page later."""
    raise DropEpisode(f"{page}: no network")

@tool(in_process=True)
def fetch_here(page: str) -> str:
    """Fetch a page in the trainer."""
    raise DropEpisode(f"{page}: no network")

TOOL_FUNCTIONS = [fetch, fetch_later, fetch_here]
'''

SHOP = '''
import os
from toolgrpo import DropEpisode

class Shop:
    def reset(self, where, **row):
        self.where = where
        if where == "reset":
            raise DropEpisode("closed")
        if where == "lost":
            os._exit(3)

    def buy(self) -> str:
        """Buy something."""
        if self.where == "method":
            raise DropEpisode("sold out")
        return "bought"

    def reward(self) -> float:
        if self.where == "reward":
            raise DropEpisode("no receipt")
        return 1.0
'''


def calls(name: str, arguments: str) -> ScriptedEngine:
    return ScriptedEngine([ByteChat.say(f"call {name} {arguments}"), ByteChat.say("done")])


def test_a_tool_ends_its_episode_unscored(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    with load_tools(path, workers=1, cache_tools=True) as box:
        for name in ("fetch", "fetch_later", "fetch_here"):
            episode = run_episode(calls(name, '{"page": "a"}'), box)
            assert episode.stop_reason is StopReason.DROPPED and len(episode.turns) == 1
            assert episode.dropped == Drop(DropCause.TOOL, f"{name}: a: no network")
            assert episode.turns[0].results[0].error is ToolErrorKind.DROPPED
        (result, _) = call_all(box, attempt("fetch", page="a"), attempt("fetch_later", page="b"))
        assert not result.cached  # a drop is not an answer


def test_an_environment_may_drop_its_episode_wherever_it_is(tmp_path: Path) -> None:
    expected: dict[str, Any] = {
        "reset": (StopReason.DROPPED, Drop(DropCause.ENVIRONMENT, "closed"), 0),
        "method": (StopReason.DROPPED, Drop(DropCause.TOOL, "buy: sold out"), 1),
        "reward": (StopReason.FINISHED, Drop(DropCause.ENVIRONMENT, "no receipt"), 2),
        "nowhere": (StopReason.FINISHED, None, 2),
    }
    with load_tools(environment=written(tmp_path, SHOP, "Shop"), workers=1) as box:
        for where, outcome in expected.items():
            episode = run_episode(calls("buy", "{}"), box, row={"where": where})
            assert (episode.stop_reason, episode.dropped, len(episode.turns)) == outcome
            assert episode.reward == (1.0 if where == "nowhere" else None)
        lost = run_episode(ScriptedEngine([]), box, row={"where": "lost"})
    assert lost.dropped is not None and lost.dropped.cause is DropCause.ENVIRONMENT_LOST
    assert "reset failed 2 times" in lost.dropped.reason and not lost.ids
