"""Grade a batch: call the rewards as in training, and decide which episodes succeeded.

Rewards get what TRL gives them in training: `prompts`, copies of the `completions`,
`completion_ids`, `trajectories`, every column as a list, `trainer_state`, `log_metric` and
`log_extra`.

Episodes that a tool, an environment or a reward dropped have no total and no success.

Not covered: reward models (modules of torch), which TRL runs itself in training.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerState

from toolgrpo.data.arithmetic import measure_of
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.rewards.unscored import noted_drops
from toolgrpo.rewards.watched import watched
from toolgrpo.rollout.batch import RolloutBatch, Scored, Success
from toolgrpo.signal.dropped import grade_of

Grader = Callable[..., Any]
"""A reward in TRL's form:
`grader(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`.
"""

logger = logging.getLogger(__name__)

_ROUNDING = 1e-6  # rewards are added up in fp32 in training
_NO_COLUMNS = ("prompt", "completion", "completion_ids", "trajectories")


def success_at(threshold: float) -> Success:
    """Return the one meaning of success: the measure that the row brings,
    else a reward of at least `threshold`.
    """

    def succeeded(episode: Scored) -> bool:
        measure = measure_of(episode.row)
        if measure is not None:
            return measure(episode.trajectory.messages, episode.row)
        return episode.total is not None and episode.total >= threshold - _ROUNDING

    return succeeded


def grade(
    batch: RolloutBatch,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None = None,
    *,
    threshold: float,
    trainer_state: Any = None,
    log_metric: Callable[[str, float], None] = lambda name, value: None,
    log_extra: Callable[[str, list[Any]], None] = lambda column, values: None,
) -> RolloutBatch:
    """Return the batch with the rewards of each episode, their weighted sum,
    and whether it succeeded.
    """
    rows = [episode.row for episode in batch.episodes]
    if not rows:  # a process without a question: rewards need not bear an empty batch
        return batch
    given = {
        **{key: [row.get(key) for row in rows] for key in rows[0] if key not in _NO_COLUMNS},
        "trainer_state": TrainerState(global_step=batch.step) if trainer_state is None else trainer_state,
        "log_metric": log_metric,
        "log_extra": log_extra,
    }
    completions = [t.completion() for t in batch.trajectories]
    totals = [0.0] * len(rows)
    by_name: list[dict[str, float | None]] = [{} for _ in rows]
    with noted_drops() as dropped:
        for reward, weight in zip(rewards, weights or [1.0] * len(rewards), strict=True):
            values = _ask(
                reward,
                prompts=[row["prompt"] for row in rows],
                completions=completions,
                completion_ids=[list(t.ids) for t in batch.trajectories],
                trajectories=list(batch.trajectories),
                **given,
            )
            for number, value in enumerate(values):
                by_name[number][_name(reward)] = value
                totals[number] += 0.0 if value is None else weight * value
    grades = [
        grade_of(trajectory, values, total, dropped.get(number))
        for number, (trajectory, values, total) in enumerate(zip(batch.trajectories, by_name, totals, strict=True))
    ]
    return batch.graded(grades, success_at(threshold))


def _ask(reward: Grader, /, **arguments: Any) -> list[float | None]:
    if not inspect.isroutine(reward) and hasattr(reward, "parameters"):
        raise ConfigError(f"{type(reward).__name__} is a reward model, which only TRL's trainer asks; give a function")
    returned = watched(reward, None, logger.warning)(**arguments)
    if inspect.isawaitable(returned):
        returned = asyncio.run(_result(returned))
    values = list(returned)
    if len(values) != len(arguments["completions"]):
        raise RewardError(
            f"reward {_name(reward)} returned {len(values)} rewards for {len(arguments['completions'])} completions; it "
            f"must return one per completion"
        )
    return values


async def _result(awaitable: Any) -> Any:
    return await awaitable


def _name(reward: Grader) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))
