"""`by_task`: each row is scored by the reward that its column `reward` names, a built-in name or
the path of a file.

For mixtures of tasks. The rows of one reward are scored together, as if they were the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import RewardError
from toolgrpo.rewards.base import Reward, Score, only_rows, row_name, rows_named


class ByTask:
    """A reward function over other rewards; `find` gives each by its name."""

    def __init__(self, find: Callable[[str], Reward]) -> None:
        self._find = find
        self._found: dict[str, Reward] = {}

    def __call__(
        self,
        completions: Sequence[list[Message]],
        reward: Sequence[str | None],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[Score]:
        scores: list[Score] = [None] * len(completions)
        of_batch = row_name.get()
        for name in dict.fromkeys(reward):
            if name is None:
                raise RewardError(
                    f"reward by_task: {row_name.get()(list(reward).index(None))} names no reward in its column 'reward'"
                )
            rows = [row for row, wanted in enumerate(reward) if wanted == name]
            own = only_rows(columns, rows, len(completions))
            if log_metric is not None:
                own["log_metric"] = log_metric
            with rows_named(lambda place, rows=rows: of_batch(rows[place])):  # type: ignore[misc]
                values = self.reward(name)(completions=[completions[row] for row in rows], **own)
            for row, value in zip(rows, values, strict=True):
                scores[row] = value
            numbers = [value for value in values if isinstance(value, float)]
            if log_metric is not None and numbers:
                log_metric(f"reward_of_task/{name}", sum(numbers) / len(numbers))
        return scores

    def reward(self, name: str) -> Reward:
        """Return the reward that rows call by this name, loaded once."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def check_columns(self, names: Iterable[str | None], columns: Collection[str]) -> None:
        """Check that every reward that rows name exists, and has the columns it asks for."""
        for name in dict.fromkeys(names):
            if name is None:
                raise RewardError("reward by_task: some rows name no reward in their column 'reward'")
            self.reward(name).check_columns(columns)
