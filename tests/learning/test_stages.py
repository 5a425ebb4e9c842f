"""Each stage between TRL's scoring and its loss, without a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import PluginError, RewardError
from toolgrpo.learning.advantages import Member, Shaping
from toolgrpo.learning.correction import Correction
from toolgrpo.learning.stages import (
    LOSS,
    WORTH,
    Facts,
    LearningRule,
    TrainBatch,
    applied,
    cut_episodes,
    dead_groups,
    dead_rows,
    denominator,
    drops,
    estimator,
    is_live,
    left_out,
    user_stages,
)
from toolgrpo.rollout.batch import Scored

LOST = Drop(DropCause.TOOL, "no network")


def facts(*totals: float | None, own: slice = slice(0, 2), **changes: Any) -> Facts:
    rule = LearningRule(
        shaping=changes.pop("shaping", Shaping()),
        correction=Correction(method="off", why="a test"),
        skips_rows=True,
        leaves_cut_out=changes.pop("leaves_cut_out", False),
    )
    members = [Member(total, LOST if total is None else None) for total in totals]
    return Facts(rule=rule, group_size=2, members=members, own=own, **changes)


def batch(**changes: Any) -> TrainBatch:
    return TrainBatch(
        **{
            "advantages": torch.tensor([0.1, 0.2]),
            "mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
            "n_read": torch.tensor([5, 7]),
            "denominator": torch.tensor(5),
            **changes,
        }
    )


def test_without_options_and_drops_the_tensors_of_trl_go_through() -> None:
    before = batch()
    after = applied((*WORTH, *LOSS), before, facts(0.0, 1.0))
    assert after.mask is before.mask and after.advantages.tolist() == before.advantages.tolist()
    assert after.denominator == before.denominator and after.old_logps is None and after.weights is None


def test_nothing_of_a_dropped_episode_is_trained_on_and_each_process_takes_its_own_rows() -> None:
    after = drops(batch(), facts(1.0, 0.0, None, 1.0, own=slice(2, 4)))
    assert after.mask.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("asked", [False, True])
def test_an_episode_is_cut_by_its_end_and_not_by_its_last_token(asked: bool) -> None:
    ends = (StopReason.LENGTH, StopReason.STOP_TOOL)
    rows = [Scored({"prompt": ""}, Trajectory((1,), (2,), (1,), (-0.5,), (), (), end)) for end in ends]
    after = cut_episodes(batch(), facts(1.0, 0.0, episodes=rows, leaves_cut_out=asked))
    assert after.mask.tolist() == [[0, 0, 0] if asked else [1, 0, 1], [1, 1, 1]]


def test_an_estimator_of_ours_replaces_the_advantages_of_trl() -> None:
    after = estimator(batch(), facts(0.0, 1.0, 2.0, 0.0, own=slice(2, 4), shaping=Shaping(advantage="loo")))
    assert after.advantages.tolist() == [2.0, -2.0]


def test_a_dead_group_has_no_advantage_but_where_rewards_are_normalised_one_by_one() -> None:
    assert dead_groups(batch(), facts(1.0, 1.0)).advantages.tolist() == [0.0, 0.0]
    assert dead_rows(facts(1.0, 0.0, 1.0, 1.0, own=slice(2, 4))) == [True, True]
    assert dead_rows(facts(1.0, 1.0, shaping=Shaping(normalize_first=True))) == [False, False]


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(f"from dataclasses import replace\nimport torch\n{text}\n")
    return os.path.relpath(folder / "mine.py")  # as people type it


def test_stages_of_files_come_in_their_order_and_then_those_that_were_given(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "def double(batch, facts): return batch.with_rewards(facts, [2 * one for one in batch.rewards])\n"
        "def masked(batch, facts): return replace(batch, mask=0 * batch.mask).told(seen=batch.rewards[1])\n"
        "STAGES = [double, masked]",
    )
    stages = user_stages([file], [lambda batch, facts: batch.told(last=float(batch.mask.sum()))])
    known = facts(0.0, 1.0, shaping=Shaping(advantage="loo"))
    after = applied((*WORTH, *stages), batch(), known)
    assert after.advantages.tolist() == [-2.0, 2.0] and after.metrics == {"seen": 2.0, "last": 0.0}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", r"returned NoneType None; return the batch"),
        ("return replace(batch, advantages=torch.zeros(3))", r"advantages of shape \(3,\); .* 2 rows, .*\(2, 3\)"),
        ("return replace(batch, advantages=batch.advantages / 0)", r"not a finite number"),
        ("return replace(batch, mask=torch.ones_like(batch.mask))", r"put tokens into the mask"),
        ("return 1 / 0", r"raised ZeroDivisionError: division by zero \(line 4\)"),
    ],
)
def test_what_a_stage_returns_is_checked_and_never_repaired(tmp_path: Path, body: str, said: str) -> None:
    (stage,) = user_stages([written(tmp_path, f"def stage(batch, facts):\n    {body}")])
    with pytest.raises(RewardError, match=rf"stage stage \(.*mine.py\) .*{said}"):
        stage(batch(), facts(0.0, 1.0))


@pytest.mark.parametrize("text", ["", "STAGES = []", "STAGES = 3", "stage = 3", "def stage(batch): 0", "1 / 0"])
def test_what_is_no_stage_is_said_before_anything_runs(tmp_path: Path, text: str) -> None:
    with pytest.raises(PluginError, match=r"mine.py"):
        user_stages([written(tmp_path, text)])


def test_a_stage_that_hangs_meets_the_deadline_of_rewards(tmp_path: Path) -> None:
    (stage,) = user_stages([written(tmp_path, "import time\ndef stage(b, f): time.sleep(9)")], timeout_s=0.2)
    with pytest.raises(RewardError, match=r"has not returned within 0.2 s"):
        stage(batch(), facts(0.0, 1.0))


def test_a_row_that_was_not_read_and_has_an_advantage_is_an_error() -> None:
    half = torch.tensor([[-1.0, -1.0, -1.0], [torch.nan] * 3])
    known = facts(0.0, 1.0, unread=torch.tensor([False, True]))
    after = left_out(batch(old_logps=half, advantages=torch.tensor([0.1, 0.0])), known)
    assert after.old_logps is not None and after.old_logps.tolist() == [[-1.0] * 3, [0.0] * 3]
    with pytest.raises(RuntimeError, match="dead_by_rewards_alone"):
        left_out(batch(old_logps=half), known)


def test_the_denominator_counts_the_tokens_of_every_row() -> None:
    half = denominator(batch(advantages=torch.tensor([0.0, 0.2])), facts(0.0, 1.0))
    assert half.denominator == 5
    assert half.metrics == {"signal/rows_skipped": 0.5, "signal/tokens_skipped": pytest.approx(5 / 12)}


def test_a_row_is_live_if_a_token_that_is_trained_has_an_advantage() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert is_live(torch.tensor([0.5, 0.0, 0.5]), mask).tolist() == [True, False, False]
    per_token = torch.tensor([[0.0, 0.0, 0.5], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert is_live(per_token, mask).tolist() == [False, True, False]
