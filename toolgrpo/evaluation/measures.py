"""Success rates of a model with confidence intervals.

Pure functions and values; `run.py` makes the episodes, `report.py` shows them.

Intervals are Wilson's at 95 %, with the number of *questions* as n, however many episodes each
question had: episodes of one question are not independent. A per-question value between 0 and 1
varies at most as a coin of the same mean does, so the interval is rather too wide than too narrow.
The interval of a difference is Newcombe's for pairs: both models answer the same questions, and what
is hard for one is mostly hard for the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from toolgrpo.episode.trajectory import Message, final_answer
from toolgrpo.rewards.numerals import last_number, marked_answer


def wilson_interval(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
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

    @classmethod
    def of(cls, values: Sequence[float]) -> Share:
        return cls(fmean(values) if values else 0.0, len(values))

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.value * self.n, self.n)

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
    def paired(cls, before: Mapping[int, float], after: Mapping[int, float]) -> Difference:
        """Return the difference of values by question, with the interval of Newcombe 1998c, method 10.

        Questions that only one of the two has count in its mean, and not in the correlation.
        """
        both = before.keys() & after.keys()
        pairs = [(before[question], after[question]) for question in both]
        return cls(Share.of([*before.values()]), Share.of([*after.values()]), _correlation(pairs))

    @property
    def value(self) -> float:
        return self.after.value - self.before.value

    @property
    def interval(self) -> tuple[float, float]:
        return self.interval_at(1.96)

    def interval_at(self, z: float) -> tuple[float, float]:
        """Return the interval of another level than 95 %."""
        (low_before, high_before), (low_after, high_after) = (
            wilson_interval(share.value * share.n, share.n, z) for share in (self.before, self.after)
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


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the correlation of pairs; a positive one is made less by 1/(2n) of covariance, as method 10 does."""
    if not pairs:
        return 0.0
    means = [fmean(values) for values in zip(*pairs, strict=True)]
    apart = [[value - mean for value, mean in zip(pair, means, strict=True)] for pair in pairs]
    spread = math.sqrt(fmean(one * one for one, _ in apart) * fmean(other * other for _, other in apart))
    if spread == 0:
        return 0.0
    together = fmean(one * other for one, other in apart)
    return (max(0.0, together - 1 / (2 * len(pairs))) if together > 0 else together) / spread


def given_answer(completion: Sequence[Message]) -> str | None:
    """Return the final answer in a form that can be compared, or None if there is none.

    That is its last number, or else its text.
    """
    marked = marked_answer(final_answer(completion))
    number = last_number(marked)
    if number is not None:
        return str(number)
    return " ".join(marked.split()).casefold() or None
