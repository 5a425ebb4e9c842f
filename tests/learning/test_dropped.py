"""Which episodes of a batch are dropped, and when they are too many."""

from __future__ import annotations

import json

import pytest

from toolgrpo import DropEpisode
from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import TooManyDroppedError
from toolgrpo.evaluation.grading import grade_of
from toolgrpo.evaluation.report import Comparison, EpisodeFacts, ModelReport
from toolgrpo.observe.metrics import batch_metrics
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.trainer.trl.calls import check_dropped_share

LOST = Drop(DropCause.ENVIRONMENT_LOST, "it hung")


def trajectory(dropped: Drop | None = None) -> Trajectory:
    ledger = Ledger([1])
    ledger.sampled([2], [-0.5])
    return ledger.finish(StopReason.FINISHED, dropped=dropped)


def test_who_dropped_an_episode_is_said_once_and_none_of_them_has_a_total() -> None:
    refused = DropEpisode("the judge refused")
    assert grade_of(trajectory(), {"a": 1.0, "b": None}, 1.0, None) == Grade({"a": 1.0, "b": None}, 1.0)
    assert grade_of(trajectory(LOST), {"a": 1.0}, 1.0, refused).drop == LOST
    assert grade_of(trajectory(), {"a": 1.0}, 1.0, refused) == Grade(
        {"a": 1.0}, None, Drop(DropCause.REWARD, "the judge refused")
    )
    nobody = grade_of(trajectory(), {"a": None, "b": None}, 0.0, None)
    assert nobody.total is None and nobody.drop is not None and nobody.drop.cause is DropCause.NO_REWARD
    with pytest.raises(ValueError, match="a total or a drop"):
        Grade({}, None)


def test_too_many_are_an_error_with_their_causes_the_most_frequent_first() -> None:
    drops = [LOST, Drop(DropCause.TOOL, "no\nnetwork"), LOST, None, None, None, None, None]
    check_dropped_share(drops[1:], 0.3)
    check_dropped_share([None] * 4, 0.0)
    with pytest.raises(
        TooManyDroppedError,
        match=r"3 of 8 episodes .* \(0.25\) allows: 2 x environment_lost: it hung; 1 x tool: no network\. Nothing was "
        r"trained .*resume_from_checkpoint auto",
    ):
        check_dropped_share(drops, 0.25)


def test_a_batch_keeps_its_order_and_counts_beside() -> None:
    episodes = tuple(Scored({"prompt": "q"}, trajectory()) for _ in range(3))
    grades = [Grade({"r": 1.0}, 1.0), Grade({"r": None}, None, LOST), Grade({"r": 0.0}, 0.0)]
    before = RolloutBatch(episodes=episodes, group_size=3)
    batch = before.graded(grades, lambda one: one.total == 1.0)
    assert batch.is_graded and not before.is_graded and batch.episodes[0].rewards == {"r": 1.0}
    assert (
        batch.trajectories == before.trajectories
        and batch.totals == (1.0, None, 0.0)
        and batch.successes == (True, False)
    )
    assert batch.episodes[1].success is None and len(batch.scored) == 2
    metrics = {name: metric.value for name, metric in batch_metrics(batch).items()}
    assert metrics["success"] == 0.5 and metrics["reward/min"] == 0.0
    assert metrics["dropped/episodes"] == 1 and metrics["dropped/environment_lost"] == 1
    nothing = RolloutBatch(episodes=episodes[:1]).graded([grades[1]], lambda one: True)
    assert "success" not in batch_metrics(nothing) and batch_metrics(nothing)["dropped/episodes"].value == 1


def facts(question: int, success: bool | None) -> EpisodeFacts:
    reward, dropped = (None, Drop(DropCause.TOOL, "no network")) if success is None else (float(success), None)
    return EpisodeFacts(question, reward, success, "1", 1, 2, "finished", (), dropped)


def test_an_evaluation_reports_dropped_episodes_beside() -> None:
    episodes = (facts(0, True), facts(0, None), facts(1, False), facts(1, True), facts(2, None), facts(2, None))
    report = ModelReport("m", episodes, samples=2, ks=(1, 2), seconds=1.0)
    shares = report.shares()
    assert report.n_questions == 3
    assert (shares["pass@1"].value, shares["pass@1"].n) == (0.75, 2)  # of the questions with a scored episode
    assert (shares["pass@2"].value, shares["pass@2"].n) == (1.0, 1)
    written = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert written["dropped"] == {"episodes": 3, "causes": {"tool": 3}} and written["reward"]["mean"] == 2 / 3
    success, _ = Comparison("d", 1.0, report).tables()
    assert list(success.columns[0].cells)[-1] == "dropped episodes"
    lost = ModelReport("m", (facts(0, None),), samples=1, ks=(1,), seconds=1.0)
    assert lost.as_json()["reward"] is None and len(Comparison("d", 1.0, lost).tables()) == 2
