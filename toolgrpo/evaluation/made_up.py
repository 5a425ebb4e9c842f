"""Episodes that nobody drew, to ask rewards about: one that gives the gold answer, one of nonsense.

Not covered: rewards that look at tokens, turns or the state of an environment; of those nothing can
be said without a real episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolgrpo.evaluation.grading import Grader, grade
from toolgrpo.rewards.gold import GoldEpisode, as_answer, as_boxed_answer, as_program, as_result_and_answer
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.trajectory import Message, StopReason, Trajectory

NONSENSE = "I would rather talk about the weather."


WRITINGS: Mapping[str, GoldEpisode] = {
    "alone": as_answer,
    "in a box": as_boxed_answer,
    "after a tool's result": as_result_and_answer,
    "as a program": as_program,
}
"""How a gold answer may be written down."""


def nonsense(row: Row) -> list[Message]:
    return [{"role": "assistant", "content": NONSENSE}]


def score_made_up(
    rows: Sequence[Row],
    write: GoldEpisode,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None,
    threshold: float,
) -> RolloutBatch:
    """Return these rows graded, each with the episode that `write` makes of it."""
    episodes = tuple(Scored(row, _episode(write(row))) for row in rows)
    return grade(RolloutBatch(episodes=episodes), rewards, weights, threshold=threshold)


def _episode(messages: list[Message]) -> Trajectory:
    made: dict[str, Any] = {"prompt_ids": (0,), "ids": (), "mask": (), "logprobs": (), "turns": ()}
    return Trajectory(**made, messages=tuple(messages), stop_reason=StopReason.FINISHED)
