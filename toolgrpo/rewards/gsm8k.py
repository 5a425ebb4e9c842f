r"""`gsm8k`: 1.0 if the last number of the final response equals the answer, else 0.0.

The answer is a bare number or GSM8K's own text that ends in `#### N`. Where the response marks its
answer (`\boxed{}` or `####`), the last number of the marked part counts. An answer without a number
is an error of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolgrpo.errors import RewardError
from toolgrpo.rewards.episode_reading import final_answer
from toolgrpo.rewards.numerals import last_number, marked_answer
from toolgrpo.trajectory import Message


def gsm8k(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    scores = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        wanted = last_number(marked_answer(str(expected)))
        if wanted is None:
            raise RewardError(f"reward gsm8k: the answer of row {row} holds no number: {str(expected)[:80]!r}")
        scores.append(float(last_number(marked_answer(final_answer(completion))) == wanted))
    return scores
