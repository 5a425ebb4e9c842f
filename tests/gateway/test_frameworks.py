"""Agents of frameworks that nobody here wrote play episodes as they are."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.gateway import visit
from tests.support.rollouts import run_together
from toolgrpo.engines.base import SampleRequest
from toolgrpo.gateway.agents import load_agent
from toolgrpo.rollout import Episode
from toolgrpo.testing import ByteChat, ScriptedEngine, scripted_runner

pytestmark = pytest.mark.e2e
RECIPES = Path(__file__).parents[2] / "recipes" / "agents"


def _python_with(package: str) -> str | None:
    """Return a Python that has a package: this one, or that of TOOLGRPO_PYTHON_<PACKAGE>."""
    named = os.environ.get(f"TOOLGRPO_PYTHON_{package.upper()}")
    return named or (sys.executable if importlib.util.find_spec(package) is not None else None)


def _missing(install: str, package: str) -> str:
    return (
        f"NOT PROVEN HERE: {package} is not installed. It wants other versions of what we have, so give it a folder of its "
        f"own (python -m venv V; V/bin/pip install {install}) and set TOOLGRPO_PYTHON_{package.upper()}=V/bin/python"
    )


@pytest.mark.skipif(
    importlib.util.find_spec("smolagents") is None,
    reason="smolagents is not installed: pip install 'toolgrpo[dev]' brings it",
)
def test_an_agent_of_smolagents_plays_an_episode_whose_history_it_rewrites() -> None:
    turns = ['call add {"a": 19, "b": 23}', 'call final_answer {"answer": "42"}']
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns], max_model_len=50_000)
    with closing(load_agent(RECIPES / "with_smolagents.py")) as player:
        runner = scripted_runner(engine, player=player)
        episode = Episode((), row={"prompt": "What is 19 plus 23?", "answer": 42})
        (done,) = run_together([episode], runner).trajectories
    assert (done.reward, done.dropped) == (1.0, None)
    expected = [("add", {"a": 19, "b": 23}), ("final_answer", {"answer": "42"})]
    assert [(call.name, dict(call.arguments)) for call in done.calls] == expected
    # It says its own calls again in words of its own, so that each step begins a segment.
    assert len(done.segments) == 2 and done.metadata["gateway"]["forks"] == {"history": 1}
    for segment, request, text in zip(done.segments, engine.requests, turns, strict=True):
        assert segment.prompt_ids == tuple(request.ids)  # trained on is exactly what was asked
        assert ByteChat.text(segment.ids) == f"{text}|" and set(segment.mask) == {1}


VERIFIERS, INSPECT = map(_python_with, ("verifiers", "inspect_ai"))


@pytest.mark.slow
@pytest.mark.skipif(VERIFIERS is None, reason=_missing("verifiers==0.4.0", "verifiers"))
def test_a_rollout_of_verifiers_is_an_episode_with_its_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: SampleRequest, number: int) -> list[int]:
        asked = ByteChat.text(request.ids).partition("user:")[2]
        if "tool:" not in asked:
            return ByteChat.say('call add {"a": 19, "b": 23}')
        return ByteChat.say("It is 42." if "right" in asked else "It is 41.")

    monkeypatch.setenv("VERIFIERS_PYTHON", str(VERIFIERS))
    engine = ScriptedEngine(script, max_model_len=50_000)
    rows = [{"prompt": [{"role": "user", "content": f"19 plus 23, {how}"}], "answer": 42} for how in ("wrong", "right")]
    with closing(load_agent(RECIPES / "with_verifiers.py")) as player:
        runner = scripted_runner(engine, player=player, max_completion_length=20_000)
        done = run_together([Episode((), row=row) for row in rows], runner).trajectories
    assert [(one.reward, one.dropped, len(one.segments)) for one in done] == [(0.0, None, 1), (1.0, None, 1)]
    assert [call.arguments for one in done for call in one.calls] == [{"a": 19, "b": 23}] * 2
    assert [one.turns[-1].content for one in done] == ["It is 41.", "It is 42."]


@pytest.mark.slow
@pytest.mark.skipif(INSPECT is None, reason=_missing("inspect-ai==0.3.285 openai", "inspect_ai"))
def test_a_task_of_inspect_is_evaluated_through_the_endpoint(tmp_path: Path) -> None:
    def script(request: SampleRequest, number: int) -> list[int]:
        asked = ByteChat.text(request.ids).partition("user:")[2]
        left, right = re.findall(r"\d+", asked)[:2]
        if "tool:" in asked:
            return ByteChat.say(f"It is {int(left) + int(right)}.")
        return ByteChat.say(f'call add {{"a": {left}, "b": {right}}}')

    engine = ScriptedEngine(script, max_model_len=50_000)

    def visitor(url: str, key: str) -> str:
        names = {"TOOLGRPO_BASE_URL": url, "TOOLGRPO_API_KEY": key, "INSPECT_DISPLAY": "plain", "NO_PROXY": "127.0.0.1"}
        model = ("--model", "openai-api/toolgrpo/policy", "--log-dir", str(tmp_path))
        command = [str(INSPECT), "-m", "inspect_ai", "eval", "with_inspect.py", *model]
        done = subprocess.run(
            command, cwd=RECIPES, env={**os.environ, **names}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    seen = visit(engine, visitor, max_turns=None, max_completion_length=20_000)
    assert re.search(r"accuracy\s+1\.000", seen.returned), seen.returned
    assert len(seen.trajectory.turns) == 10 and len(seen.trajectory.segments) == 5
