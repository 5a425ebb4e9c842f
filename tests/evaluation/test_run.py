"""An evaluation needs an engine and a policy, and no trainer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rollouts import scripted_rollouts
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.policy import Backend, Policy
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.errors import DataError
from toolgrpo.evaluation.report import ModelReport, on_shared_questions
from toolgrpo.evaluation.run import Evaluation, evaluate
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.observe.records import read_episodes
from toolgrpo.rewards import get_reward
from toolgrpo.rollout import Rollouts
from toolgrpo.rollout.observers import Observers
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(3)]
EXACT: dict[str, Any] = {"rewards": [get_reward("exact_match")], "weights": None, "threshold": 1.0}
EVALUATION = Evaluation(rows=ROWS, **EXACT, options=SamplingOptions(temperature=0.0), samples=2, ks=(1, 2))


def script(request: SampleRequest, number: int) -> list[int]:
    """Questions 0 and 1 are answered rightly, 2 is not; each after a call."""
    text = ByteChat.text(request.ids)
    if ">tool:" not in text:
        return ByteChat.say('call look {"at": 1}')
    asked = int(text.split("question ")[1][0])
    return ByteChat.say(f"It is {min(asked, 1)}")


def policy(model: Any, index: int = 0, processes: int = 1) -> Policy:
    return Policy(
        get_model=lambda: model,
        weights=model.named_parameters,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=Backend("NO", processes),
        process_index=index,
    )


def rollouts(*observers: Any) -> Rollouts:
    tools = ScriptedTools({"look": lambda at: ToolResult("nothing", "look", ToolErrorKind.RAISED, duration_s=2.0)})
    return scripted_rollouts(
        ScriptedEngine(script), tools, limits={"max_completion_length": 500}, observers=Observers(observers)
    )


def measured(rows: list[dict[str, str]], *of: Any, running: Rollouts | None = None) -> ModelReport:
    own = policy(torch.nn.Linear(1, 1), *of)
    return evaluate(replace(EVALUATION, rows=rows), running or rollouts(), own, name="tiny")


def test_every_question_is_asked_and_graded_and_recorded(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "episodes.jsonl")
    running = rollouts(recorder)
    report = measured(ROWS, running=running)
    running.close()
    assert running.engine.weight_loads == 1  # type: ignore[attr-defined]
    assert (report.n_questions, len(report.episodes)) == (3, 6)
    assert [fact.question for fact in report.episodes] == [0, 0, 1, 1, 2, 2]
    assert report.shares()["pass@1"].value == 2 / 3
    assert report.tools()["look"]["failures_by_cause"] == {"raised": 6} and report.tools()["look"]["seconds_p50"] == 2.0
    assert all(call.result == "" and call.arguments == {} for fact in report.episodes for call in fact.calls)
    recorded = [line["row"]["answer"] for line in read_episodes(tmp_path / "episodes.jsonl")]
    assert sorted(recorded) == ["0", "0", "1", "1", "2", "2"]


def test_processes_share_the_questions_and_the_numbers(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("episodes.jsonl", "episodes_1.jsonl")]
    observed = [rollouts(EpisodeRecorder(file)) for file in files]
    asked = [measured(ROWS, process, 2, running=own).episodes for process, own in enumerate(observed)]
    for own in observed:
        own.close()
    assert [[fact.question for fact in facts] for facts in asked] == [[0, 0, 2, 2], [1, 1]]
    numbers = [[(line["episode"], line["group"]) for line in read_episodes(file)] for file in files]
    assert numbers == [[(0, 0), (1, 0), (2, 2), (3, 2)], [(4, 4), (5, 4)]]
    assert measured(ROWS[:1], 1, 2).episodes == (), "it is idle"


def test_models_are_compared_on_the_questions_that_both_were_asked() -> None:
    """A prompt may be too long for one of them; a question that stands twice is two."""
    twice = [*ROWS, ROWS[2]]
    whole, without_first, only = measured(twice), measured(twice[1:]), measured(ROWS[:1])
    for pair in (on_shared_questions(whole, without_first), on_shared_questions(without_first, whole)):
        assert [one.keys for one in pair] == [without_first.keys] * 2
        assert [[fact.question for fact in one.episodes] for one in pair] == [[0, 0, 1, 1, 2, 2]] * 2
        assert [one.values()["pass@1"] for one in pair] == [{0: 1.0, 1: 0.0, 2: 0.0}] * 2
    assert on_shared_questions(whole, whole) == (whole, whole)
    with pytest.raises(DataError, match="no question fits both"):
        on_shared_questions(without_first, only)


def test_an_evaluation_needs_no_trl() -> None:
    script = "import sys, toolgrpo.evaluation.run; assert 'trl' not in sys.modules, 'trl is imported'"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
