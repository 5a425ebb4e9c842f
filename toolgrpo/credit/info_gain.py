"""`info_gain`: how much nearer a turn's tool results brought the model to the gold answer.

    r[t] = p(answer | everything up to the results of turn t) - p(answer | everything before turn t)

IGPO's reward by turn (arXiv 2510.14967): p is the geometric mean over the answer's tokens of the
model's own probability, if it said the gold answer there. What `text` has before `{answer}` is
given, the answer and what follows it are asked for. The gains of an episode add up to the
last p less the first, at most 1, however many turns it takes. A turn whose results no later turn
could read has 0, as has every turn of a row without a gold answer.

It needs no judge and no gold calls, and it tells turns apart where all outcomes are alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from toolgrpo.errors import RewardError
from toolgrpo.rollout.batch import Row
from toolgrpo.trajectory import Trajectory

__all__ = ["AnswerAt", "InfoGain", "places_to_ask"]

_COLUMN = "answer"


@dataclass(frozen=True, slots=True)
class AnswerAt:
    """A question to the model: how probable is this answer behind what an episode had read
    before the token at `end`?

    `end` counts the tokens after the prompt; `given` are said between them and the answer.
    """

    trajectory: Trajectory
    end: int
    given: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def before(self) -> tuple[int, ...]:
        return (*self.trajectory.read_before(self.end), *self.given)


def places_to_ask(trajectory: Trajectory) -> list[int]:
    """Return where a turn begins, counted in tokens after the prompt: what it could read lies before it."""
    return [turn.start for turn in trajectory.turns]


@dataclass(frozen=True)
class InfoGain:
    """Asks the model; `logps` gives the mean log-probability of the answer's tokens for each question."""

    logps: Callable[[Sequence[AnswerAt]], list[float]]
    ids_of: Callable[[str], Sequence[int]]
    text: str = "{answer}"

    def __call__(self, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        """Return the gain of each turn of each trajectory."""
        questions: list[AnswerAt] = []
        places: list[list[int]] = []
        for row, trajectory in zip(rows, trajectories, strict=True):
            given, answer = self._said(row)
            ends = places_to_ask(trajectory) if answer and len(trajectory.turns) > 1 else []
            places.append(list(range(len(questions), len(questions) + len(ends))))
            questions += [AnswerAt(trajectory, end, given, answer) for end in ends]
        logps = self.logps(questions)
        if len(logps) != len(questions) or any(lp != lp or lp > 1e-3 for lp in logps):
            raise RewardError(
                "turn reward info_gain: the model gave no log-probability for an answer; its weights may be NaN"
            )
        found = []
        for trajectory, own in zip(trajectories, places, strict=True):
            chances = [exp(min(0.0, logps[place])) for place in own]
            gains = [after - before for before, after in itertools.pairwise(chances)]
            found.append((*gains, *(0.0,) * (len(trajectory.turns) - len(gains))))
        return found

    def _said(self, row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that lead to the answer, and its own; none where the row has no gold answer."""
        answer: Any = row.get(_COLUMN)
        if answer is None:
            return (), ()
        lead, _, _ = self.text.partition("{answer}")
        given = tuple(self.ids_of(lead)) if lead else ()
        whole = tuple(self.ids_of(self.text.replace("{answer}", str(answer))))
        if whole[: len(given)] == given:
            return given, whole[len(given) :]
        return given, tuple(self.ids_of(self.text.replace(lead, "", 1).replace("{answer}", str(answer))))
