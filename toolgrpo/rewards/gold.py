"""A check of the data: does the gold answer of a row score full marks with its reward?

A built-in reward that can be earned by an answer alone says in `BUILT_IN` how a gold episode is
written down; the reward itself scores it. What comes out below full marks is a row that no model
could do well on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import DataError, RewardError
from toolgrpo.rewards.base import Reward
from toolgrpo.rewards.by_task import ByTask

GoldEpisode = Callable[[Mapping[str, Any]], list[Message]]
"""`gold(row)`: the messages of an episode that gives the row's own answer."""


def as_answer(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": str(row["answer"])}]


def as_result_and_answer(row: Mapping[str, Any]) -> list[Message]:
    return [
        {"role": "assistant", "content": ""},
        {"role": "tool", "name": "gold", "content": str(row["answer"])},
        *as_answer(row),
    ]


def as_boxed_answer(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": rf"\boxed{{{row['answer']}}}"}]


def as_program(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": f"```python\n{row['answer']}\n```"}]


def check_gold(rows: Iterable[Mapping[str, Any]], reward: Reward) -> int | None:
    """Check that gold answers get full marks; return how many rows were checked.

    None where this reward needs more than an answer. With `by_task` each row is checked with the
    reward of its own task, where that can be done.
    """
    checked = 0
    for number, row in enumerate(rows):
        of_row = reward.function.reward(row["reward"]) if isinstance(reward.function, ByTask) else reward
        if of_row.gold is not None and row.get("answer") is None:
            continue
        if of_row.gold is not None:
            _check_row(partial(_place, rows, number), row, of_row, of_row.gold)
            checked += 1
        elif of_row is reward:
            return None
    return checked or None


def _place(rows: Any, number: int) -> str:
    from toolgrpo.data.load import places_of  # a trainer that is given its rows needs no reader of files

    return places_of(rows, [number])[number]


def refused_rows(rows: Any, reward: Reward) -> dict[int, str]:
    """Return which rows of a table a reward cannot score, by their number, and why."""
    return {} if reward.refused is None else reward.refused(rows)


def refused_by_task(by_task: ByTask, rows: Any) -> dict[int, str]:
    """Return which rows the reward of their own task cannot score."""
    refused: dict[int, str] = {}
    for name in dict.fromkeys(rows["reward"]):
        numbers = [number for number, wanted in enumerate(rows["reward"]) if wanted == name]
        found = refused_rows(rows.select(numbers), by_task.reward(name))
        refused |= {numbers[number]: why for number, why in found.items()}
    return refused


def _check_row(place: Callable[[], str], row: Mapping[str, Any], reward: Reward, gold: GoldEpisode) -> None:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    try:
        (score,) = reward(prompts=[row["prompt"]], completions=[gold(row)], **columns)
    except RewardError as error:  # it was asked for one row alone, and counts from 0
        raise RewardError(f"{place()}, scored alone: {error}") from error
    if not isinstance(score, float) or score < 1.0:
        raise DataError(
            f"{place()}: its own answer {str(row['answer'])[:60]!r} scores {score} with the reward "
            f"{reward.name}, so no model can do well on it. Fix the answer, or choose another reward."
        )
