"""A bandit in which one may stop: its gradient is known, and `turns` estimates it without a bias."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from math import exp, prod, sqrt
from statistics import fmean
from typing import Any

import pytest

from tests.support.trainings import STAGES
from toolgrpo.support.plugin_files import import_file

CREDIT = import_file(STAGES / "turn_credit.py")
LOGIT = 0.4  # of going on; the other action is to stop
CHANCE = 1 / (1 + exp(-LOGIT))
MOST_TURNS = 3
GROUP = 4
N = 100_000  # episodes

GO, STOP = 1, 0
Advantages = Callable[[Sequence[Any]], list[tuple[float, ...]]]


def episode(actions: Sequence[int]) -> Any:
    """Each turn costs 0.5; the outcome is better by 0.2 for each time that one went on."""
    return CREDIT.EpisodeTurns(1.0 + 0.2 * sum(actions), (-0.5,) * len(actions))


def scores(actions: Sequence[int]) -> list[float]:
    """Return the derivative of the log-probability of each action by the logit."""
    return [(1.0 if action == GO else 0.0) - CHANCE for action in actions]


def true_gradient() -> float:
    """Return the derivative of the mean return, from all ways an episode can go."""
    ways = [[GO] * n + [STOP] for n in range(MOST_TURNS)] + [[GO] * MOST_TURNS]
    total = 0.0
    for actions in ways:
        probability = prod(CHANCE if action == GO else 1 - CHANCE for action in actions)
        one = episode(actions)
        total += probability * (one.total + sum(one.rewards)) * sum(scores(actions))
    return total


def draw(rng: random.Random) -> list[int]:
    actions: list[int] = []
    while len(actions) < MOST_TURNS and (not actions or actions[-1] == GO):
        actions.append(GO if rng.random() < CHANCE else STOP)
    return actions


def estimate(advantages: Advantages) -> tuple[float, float]:
    """Return the mean of the policy gradient over all groups, and its standard error.

    Groups that are alike are counted once: there are few ways that an episode can go.
    """
    rng = random.Random(7)
    groups = [[draw(rng) for _ in range(GROUP)] for _ in range(N // GROUP)]
    known: dict[tuple[tuple[int, ...], ...], float] = {}
    values = []
    for group in groups:
        key = tuple(sorted(map(tuple, group)))
        if key not in known:
            given = advantages([episode(actions) for actions in key])
            known[key] = fmean(
                sum(a * s for a, s in zip(of, scores(actions), strict=True))
                for of, actions in zip(given, key, strict=True)
            )
        values.append(known[key])
    mean = fmean(values)
    return mean, sqrt(fmean((value - mean) ** 2 for value in values) / len(values))


def normalised_turn_by_turn(group: Sequence[Any]) -> list[tuple[float, ...]]:
    """The naive form: the outcome less its mean, and each turn's rewards less theirs over who has that
    turn, added up from each turn on.
    """
    outcome = fmean(one.total or 0.0 for one in group)
    means = [
        fmean(reward for reward in of if reward is not None)
        for of in itertools.zip_longest(*(one.rewards for one in group))
    ]
    by = GROUP / (GROUP - 1)  # leave-one-out, as the other
    return [
        tuple(
            by * ((one.total or 0.0) - outcome + sum(r - means[k] for k, r in enumerate(one.rewards) if k >= t))
            for t in range(len(one.rewards))
        )
        for one in group
    ]


def off_by(advantages: Advantages) -> float:
    """Return how many standard errors the estimate is away from the true gradient."""
    mean, error = estimate(advantages)
    assert error < 0.01
    return abs(mean - true_gradient()) / error


@pytest.mark.property
def test_the_credit_of_turns_estimates_the_true_gradient() -> None:
    assert off_by(lambda group: CREDIT.turn_advantages(group, len(group), "none")) < 3


def test_rewards_normalised_turn_by_turn_do_not() -> None:
    assert off_by(normalised_turn_by_turn) > 10
    wrong, _ = estimate(normalised_turn_by_turn)
    assert true_gradient() < 0 < wrong  # it pays for taking another turn, which costs more than it earns
