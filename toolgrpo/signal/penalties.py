"""What is taken off a reward for length: of an episode beside its group, and of one near the limit.

    penalty   w * value / largest value of the group * mean reward of the group, for each kind
              (prime-rl's linear penalty): nothing is taken where nothing succeeds
    overlong  DAPO, arXiv 2503.14476, 3.4: 0 up to `max_completion_length - buffer` tokens, then in a
              straight line to `penalty` at `max_completion_length`

Pure functions over the rewards of one batch, the groups one after the other, None for an episode
that is not scored. They are taken before the baseline, so a group pays relative to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from toolgrpo.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeSize:
    """How long an episode was; small, because processes send these to each other."""

    output_tokens: int  # sampled
    context_tokens: int  # tool results and what frames them, after the prompt
    turns: int
    calls: int  # those that were answered

    @classmethod
    def of(cls, trajectory: Trajectory) -> EpisodeSize:
        return cls(trajectory.n_sampled, trajectory.n_context, len(trajectory.turns), len(trajectory.results))

    @property
    def completion_tokens(self) -> int:
        return self.output_tokens + self.context_tokens


SIZES: Mapping[str, Callable[[EpisodeSize], int]] = {
    "output_tokens": lambda size: size.output_tokens,
    "context_tokens": lambda size: size.context_tokens,
    "turns": lambda size: size.turns,
    "calls": lambda size: size.calls,
}


@dataclass(frozen=True, slots=True)
class Overlong:
    """The last `buffer` tokens before the limit, and what is taken at the limit."""

    buffer: int
    penalty: float


def relative_penalties(
    totals: Sequence[float | None], sizes: Sequence[EpisodeSize], group_size: int, weights: Mapping[str, float]
) -> list[float]:
    """Return what is taken off each episode for being long beside its group."""
    taken: list[float] = []
    for start in range(0, len(totals), group_size):
        group = list(zip(totals[start : start + group_size], sizes[start : start + group_size], strict=True))
        scored = [(total, size) for total, size in group if total is not None]
        mean = max(0.0, fmean(total for total, _ in scored)) if scored else 0.0
        largest = {kind: max((SIZES[kind](size) for _, size in scored), default=0) for kind in weights}
        taken += [
            mean * sum(weight * SIZES[kind](size) / largest[kind] for kind, weight in weights.items() if largest[kind])
            if total is not None
            else 0.0
            for total, size in group
        ]
    return taken


def overlong_penalty(n_tokens: int, limit: int, overlong: Overlong) -> float:
    """Return what is taken off an episode of so many tokens after its prompt."""
    over = n_tokens - (limit - overlong.buffer)
    return overlong.penalty * min(1.0, max(0.0, over / overlong.buffer))
