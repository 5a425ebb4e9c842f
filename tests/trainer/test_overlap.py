"""Training and rollouts that overlap: the same rows in the same steps, and nothing lost on any way out."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.support.trainings import BeforeOptimizerStep, step_logs
from toolgrpo.engines.base import SampleRequest
from toolgrpo.engines.transformers import TransformersEngine
from toolgrpo.errors import ConfigError
from toolgrpo.observe.recorder import episodes_path
from toolgrpo.observe.records import read_episodes
from toolgrpo.rollout import Observer, RolloutBatch
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, tiny_trainer
from toolgrpo.testing.trainers import tiny_qwen3
from toolgrpo.trainer.checkpoint_files import complete_checkpoints
from toolgrpo.trainer.row_line import check_engine

pytestmark = pytest.mark.e2e

PATIENCE_S = 30.0
AHEAD: dict[str, Any] = {"max_staleness": 1}
Reply = list[int] | ScriptedReply | Exception


def script(request: SampleRequest, number: int) -> Reply:
    """An answer that depends on the question alone."""
    return ByteChat.say("abcdefghijklm"[: 1 + sum(request.ids) % 13])


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float((len(one[-1]["content"]) + place) % 3) for place, one in enumerate(completions)]


class Batches(Observer):
    """The questions of each batch that was trained on, and the weights they were drawn from."""

    def __init__(self) -> None:
        self.questions: list[list[str]] = []
        self.weights: list[set[Any]] = []

    def batch_done(self, batch: RolloutBatch) -> None:
        if batch.mode == "train":
            self.questions.append([str(one.row["prompt"]) for one in batch.episodes])
            self.weights.append({turn.weights for t in batch.trajectories for turn in t.turns})


def run(
    folder: Path, *callbacks: TrainerCallback, says: Any = script, resume: Any = None, **changes: Any
) -> tuple[Any, Batches]:
    batches = Batches()
    trainer = tiny_trainer(
        folder,
        reward,
        says,
        parts={"observers": [batches], "callbacks": list(callbacks)},
        **{"max_steps": 5, "rollout_correction": "auto", **changes},
    )
    for one in callbacks:
        one.trainer = trainer
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()
    return trainer, batches


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in step_logs(trainer)]


def nothing_is_left(trainer: Any) -> bool:
    threads = [one for one in threading.enumerate() if one.name.startswith("toolgrpo-rollouts")]
    return not threads and trainer.engine.open_requests == 0 and not trainer.engine.is_open


@pytest.mark.parametrize("changes", [{}, {"weights_handover": "drain"}, {"max_staleness": 3}], ids=str)
def test_the_steps_have_the_rows_and_the_losses_of_the_run_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What the script says depends on no weights, so the losses are equal, too."""
    plain, expected = run(tmp_path / "plain")
    ahead, found = run(tmp_path / "ahead", **{**AHEAD, **changes})
    assert found.questions == expected.questions and len(found.questions) == 5
    assert losses(ahead) == losses(plain)
    assert len(ahead.engine.requests) == 40, "no batch is begun that no step would train on"
    assert plain.n_episodes == ahead.n_episodes == 40
    assert nothing_is_left(ahead)
    assert expected.weights[0] == {None}


def test_rollouts_go_on_during_the_training_pass(tmp_path: Path) -> None:
    """The pass of the first batch does not end before the second batch has been asked for and answered."""
    seen = threading.Event()

    def says(request: SampleRequest, number: int) -> Reply:
        if number == 15:
            seen.set()
        return script(request, number)

    def wait() -> None:
        assert seen.wait(PATIENCE_S), "the rollouts of the next batch wait for the training pass"

    trainer, batches = run(tmp_path, BeforeOptimizerStep(1, wait), says=says, **AHEAD)
    logs = step_logs(trainer)
    assert [log["overlap/staleness"] for log in logs] == [0, 1, 1, 1, 1]
    assert [log["overlap/batches_in_flight"] for log in logs] == [1, 1, 1, 1, 0]
    assert batches.weights[0] == {(0, 0)} and batches.weights[1] == {(0, 0)}


def test_a_rollout_that_fails_ends_the_run_with_its_own_error_and_a_checkpoint(tmp_path: Path) -> None:
    def says(request: SampleRequest, number: int) -> Reply:
        if number >= 24:
            raise AssertionError("the fourth batch meets a bug")
        return script(request, number)

    trainers: list[Any] = []

    class Keep(TrainerCallback):
        trainer: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainers.append(self.trainer)

    with pytest.raises(AssertionError, match="the fourth batch meets a bug"):
        run(tmp_path, Keep(), says=says, **AHEAD)
    assert nothing_is_left(trainers[0])
    assert [one.step for one in complete_checkpoints(tmp_path)] == [3]
    whole, expected = run(tmp_path / "whole", **AHEAD)
    resumed, found = run(tmp_path, resume="auto", **AHEAD)
    assert found.questions == expected.questions[3:]
    assert losses(resumed) == losses(whole)


def test_a_signal_ends_it_without_waiting_for_what_is_in_flight(tmp_path: Path) -> None:
    """The second batch never ends."""

    def says(request: SampleRequest, number: int) -> Reply:
        answer = script(request, number)
        assert isinstance(answer, list)
        return ScriptedReply(answer, stalls=True) if 8 <= number < 16 else answer

    stop = BeforeOptimizerStep(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer, _ = run(tmp_path, stop, says=says, **AHEAD)
    assert trainer.stopped_by == "SIGTERM" and trainer.state.global_step == 1
    assert nothing_is_left(trainer) and trainer.engine.answered == 8
    whole, expected = run(tmp_path / "whole", **AHEAD)
    resumed, found = run(tmp_path, resume="auto", **AHEAD)
    assert found.questions == expected.questions[1:], "what was in flight is drawn anew, with the same rows"
    assert losses(resumed) == losses(whole)
    numbers = [record["metadata"]["episode"] for record in read_episodes(episodes_path(tmp_path, 0))]
    assert sorted(numbers) == list(range(40)), "each episode is trained on once"


def test_an_evaluation_between_two_steps_has_the_engine_for_itself(tmp_path: Path) -> None:
    class Measure(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert len(self.trainer.measure([{"prompt": "held out", "answer": "1"}])) == 1

    trainer, found = run(tmp_path / "ahead", Measure(), **AHEAD)
    _, expected = run(tmp_path / "plain")
    assert found.questions == expected.questions and len(trainer.engine.requests) == 45


def test_an_engine_that_cannot_is_refused() -> None:
    class Plain(ScriptedEngine):
        takes_weights_while_open = False

    for engine, sentence in (
        (TransformersEngine(tiny_qwen3), "decodes with the trainer's, which change"),
        (Plain(script), "set weights_handover drain"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_engine(engine, "keep")
    check_engine(Plain(script), "drain")
