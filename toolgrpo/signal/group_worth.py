"""What the rewards of one group add up to, as TRL will combine them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, sqrt

from toolgrpo.signal.dead_groups import is_dead

_TRL_EPSILON = 1e-4  # what TRL adds to a standard deviation before it divides


def weighted_sums(values: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of each episode's rewards.

    NaN stands for a function that does not score the episode; None for an episode without any score.
    """
    return [
        None
        if all(map(isnan, of_episode))
        else sum(weight * value for weight, value in zip(weights, of_episode, strict=True) if not isnan(value))
        for of_episode in values
    ]


def combined_rewards(
    values: Sequence[Sequence[float]], weights: Sequence[float], *, normalize_first: bool
) -> list[float | None]:
    """Return the rewards of a group's episodes whose spread its advantages are made from.

    They are the weighted sums; with `normalize_first` (TRL's `normalize_then_sum`) those of each
    function's values less their mean, over their standard deviation.
    """
    if not normalize_first:
        return weighted_sums(values, weights)
    columns = [_normalized(column) for column in zip(*values, strict=True)]
    return weighted_sums(list(zip(*columns, strict=True)), weights)


def _normalized(column: Sequence[float]) -> list[float]:
    scores = [value for value in column if not isnan(value)]
    if is_dead(column):  # rounding, divided by next to nothing, must not look like a spread
        return [value if isnan(value) else 0.0 for value in column]
    mean = sum(scores) / len(scores)
    std = sqrt(sum((value - mean) ** 2 for value in scores) / (len(scores) - 1))
    return [(value - mean) / (std + _TRL_EPSILON) for value in column]
