"""`tool_result`: the last tool response against the answer. `accuracy` is its old name, which recipes have.

1.0 if it is the answer (case and outer space ignored; 5 is 5.0), 0.1 if a tool was called but the answer
differs, 0.0 without a call. A row whose answer is None is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolgrpo.episode.trajectory import Message
from toolgrpo.rewards.numerals import whole_number

RIGHT, CALLED, SILENT = 1.0, 0.1, 0.0


def accuracy(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    return [
        None if expected is None else _score(completion, expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _score(completion: Sequence[Message], expected: Any) -> float:
    responses = [message["content"] for message in completion if message["role"] == "tool"]
    if not responses:
        return SILENT
    number = whole_number(str(expected))
    same = number is not None and whole_number(str(responses[-1])) == number
    return RIGHT if same or _plain(responses[-1]) == _plain(expected) else CALLED


def _plain(value: Any) -> str:
    return str(value).strip().casefold()
