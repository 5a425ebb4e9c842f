"""Agents of frameworks that nobody here wrote play episodes as they are."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from toolgrpo.gateway.agents import load_agent
from toolgrpo.rollout import Episode
from toolgrpo.rollout.scheduler import run_rollout
from toolgrpo.testing import ByteChat, ScriptedEngine, scripted_runner

pytestmark = pytest.mark.e2e
RECIPES = Path(__file__).parents[2] / "recipes" / "agents"


@pytest.mark.skipif(
    importlib.util.find_spec("smolagents") is None,
    reason="smolagents is not installed: pip install 'toolgrpo[dev]' brings it",
)
def test_an_agent_of_smolagents_plays_an_episode_whose_history_it_rewrites() -> None:
    turns = ['call add {"a": 19, "b": 23}', 'call final_answer {"answer": "42"}']
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns], max_model_len=50_000)
    player = load_agent(RECIPES / "with_smolagents.py")
    try:
        runner = replace(scripted_runner(engine), player=player)
        episode = Episode((), row={"prompt": "What is 19 plus 23?", "answer": 42})
        (done,) = run_rollout([episode], runner).trajectories
    finally:
        player.close()
    assert (done.reward, done.dropped) == (1.0, None)
    assert [(call.name, dict(call.arguments)) for call in done.calls] == [
        ("add", {"a": 19, "b": 23}),
        ("final_answer", {"answer": "42"}),
    ]
    # It says its own calls again in words of its own, so that each step begins a segment.
    assert len(done.segments) == 2 and done.metadata["gateway"]["forks"] == {"history": 1}
    for segment, request, text in zip(done.segments, engine.requests, turns, strict=True):
        assert segment.prompt_ids == tuple(request.ids)  # trained on is exactly what was asked
        assert ByteChat.text(segment.ids) == f"{text}|" and set(segment.mask) == {1}
