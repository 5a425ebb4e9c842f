"""Shaping of rewards, advantages and masks: one
frozen value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import fmean
from typing import Any

from toolgrpo.drops import Drop
from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import grouped_advantages, in_groups, normalized_rewards
from toolgrpo.rollout.batch import Scored
from toolgrpo.trajectory import Trajectory, has_void_turn

# What is taken off a reward for length: of an episode beside its group, and of one near the limit.
#
#     penalty   w * value / largest value of the group * mean reward of the group, for each kind
#               (prime-rl's linear penalty): nothing is taken where nothing succeeds
#     overlong  DAPO, arXiv 2503.14476, 3.4: 0 up to `max_completion_length - buffer` tokens, then in a
#               straight line to `penalty` at `max_completion_length`
#
# Pure functions over the rewards of one batch, the groups one after the other, None for an episode
# that is not scored. They are taken before the baseline, so a group pays relative to itself.


@dataclass(frozen=True, slots=True)
class EpisodeSize:
    """Length of an episode; small, because processes send these to each other."""

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
    for group in in_groups(list(zip(totals, sizes, strict=True)), group_size):
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


@dataclass(frozen=True, slots=True)
class Member:
    """One episode as its group knows it; small, because processes send these to each other."""

    total: float | None
    drop: Drop | None
    size: EpisodeSize
    rewards: tuple[float, ...] = ()  # of each function; NaN: it does not score the episode


@dataclass(frozen=True, slots=True)
class Shaped:
    """The advantages of a batch, and numbers about how they came to be."""

    advantages: tuple[float, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Shaping:
    """Changes to rewards, advantages and masks."""

    advantage: str = "grpo"
    scale: str = "group"
    penalty: Mapping[str, float] = field(default_factory=dict)
    overlong: Overlong | None = None
    limit: int = 0  # tokens after the prompt
    void_turns: str = "keep"
    normalize_first: bool = False  # TRL's normalize_then_sum
    weights: tuple[float, ...] = ()  # of the reward functions; empty: 1 each

    @property
    def is_of_trl(self) -> bool:
        """Return whether TRL's own advantages are what is wanted."""
        return self.advantage == "grpo" and not self.penalty and self.overlong is None

    def rewards(self, members: Sequence[Member], group_size: int) -> list[float | None]:
        """Return what advantages are made from, the combined reward of each episode: by its spread a
        group is dead or live. Groups stand one after the other.
        """
        if self.normalize_first:
            scored = [one.rewards if one.drop is None else (nan,) * len(one.rewards) for one in members]
            weights = self.weights or (1.0,) * (len(scored[0]) if scored else 0)
            return [reward for group in in_groups(scored, group_size) for reward in normalized_rewards(group, weights)]
        return [
            None if member.total is None else member.total - penalty - overlong
            for member, penalty, overlong in zip(members, *self._taken(members, group_size), strict=True)
        ]

    def advantages(self, members: Sequence[Member], group_size: int) -> Shaped:
        """Return the advantages of the episodes of all processes."""
        penalty, overlong = self._taken(members, group_size)
        metrics = {}
        scored = [place for place, member in enumerate(members) if member.total is not None]
        for name, values, is_set in (("penalty", penalty, bool(self.penalty)), ("overlong", overlong, self.overlong)):
            if is_set and scored:
                metrics[f"shaping/{name}"] = fmean(values[place] for place in scored)
        advantages = grouped_advantages(self.rewards(members, group_size), group_size, self.advantage, self.scale)
        return Shaped(tuple(advantages), metrics)

    def _taken(self, members: Sequence[Member], group_size: int) -> tuple[list[float], list[float]]:
        """Return what is taken off each episode: beside its group, and near the limit."""
        sizes = [member.size for member in members]
        return relative_penalties([member.total for member in members], sizes, group_size, self.penalty), [
            0.0 if self.overlong is None else overlong_penalty(size.completion_tokens, self.limit, self.overlong)
            for size in sizes
        ]


def members_of(episodes: Sequence[Scored]) -> list[Member]:
    """Return what other processes need to know of graded episodes."""
    return [
        Member(
            one.total,
            one.drop,
            EpisodeSize.of(one.trajectory),
            tuple(nan if value is None else value for value in one.rewards.values()),
        )
        for one in episodes
    ]


def loss_mask(trajectory: Trajectory, void_turns: str) -> tuple[int, ...]:
    """Return 1 on the tokens that are trained on: those that were sampled."""
    if void_turns == "mask_episode" and has_void_turn(trajectory):
        return (0,) * len(trajectory.mask)
    return trajectory.mask


def penalty_of(given: Mapping[str, float] | str | None) -> dict[str, float]:
    weights = _parsed("penalty", given, "'{\"turns\": 0.1}'")
    for name, weight in weights.items():
        if name not in SIZES:
            raise ConfigError(f"penalty knows {', '.join(SIZES)}; got {name!r}")
        if not 0 <= weight <= 1:
            raise ConfigError(f"the penalty on {name} must be between 0 and 1, got {weight:g}")
    if sum(weights.values()) > 1:
        raise ConfigError(
            f"the penalties add up to {sum(weights.values()):g}; above 1 an episode could lose more than its group earned "
            f"on average"
        )
    return {name: weight for name, weight in weights.items() if weight}


def overlong_of(given: Mapping[str, float] | str | None, limit: int) -> Overlong | None:
    if given is None:
        return None
    values = _parsed("overlong", given, '\'{"buffer": 256, "penalty": 1.0}\'')
    if set(values) != {"buffer", "penalty"}:
        raise ConfigError(
            f"overlong needs buffer (tokens) and penalty, and nothing else; got {', '.join(values) or '{}'}"
        )
    buffer, penalty = values["buffer"], values["penalty"]
    if buffer != int(buffer) or not 1 <= buffer <= limit:
        raise ConfigError(
            f"the buffer of overlong must be from 1 to max_completion_length ({limit}) tokens, got {buffer:g}"
        )
    if not 0 < penalty <= 1:
        raise ConfigError(f"the penalty of overlong must be above 0 and at most 1, got {penalty:g}")
    return Overlong(int(buffer), penalty)


def _parsed(name: str, given: Mapping[str, float] | str | None, example: str) -> dict[str, float]:
    value: Any = {} if given is None else given
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"{name} must be an object in JSON, as {example}; got {given!r}") from None
    if not isinstance(value, Mapping) or not all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in value.values()
    ):
        raise ConfigError(f"{name} must have a number behind each name, as {example}; got {given!r}")
    return {str(key): float(number) for key, number in value.items()}
