r"""`math`: 1.0 if the final response gives the answer, else 0.0; AIME integers, and whatever stands
in `\boxed{}`.

A response's answer is what stands in its last `\boxed{}`, or else its last number. Numbers are
compared as numbers (leading zeros do not count), anything else as LaTeX text without spacing and
sizing marks. Not covered: the equality of different expressions, such as x+1 and 1+x.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from toolgrpo.rewards.episode_reading import final_answer
from toolgrpo.rewards.numerals import boxed, last_number
from toolgrpo.trajectory import Message

_NOTHING = re.compile(r"\\(?:left|right|,|;|!|quad|displaystyle)|[\s$]|\\text\{[^{}]*\}|(?<=\d)\^\\circ|\\%")
_ONLY_NUMBER = re.compile(r"[-−+]?[\d.,/]+|[-−+]?\\[dt]?frac\{[\d.]+\}\{[\d.]+\}")


def math(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    return [
        float(_same(final_answer(completion), str(expected)))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _same(response: str, expected: str) -> bool:
    wanted = boxed(expected) or expected
    given = boxed(response)
    number = _number(wanted)
    if number is not None:
        return (last_number(given) if given is not None else last_number(response)) == number
    return given is not None and _text(given) == _text(wanted)


def _number(text: str) -> Fraction | None:
    bare = _text(text)
    return last_number(bare) if _ONLY_NUMBER.fullmatch(bare) else None


def _text(latex: str) -> str:
    text = _NOTHING.sub("", latex).replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".")
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)  # \frac12
