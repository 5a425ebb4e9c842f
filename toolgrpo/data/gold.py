"""A check of the data: does the gold answer score full marks?

For each reward that can be earned by an answer alone, an episode is written down that gives the gold answer, and the
reward itself scores it. What comes out below full marks is a row that no model could do well on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from toolgrpo.errors import DataError
from toolgrpo.rewards import Reward
from toolgrpo.trajectory import Message

__all__ = ["GOLD", "check_gold"]


def _says(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": str(row["answer"])}]


def _tool_says(row: Mapping[str, Any]) -> list[Message]:
    return [
        {"role": "assistant", "content": ""},
        {"role": "tool", "name": "gold", "content": str(row["answer"])},
        *_says(row),
    ]


def _boxed(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": rf"\boxed{{{row['answer']}}}"}]


GOLD: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "accuracy": _tool_says,
    "exact_match": _says,
    "gsm8k": _says,
    "math": _boxed,
    "reasoning_gym": _boxed,
}


def check_gold(rows: Iterable[Mapping[str, Any]], reward: Reward) -> int | None:
    """How many rows were checked, all with full marks; None where this reward needs more than an answer."""
    if reward.source != "built in" or reward.name not in GOLD:
        return None
    checked = 0
    for checked, row in enumerate(rows, start=1):
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        (score,) = reward(prompts=[row["prompt"]], completions=[GOLD[reward.name](row)], **columns)
        if score < 1.0:
            raise DataError(
                f"row {checked - 1}: its own answer {str(row['answer'])[:60]!r} scores {score:g} with the reward "
                f"{reward.name}, so no model can do well on it. Mend the answer, or choose another reward."
            )
    return checked
