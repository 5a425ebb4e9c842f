"""Say whether a model is worse than its baseline, on the whole and on single tools, or how many questions would say it.

The verdict is the paired interval of the table: worse below 0, better above 0, undecided where it has 0 in it. Of two equal
models at most one comparison in forty is called worse. Tools and tasks are looked at together, each at a level that is
corrected for their number (Bonferroni), and do not change the verdict.

Not covered: rows of which a question is in several tasks; questions that only one of the two could be scored on, which are
left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

from toolgrpo.evaluation.measures import Difference

_FEWEST = 5  # questions of a tool or task; fewer decide nothing
_MOST_QUESTIONS = 100_000  # beyond that it is not said how many more


@dataclass(frozen=True, slots=True)
class Regression:
    """A tool or a task on which the model is worse."""

    name: str  # "tool add" or "task chains"
    questions: int
    value: float
    interval: tuple[float, float]  # corrected

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.name} ({self.questions} questions): {self.value:+.3f} [{low:+.3f}, {high:+.3f}]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of a model with its baseline by one measure."""

    measure: str  # as pass@1
    difference: Difference
    regressions: tuple[Regression, ...] = ()
    looked_at: int = 0  # tools and tasks

    @classmethod
    def of(
        cls,
        measure: str,
        before: Mapping[int, float],
        after: Mapping[int, float],
        parts: Mapping[str, Iterable[int]],
        most: float = 1.0,
    ) -> Verdict:
        """Return the verdict of values by question. `parts` are the questions of each tool and task, by its name."""
        shared = before.keys() & after.keys()
        looked_at = {name: own for name, given in parts.items() if len(own := shared.intersection(given)) >= _FEWEST}
        z = NormalDist().inv_cdf(1 - 0.025 / max(1, len(looked_at)))
        found = []
        for name, own in looked_at.items():
            first, second = ({one: values[one] for one in own} for values in (before, after))
            difference = Difference.paired(first, second)
            interval = difference.interval_at(z)
            if interval[1] < 0:
                found.append(Regression(name, len(own), difference.value, interval))
        found.sort(key=lambda one: one.interval[1])
        return cls(measure, Difference.paired(before, after, most), tuple(found), len(looked_at))

    @property
    def verdict(self) -> Literal["worse", "better", "undecided"]:
        low, high = self.difference.interval
        return "worse" if high < 0 else "better" if low > 0 else "undecided"

    @property
    def questions_more(self) -> int | None:
        """Return how many questions more would decide it, at this difference and spread; None if that is out of reach."""
        n = max(self.difference.before.n, self.difference.after.n)
        low, high = max(1, n), 2 * max(1, n)
        while not self._decided(high):
            low, high = high, 2 * high
            if low > _MOST_QUESTIONS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._decided(middle) else (middle, high)
        return high - n

    def _decided(self, n: int) -> bool:
        found = self.difference
        low, high = Difference(replace(found.before, n=n), replace(found.after, n=n), found.correlation).interval
        return high < 0 or low > 0

    def lines(self) -> list[str]:
        """Return what the terminal shows of it."""
        said = f"verdict   {self.verdict}: {self.measure} {self.difference}"
        if self.verdict == "undecided":
            more = self.questions_more
            enough = "no number of questions within reach would decide it"
            if more is not None:
                enough = f"about {more} questions more would decide it, at this difference and spread"
            said += f"; {enough}"
        corrected = f"; corrected for {self.looked_at} tools and tasks"
        return [said, *(f"          worse on {one}{corrected}" for one in self.regressions)]

    def as_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "verdict": self.verdict,
            "questions_more": self.questions_more if self.verdict == "undecided" else None,
            "worse_on": [
                {"name": one.name, "questions": one.questions, "value": one.value, "interval": list(one.interval)}
                for one in self.regressions
            ],
        }


def tools_and_tasks(episodes: Iterable[Any]) -> dict[str, set[int]]:
    """Return the questions of each task, and of each tool, by its name: the tools that rows name as right; if none does, those
    that either model called, so that neither is at an advantage.
    """
    tasks, named, called = (defaultdict[str, set[int]](set) for _ in range(3))
    for one in episodes:
        if one.task is not None:
            tasks[f"task {one.task}"].add(one.question)
        for tool in one.tools:
            named[f"tool {tool}"].add(one.question)
        for call in one.calls:
            if call.ok:
                called[f"tool {call.name}"].add(one.question)
    return {**tasks, **(named or called)}
