"""A recorded turn is void exactly where the turn itself is."""

from __future__ import annotations

import json

import pytest

from toolgrpo.report.episode_data import VOID, flags_of
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode
from toolgrpo.void_turns import is_void, is_void_record


@pytest.mark.parametrize(
    ("said", "void"), [("", True), ("It is 3.", False), ("call add {", True), ('call add {"a": 1, "b": 2}', False)]
)
def test_a_record_says_what_the_turn_says(said: str, void: bool) -> None:
    tools = ScriptedTools({"add": lambda a, b: str(a + b)})
    episode = run_episode(ScriptedEngine([ByteChat.say(said), ByteChat.say("3")]), tools, max_turns=2)
    record = json.loads(json.dumps(episode.to_record()))
    assert is_void(episode.turns[0]) == is_void_record(record["turns"][0]) == void
    assert bool(flags_of(record) & VOID) == void
