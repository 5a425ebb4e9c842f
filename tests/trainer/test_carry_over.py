"""`carry_over`, and backfill beside the training pass: who is trained on when, and nothing lost on any way out."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.support.trainings import BeforeOptimizerStep, KeptBatches, step_logs
from toolgrpo.engines.base import SampleRequest
from toolgrpo.testing import ByteChat, ScriptedReply, tiny_trainer

pytestmark = pytest.mark.e2e

ROWS = [{"prompt": f"q{number:02}", "answer": "1", "number": number} for number in range(32)]
GROUPS: dict[str, Any] = {"per_device_train_batch_size": 16, "max_steps": 4, "shuffle_dataset": False}
CARRY: dict[str, Any] = {**GROUPS, "carry_over": 0.25}
DEAD = {1, 3, 4, 9}


class Slow:
    """A script whose questions of some rows are answered late, or never."""

    def __init__(self, late: Collection[int] = (), never: Collection[int] = ()) -> None:
        self.late, self.never = late, never
        self.asked: Counter[int] = Counter()

    def __call__(self, request: SampleRequest, number: int) -> Any:
        text = ByteChat.text(request.ids)
        row = int(text[text.index("q") + 1 :][:2])
        self.asked[row] += 1
        answer = ByteChat.say("abcdefghijklm"[: 1 + (sum(request.ids) + self.asked[row]) % 13])
        return ScriptedReply(answer, delay_s=0.6 * (row in self.late), stalls=row in self.never)


def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
    return [
        0.5 if row in DEAD else float((len(one[-1]["content"]) + place) % 3)
        for place, (one, row) in enumerate(zip(completions, number, strict=True))
    ]


class Kept(KeptBatches):
    def rows(self) -> list[list[int]]:
        """The rows of each step that was trained on."""
        return [[one.row["number"] for one in batch.episodes if one.trained][::4] for batch in self.batches]


def run(folder: Path, says: Any, *callbacks: TrainerCallback, resume: Any = None, **changes: Any) -> tuple[Any, Kept]:
    kept = Kept()
    parts = {"observers": [kept], "callbacks": list(callbacks)}
    options = {"rollout_correction": "auto", **changes}
    trainer = tiny_trainer(folder, reward, says, rows=ROWS, parts=parts, **options)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()
        left = [one for one in threading.enumerate() if one.name.startswith("toolgrpo-rollouts")]
        assert not left and trainer.engine.open_requests == 0 and not trainer.engine.is_open
    return trainer, kept


def all_rows(kept: Kept) -> list[int]:
    return sorted(row for rows in kept.rows() for row in rows)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_begins_without_the_slow_group_which_is_the_next_ones(tmp_path: Path, staleness: int) -> None:
    trainer, kept = run(tmp_path, Slow(late={2}), **CARRY, max_staleness=staleness)
    first, second, *_ = kept.rows()
    assert first == [0, 1, 3, 4] and second[0] == 2
    assert all_rows(kept) == list(range(16)), "every row is trained on once"
    assert len(trainer.engine.requests) == 4 * 16, "no group is begun that no step would train on"
    assert max([log["overlap/staleness"] for log in step_logs(trainer)]) <= staleness + 1
    assert [log["overlap/carried"] for log in step_logs(trainer)] == [0, 1, 1, 1]
    assert [log["overlap/batches_in_flight"] for log in step_logs(trainer)][-1] == 0
    began_with = {turn.weights[0] for t in kept.batches[1].trajectories[:4] for turn in t.turns if turn.weights}
    assert began_with == {0}, "the group went on, and was not begun anew"


def test_a_signal_cancels_what_is_in_line_and_a_resumed_run_draws_it_anew(tmp_path: Path) -> None:
    stop = BeforeOptimizerStep(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer, kept = run(tmp_path, Slow(never={2}), stop, **CARRY, max_staleness=1)
    assert trainer.stopped_by == "SIGTERM" and kept.rows() == [[0, 1, 3, 4]]
    assert trainer.engine.cancelled >= 4
    _, resumed = run(tmp_path, Slow(), resume="auto", **CARRY, max_staleness=1)
    assert resumed.rows()[0][0] == 2, "what was left over is the first of the resumed run"
    assert all_rows(resumed) == [2, *range(5, 16)], "none is lost, and none trained on twice"
