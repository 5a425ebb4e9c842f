"""A check of the data: does the gold answer score full marks?

For each reward that can be earned by an answer alone, an episode is written down that gives the
gold answer, and the reward itself scores it. What comes out below full marks is a row that no model
could do well on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from toolgrpo.errors import DataError
from toolgrpo.rewards import Reward
from toolgrpo.rewards.by_task import ByTask
from toolgrpo.trajectory import Message

__all__ = ["GOLD", "check_gold"]


def _answer(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": str(row["answer"])}]


def _tool_then_answer(row: Mapping[str, Any]) -> list[Message]:
    return [
        {"role": "assistant", "content": ""},
        {"role": "tool", "name": "gold", "content": str(row["answer"])},
        *_answer(row),
    ]


def _boxed_answer(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": rf"\boxed{{{row['answer']}}}"}]


def _program_as_answer(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "assistant", "content": f"```python\n{row['answer']}\n```"}]


GOLD: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "accuracy": _tool_then_answer,
    "code_exec": _program_as_answer,
    "exact_match": _answer,
    "gsm8k": _answer,
    "math": _boxed_answer,
    "reasoning_gym": _boxed_answer,
}


def check_gold(rows: Iterable[Mapping[str, Any]], reward: Reward) -> int | None:
    """Check that gold answers get full marks; return how many rows were checked.

    None where this reward needs more than an answer. With `by_task` each row is checked with the
    reward of its own task, where that can be done.
    """
    checked = 0
    for number, row in enumerate(rows):
        of_row = reward.function.reward(row["reward"]) if isinstance(reward.function, ByTask) else reward
        if of_row.source == "built in" and of_row.name in GOLD:
            _check_row(number, row, of_row)
            checked += 1
        elif of_row is reward:
            return None
    return checked or None


def _check_row(number: int, row: Mapping[str, Any], reward: Reward) -> None:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    (score,) = reward(prompts=[row["prompt"]], completions=[GOLD[reward.name](row)], **columns)
    if not isinstance(score, float) or score < 1.0:
        raise DataError(
            f"row {number}: its own answer {str(row['answer'])[:60]!r} scores {score} with the reward "
            f"{reward.name}, so no model can do well on it. Mend the answer, or choose another reward."
        )
