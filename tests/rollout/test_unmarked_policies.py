"""What an episode makes of a call without its markers: `answer`, `accept` and `ignore`. No token of it is the model's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chat_families import trl_tokenizer
from tests.support.chat_samples import LOOK_UP
from tests.support.trainings import STAGES
from toolgrpo.chat import resolve_format
from toolgrpo.episode.tool_calls import AttemptStatus, ToolErrorKind
from toolgrpo.episode.trajectory import StopReason, Trajectory, is_void, is_void_record
from toolgrpo.evaluation.before_training import untrained_facts
from toolgrpo.observe.metrics import merged, rollout_metrics
from toolgrpo.report.episode_data import REPEATED, flags_of
from toolgrpo.rewards.gold_calls import made_calls
from toolgrpo.rewards.tool_use import tool_use
from toolgrpo.rollout import RolloutBatch, Scored
from toolgrpo.rollout.batch import Grade
from toolgrpo.support.plugin_files import import_file
from toolgrpo.testing import ScriptedEngine, ScriptedTools, run_episode

TOKENIZER = trl_tokenizer("qwen2_5")
CHAT: Any = resolve_format(TOKENIZER)
CALL = json.dumps({"name": "look_up", "arguments": {"key": "x"}}, indent=2)
FENCED = f"I look it up.\n```json\n{CALL}\n```"


class OneTool(ScriptedTools):
    """Its schema says what `look_up` takes."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [LOOK_UP]


def run(turns: list[str], policy: str, max_turns: int = 8) -> Trajectory:
    engine = ScriptedEngine([CHAT.encode(f"{text}<|im_end|>") for text in turns])
    tools = OneTool({"look_up": lambda key: f"value of {key}"})
    limits: dict[str, Any] = {"max_completion_length": 4000, "max_turns": max_turns}
    return run_episode(engine, tools, chat=CHAT, unmarked_calls=policy, **limits)


def sampled_ids(trajectory: Trajectory) -> list[int]:
    return [token for token, mine in zip(trajectory.ids, trajectory.mask, strict=True) if mine]


def batch(trajectory: Trajectory) -> RolloutBatch:
    return RolloutBatch(episodes=(Scored({"prompt": "q"}, trajectory),))


@pytest.mark.parametrize("said", [CALL, FENCED])
def test_answer_tells_the_model_the_form_in_the_place_of_a_result(said: str) -> None:
    trajectory = run([said, "done"], "answer")
    (attempt,), (result,) = trajectory.attempts, trajectory.results
    assert attempt.status is AttemptStatus.UNMARKED and result.error is ToolErrorKind.UNMARKED
    assert "<tool_call>" in result.content and len(trajectory.turns) == 2
    assert sampled_ids(trajectory) == [*CHAT.encode(f"{said}<|im_end|>"), *CHAT.encode("done<|im_end|>")]
    metrics = merged([rollout_metrics(batch(trajectory))])
    assert metrics["tools/error/unmarked"] == metrics["tools/unmarked"] == 1.0


@pytest.mark.parametrize("said", [CALL, FENCED])
def test_accept_runs_it_and_the_bridge_is_the_one_after_a_marked_call(said: str) -> None:
    marked = f"<tool_call>\n{json.dumps(json.loads(CALL))}\n</tool_call>"
    accepted, called = run([said, "done"], "accept"), run([marked, "done"], "accept")
    assert accepted.results[0].content == called.results[0].content == "value of x"
    assert [attempt.status for attempt in accepted.attempts] == [AttemptStatus.ACCEPTED]
    assert accepted.attempts[0].detail == "" and accepted.messages[0]["tool_calls"] == called.messages[0]["tool_calls"]
    assert sampled_ids(accepted) == [*CHAT.encode(f"{said}<|im_end|>"), *CHAT.encode("done<|im_end|>")]
    context = [[i for i, mine in zip(t.ids, t.mask, strict=True) if not mine] for t in (accepted, called)]
    assert context[0] == context[1]
    assert merged([rollout_metrics(batch(accepted))])["tools/unmarked"] == 1.0


@pytest.mark.parametrize(("policy", "void"), [("answer", True), ("accept", False)])
def test_in_the_last_turn_it_is_a_call_that_nobody_can_read_the_result_of(policy: str, void: bool) -> None:
    trajectory = run([CALL], policy, max_turns=1)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and trajectory.results == ()
    assert [is_void(turn) for turn in trajectory.turns] == [void]
    assert [is_void_record(turn) for turn in trajectory.to_record()["turns"]] == [void]


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        ("accept", (0.875, ["look_up", "look_up"], 0, True, [1.0, 0.0, 0.0], [True, True])),
        ("answer", (0.375, [None, None], 2, False, [0.0, 0.0, 0.0], [False, False])),
    ],
)
def test_what_was_accepted_is_a_call_to_whoever_reads_the_episode(policy: str, found: tuple[Any, ...]) -> None:
    """Rewards, credit, the check before a run and the report, of one call that is made twice."""
    trajectory = run([CALL, CALL, "done"], policy)
    graded = batch(trajectory).graded([Grade({}, 0.0)], lambda one: False)
    assert found == (
        tool_use([trajectory.messages], [trajectory])[0],
        [call.name for call in made_calls(trajectory.attempts)],
        untrained_facts(graded, 1).malformed.total(),
        bool(flags_of(trajectory.to_record()) & REPEATED),
        import_file(STAGES / "turn_credit.py").gold_call([trajectory], [[json.loads(CALL)]])[0],
        [call.ok for call in trajectory.calls],
    )
