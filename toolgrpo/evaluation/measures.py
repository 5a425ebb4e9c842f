"""Success rates of a model with confidence intervals.

Pure functions and values; `run.py` makes the episodes, `report.py` shows them.

Intervals are Wilson's at 95 %, with the number of *questions* as n, however many episodes each
question had: episodes of one question are not independent. A per-question value between 0 and 1
varies at most as a coin of the same mean does, so the interval is rather too wide than too narrow.
The interval of a difference is Newcombe's for pairs: both models answer the same questions, and what
is hard for one is mostly hard for the other. There a question counts as often as its values spread less
than coins, at most as often as it was tried.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from toolgrpo.episode.trajectory import Message, final_answer
from toolgrpo.rewards.numerals import last_number, marked_answer

_ENOUGH = 30  # questions, for their spread to be known


def wilson_interval(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion, at 95 % unless `z` says otherwise; sound also near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Share:
    """The mean of a value between 0 and 1 that each of n questions has."""

    value: float
    n: int
    weight: float = 1.0  # of a question, in episodes that would be independent

    @classmethod
    def of(cls, values: Sequence[float], most: float = 1.0) -> Share:
        """Return the share; a question is worth up to `most` independent episodes, as its values spread less than coins."""
        if not values:
            return cls(0.0, 0)
        value = fmean(values)
        coins, spread = value * (1 - value), pvariance(values)
        weight = max(1.0, min(most, coins / spread if spread > 0 else most)) if coins > 0 else 1.0
        return cls(value, len(values), weight)

    @property
    def interval(self) -> tuple[float, float]:
        return self.interval_at(1.96)

    def interval_at(self, z: float) -> tuple[float, float]:
        n = self.n * self.weight
        return wilson_interval(self.value * n, n, z) if n else (0.0, 1.0)

    def __str__(self) -> str:
        if self.n == 0:
            return "-"
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True, slots=True)
class Difference:
    """After minus before.

    `correlation` is of what the questions were worth before and after; 0 for questions that are not
    the same.
    """

    before: Share
    after: Share
    correlation: float = 0.0

    @classmethod
    def paired(cls, before: Mapping[int, float], after: Mapping[int, float], most: float = 1.0) -> Difference:
        """Return the difference of values by question, with the interval of Newcombe 1998c, method 10.

        Questions that only one of the two has are left out: those that were dropped may be the hard ones.
        """
        pairs = [(before[question], after[question]) for question in before if question in after]
        most = most if len(pairs) >= _ENOUGH else 1.0
        first, second = (Share.of([pair[at] for pair in pairs], most) for at in (0, 1))
        return cls(first, second, _correlation(pairs, most))

    @property
    def value(self) -> float:
        return self.after.value - self.before.value

    @property
    def interval(self) -> tuple[float, float]:
        return self.interval_at(1.96)

    def interval_at(self, z: float) -> tuple[float, float]:
        """Return the interval of another level than 95 %."""
        (low_before, high_before), (low_after, high_after) = (
            share.interval_at(z) for share in (self.before, self.after)
        )
        below = self._together(self.after.value - low_after, high_before - self.before.value)
        above = self._together(high_after - self.after.value, self.before.value - low_before)
        return self.value - below, self.value + above

    def _together(self, one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * self.correlation * one * other + other * other))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:+.3f} [{low:+.3f}, {high:+.3f}]"


Vote = tuple[str | None, bool]
"""An episode in maj@k: its final answer (None: it gave none), and whether it succeeded."""


def pass_at_k(successes: int, n: int, k: int) -> float:
    """Return the chance that one of k episodes succeeds, estimated without bias from n of them."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs k from 1 to the number of episodes; got k={k}, n={n}")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Return how good the most frequent answer of k episodes is.

    It is the mean over as many disjoint sets of k as there are.

    The winning answer is worth the share of successes among the episodes that gave it (all winners
    together, on a tie). Episodes without an answer do not vote; where none votes, the value is 0.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@k needs k from 1 to the number of episodes; got k={k}, n={len(votes)}")
    return fmean(_majority(votes[start : start + k]) for start in range(0, len(votes) - k + 1, k))


def _majority(votes: Sequence[Vote]) -> float:
    by_answer: dict[str, list[bool]] = defaultdict(list)
    for answer, success in votes:
        if answer is not None:
            by_answer[answer].append(success)
    most = max(map(len, by_answer.values()), default=0)
    winners = [success for voters in by_answer.values() if len(voters) == most for success in voters]
    return fmean(winners) if winners else 0.0


def _correlation(pairs: Sequence[tuple[float, float]], most: float = 1.0) -> float:
    """Return the correlation of pairs; a positive one is made less by 1/(2n) of covariance, as method 10 does."""
    if not pairs:
        return 0.0
    means = [fmean(values) for values in zip(*pairs, strict=True)]
    apart = [[value - mean for value, mean in zip(pair, means, strict=True)] for pair in pairs]
    spread = math.sqrt(fmean(one * one for one, _ in apart) * fmean(other * other for _, other in apart))
    if spread == 0:
        return 0.0
    together = fmean(one * other for one, other in apart)
    return (max(0.0, together - 1 / (2 * len(pairs) * most)) if together > 0 else together) / spread


def given_answer(completion: Sequence[Message]) -> str | None:
    """Return the final answer in a form that can be compared, or None if there is none.

    That is its last number, or else its text.
    """
    marked = marked_answer(final_answer(completion))
    number = last_number(marked)
    if number is not None:
        return str(number)
    return " ".join(marked.split()).casefold() or None
