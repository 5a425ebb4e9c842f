"""DropEpisode crosses the process boundary: from a tool, and from every method of an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import load_tools

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:the model will see only")]

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

ENVIRONMENT = '''
from toolgrpo import DropEpisode

class Shop:
    def reset(self, where, **row):
        self.where = where
        if where == "reset":
            raise DropEpisode("closed")

    def buy(self) -> str:
        """Buy something."""
        if self.where == "method":
            raise DropEpisode("sold out")
        return "bought"

    def reward(self) -> float:
        if self.where == "reward":
            raise DropEpisode("no receipt")
        return 1.0

ENVIRONMENT = Shop
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
    path = tmp_path / "environment.py"
    path.write_text(ENVIRONMENT)
    expected: dict[str, Any] = {
        "reset": (StopReason.DROPPED, Drop(DropCause.ENVIRONMENT, "closed"), 0),
        "method": (StopReason.DROPPED, Drop(DropCause.TOOL, "buy: sold out"), 1),
        "reward": (StopReason.FINISHED, Drop(DropCause.ENVIRONMENT, "no receipt"), 2),
        "nowhere": (StopReason.FINISHED, None, 2),
    }
    with load_tools(path, workers=1) as box:
        for where, outcome in expected.items():
            episode = run_episode(calls("buy", "{}"), box, row={"where": where})
            assert (episode.stop_reason, episode.dropped, len(episode.turns)) == outcome
            assert episode.reward == (1.0 if where == "nowhere" else None)


def test_an_environment_that_cannot_be_reset_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "dies.py"
    path.write_text(
        "import os\nclass Dies:\n    def reset(self, **row):\n        os._exit(3)\n"
        "    def go(self) -> str:\n        '''Go.'''\nENVIRONMENT = Dies\n"
    )
    with load_tools(path, workers=1) as box:
        episode = run_episode(ScriptedEngine([]), box)
    assert episode.dropped is not None and episode.dropped.cause is DropCause.ENVIRONMENT_LOST
    assert "reset failed 2 times" in episode.dropped.reason and not episode.ids
