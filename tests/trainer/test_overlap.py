"""Training and rollouts that overlap: who is trained on when, and nothing lost on any way out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.support.rollouts import no_rollout_thread
from tests.support.trainings import BeforeOptimizerStep, KeptBatches, run_to_end, signalled, step_logs
from toolgrpo.engines.base import SampleRequest
from toolgrpo.engines.transformers import TransformersEngine
from toolgrpo.errors import ConfigError
from toolgrpo.observe.recorder import episodes_path
from toolgrpo.observe.records import read_episodes
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, tiny_trainer
from toolgrpo.testing.trainers import tiny_qwen3
from toolgrpo.trainer.batches import check_engine
from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e

PATIENCE_S = 30.0
AHEAD: dict[str, Any] = {"max_staleness": 1}


def script(request: SampleRequest, number: int) -> list[int]:
    """An answer that depends on the question alone."""
    return ByteChat.say("abcdefghijklm"[: 1 + sum(request.ids) % 13])


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float((len(one[-1]["content"]) + place) % 3) for place, one in enumerate(completions)]


Run = tuple[Any, KeptBatches]


def run(folder: Path, *callbacks: Any, says: Any = script, resume: Any = None, **changes: Any) -> Run:
    """Train with these callbacks, which know the trainer; nothing is left behind, however it ends."""
    kept = KeptBatches()
    parts = {"observers": [kept], "callbacks": list(callbacks)}
    options = {"max_steps": 5, "rollout_correction": "auto", **changes}
    trainer = tiny_trainer(folder, reward, says, parts=parts, **options)
    for one in callbacks:
        one.trainer = trainer
    try:
        run_to_end(trainer, resume)
    finally:
        assert no_rollout_thread() and trainer.engine.open_requests == 0 and not trainer.engine.is_open
    kept.batches = [batch for batch in kept.batches if batch.mode == "train"]
    return trainer, kept


def questions(kept: KeptBatches) -> list[list[str]]:
    return [[str(one.row["prompt"]) for one in batch.episodes] for batch in kept.batches]


def weights(kept: KeptBatches, step: int) -> set[Any]:
    return {turn.weights for t in kept.batches[step].trajectories for turn in t.turns}


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in step_logs(trainer)]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nothing overlaps."""
    return run(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_the_steps_have_rows_and_losses_of_the_run_without(tmp_path: Path, max_staleness: int, without: Run) -> None:
    """What the script says depends on no weights, so the losses are equal, too."""
    plain, expected = without
    ahead, found = run(tmp_path, max_staleness=max_staleness)
    assert questions(found) == questions(expected) and len(found.batches) == 5
    assert losses(ahead) == losses(plain)
    assert len(ahead.engine.requests) == 40, "no batch is begun that no step would train on"
    assert plain.rollout_batches.n_episodes == ahead.rollout_batches.n_episodes == 40
    assert weights(expected, 0) == {None}


def test_rollouts_go_on_during_the_training_pass(tmp_path: Path) -> None:
    """The pass of the first batch does not end before the second batch has been asked for and answered."""
    seen = threading.Event()

    def says(request: SampleRequest, number: int) -> list[int]:
        if number == 15:
            seen.set()
        return script(request, number)

    def wait() -> None:
        assert seen.wait(PATIENCE_S), "the rollouts of the next batch wait for the training pass"

    trainer, batches = run(tmp_path, BeforeOptimizerStep(1, wait), says=says, **AHEAD)
    logs = step_logs(trainer)
    assert [log["overlap/staleness"] for log in logs] == [0, 1, 1, 1, 1]
    assert [log["overlap/batches_in_flight"] for log in logs] == [1, 1, 1, 1, 0]
    assert weights(batches, 0) == weights(batches, 1) == {(0, 0)}


def test_a_rollout_that_fails_ends_the_run_with_its_own_error_and_a_checkpoint(tmp_path: Path, without: Run) -> None:
    def says(request: SampleRequest, number: int) -> list[int]:
        if number >= 24:
            raise AssertionError("the fourth batch meets a bug")
        return script(request, number)

    with pytest.raises(AssertionError, match="the fourth batch meets a bug"):
        run(tmp_path, says=says, **AHEAD)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [3]
    whole, expected = without
    resumed, found = run(tmp_path, resume="auto", **AHEAD)
    assert questions(found) == questions(expected)[3:]
    assert losses(resumed) == losses(whole)


def test_an_evaluation_between_two_steps_has_the_engine_for_itself(tmp_path: Path, without: Run) -> None:
    class Measure(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert len(self.trainer.measure([{"prompt": "held out", "answer": "1"}])) == 1

    trainer, found = run(tmp_path, Measure(), **AHEAD)
    _, expected = without
    assert questions(found) == questions(expected) and len(trainer.engine.requests) == 45


def test_an_engine_that_cannot_is_refused() -> None:
    with pytest.raises(ConfigError, match="decodes with the trainer's, which change"):
        check_engine(TransformersEngine(tiny_qwen3))
    check_engine(ScriptedEngine(script))


def rows_of(kept: KeptBatches) -> list[int]:
    """The rows that were trained on, step by step."""
    return [one.row["number"] for batch in kept.batches for one in batch.episodes if one.trained][::4]


def test_a_signal_cancels_what_is_in_line_and_a_resumed_run_draws_it_anew(tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 16, "max_steps": 4, "shuffle_dataset": False, **AHEAD}
    options["rows"] = [{"prompt": f"q{number:02}", "answer": "1", "number": number} for number in range(32)]

    def says(request: SampleRequest, number: int) -> ScriptedReply:
        row = int(ByteChat.text(request.ids).partition("q")[2][:2])
        return ScriptedReply(script(request, number), stalls=row == 5)

    trainer, kept = run(tmp_path, signalled(1), says=says, **options)
    assert trainer.stopped_by == "SIGTERM" and rows_of(kept) == [0, 1, 2, 3]
    assert trainer.engine.cancelled >= 4
    _, resumed = run(tmp_path, resume="auto", **options)
    assert rows_of(resumed) == list(range(4, 16)), "none is lost"
    numbers = [record["metadata"]["episode"] for record in read_episodes(episodes_path(tmp_path, 0))]
    assert sorted(numbers) == list(range(64))
