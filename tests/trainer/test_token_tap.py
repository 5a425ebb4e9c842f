"""What training saw of an episode's tokens stands in the recording, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import by_length, run_to_end, step_logs
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.observe.records import ids_checksum, iter_steps, iter_tokens, read_episodes
from toolgrpo.rollout.batch import Scored
from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.trainer.trl.batch import chosen_episodes


def script(request: SampleRequest, number: int) -> list[int]:
    return ByteChat.say("abc"[: 1 + number % 3] + "." * (number % 5))


def trained(folder: Path, **changes: Any) -> Any:
    return run_to_end(tiny_trainer(folder, by_length, script, **changes))


def test_the_chosen_episodes_have_what_the_loss_was_made_of(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "temperature": 1.0}
    running = trained(tmp_path, record_tokens=3, **changes)
    by_number = {record["episode"]: record for record in read_episodes(tmp_path)}
    seen = list(iter_tokens(tmp_path))
    assert [line["step"] for line in seen] == [0, 0, 0, 1, 1, 1]
    for line in seen:
        record = by_number[line["episode"]]
        assert line["ids_crc32"] == ids_checksum(record["ids"]) and line["step"] == record["step"]
        for name in ("trainer_logprobs", "entropy", "correction"):
            assert [value is not None for value in line[name]] == [bool(m) for m in record["mask"]], name
    of_first = sorted(record["advantage"] for record in by_number.values() if record["step"] == 0)
    chosen = [by_number[line["episode"]]["advantage"] for line in seen if line["step"] == 0]
    assert sorted(chosen) == sorted([of_first[0], of_first[-1], of_first[-2]])
    logged = [line for line in iter_steps(tmp_path) if line["kind"] == "step"]
    assert [line["step"] for line in logged] == [0, 1] and all(line["phases"]["training"] > 0 for line in logged)
    entropies = [value for line in seen for value in line["entropy"] if value is not None]
    assert min(entropies) - 0.5 < running.state.log_history[0]["entropy"] < max(entropies) + 0.5


def test_nothing_is_recorded_of_rows_that_no_pass_has_read(tmp_path: Path) -> None:
    def some_long(request: SampleRequest, number: int) -> list[int]:
        return ByteChat.say("." * 130 if number % 2 else "abc"[: 1 + number % 3])

    cut: dict[str, Any] = {"max_completion_length": 20, "mask_truncated_completions": True, "max_steps": 1}
    off: dict[str, Any] = {
        "rollout_correction": "off",
        "vllm_importance_sampling_mode": "sequence_mask",
    }  # TRL's default
    run_to_end(tiny_trainer(tmp_path, by_length, some_long, record_tokens=8, **cut, **off))
    seen = list(iter_tokens(tmp_path))
    assert seen and all(any(line["trainer_logprobs"]) for line in seen)


@pytest.mark.lock
def test_recording_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    runs = trained(tmp_path / "all", record_tokens=8), trained(tmp_path / "none", record_episodes=False)
    losses = [[log["loss"] for log in step_logs(run)] for run in runs]
    assert losses[0] == losses[1]
    assert not (tmp_path / "none" / "episodes.jsonl").exists() and not (tmp_path / "none" / "tokens.jsonl").exists()


def test_the_extremes_are_chosen_in_turn_and_nothing_without_an_advantage() -> None:
    one = Trajectory((1,), (2,), (1,), (-0.5,), (), (), StopReason.FINISHED)
    episodes = [Scored({}, one, advantage=advantage) for advantage in (0.5, None, -2.0, 0.0, 1.5, -1.0)]
    chosen = [[episode.advantage for episode in chosen_episodes(episodes, n)] for n in (0, 1, 3, 9)]
    assert chosen == [[], [1.5], [1.5, -2.0, 0.5], [1.5, -2.0, 0.5, -1.0]]
