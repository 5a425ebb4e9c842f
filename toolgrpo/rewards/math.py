r"""`math` and `gsm8k`: 1.0 if the final response gives the answer, else 0.0.

`math` is for AIME integers, and whatever stands in `\boxed{}`. A response's answer is what stands in
its last `\boxed{}`, or else its last number. Numbers are compared as numbers (leading zeros do not
count), anything else as LaTeX text without spacing and sizing marks. Not covered: the equality of
different expressions, such as x+1 and 1+x.

`accuracy_reward` and `reasoning_accuracy_reward` are TRL's, which compare formulas with math_verify. It computes what
the model wrote, such as `(10^8)!`, and its time limit is an alarm that only the main thread has and that does not end a
native call. So here each answer is compared in the sandbox; one that takes 5 s or fails there is wrong.

The answer of `gsm8k` is a bare number or GSM8K's own text that ends in `#### N`. It compares the last
number of the response, where that marks its answer (`\boxed{}` or `####`) of the marked part. An
answer without a number is an error of the data. Rows whose answer is None are not scored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from confined_python import DEFAULT_PRELOAD, SharedSandbox
from toolgrpo.episode.trajectory import Message, final_answer
from toolgrpo.errors import RewardError
from toolgrpo.rewards.base import row_name
from toolgrpo.rewards.numerals import all_numbers, boxed, last_number, marked_answer

_SHARED = SharedSandbox(preload=(*DEFAULT_PRELOAD, "latex2sympy2_extended", "math_verify"))
_EQUAL = """
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
units = NormalizationConfig(units=True)
how = LatexExtractionConfig(boxed_match_priority=0, normalization_config=units, try_extract_without_anchor=False)
gold = parse({gold!a}, parsing_timeout=None)
given = parse({text!a}, extraction_config=[how], extraction_mode="first_match", parsing_timeout=None) if gold else []
verify(gold, given, timeout_seconds=None) if gold else "no gold"
"""
_NOTHING = re.compile(r"\\(?:left|right|,|;|!|quad|displaystyle)|\\?[\s$]|(?<=\d)\^(?:\\circ|\{\\circ\})|\\?%")
_UNIT = re.compile(r"(?<=[\d}])\s*\\text\{[^{}]*\}(?:\^\{?\d\}?)?[\s$.]*$")  # behind a number
_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_FORMULA = re.compile(r"\\sqrt|\\pi|\\pm|[√π±²³]|\d\s*\^(?!\s*\{?\\circ)|\d!")  # a number in it is not its value
_ONLY_NUMBER = re.compile(r"[-−+]?[\d.,/]+|[-−+]?\\[dt]?frac\{[\d.]+\}\{[\d.]+\}")


def math(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    return [
        None if expected is None else float(_same(final_answer(completion), str(expected)))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def gsm8k(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        if expected is None:
            scores.append(None)
            continue
        wanted = last_number(marked_answer(str(expected)))
        if wanted is None:
            raise RewardError(
                f"reward gsm8k: the answer of {row_name.get()(row)} holds no number: {str(expected)[:80]!r}"
            )
        scores.append(float(last_number(marked_answer(final_answer(completion))) == wanted))
    return scores


def rows_without_number(rows: Any) -> dict[int, str]:
    """Return which rows of a data set have an answer that `gsm8k` cannot read."""
    answers = rows["answer"] if "answer" in rows.column_names else ()
    return {
        number: "the answer holds no number"
        for number, answer in enumerate(answers)
        if answer is not None and last_number(marked_answer(str(answer))) is None
    }


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    texts = [completion[0]["content"] for completion in completions]
    programs = [_EQUAL.format(gold=gold, text=text) for gold, text in zip(solution, texts, strict=True)]
    return [None if equal == "no gold" else float(equal is True) for equal in _SHARED.values(programs, timeout=5.0)]


def reasoning_accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    cut = [completion[0]["content"].rpartition("</think>") for completion in completions]
    scores = accuracy_reward([[{"content": text}] for *_, text in cut], solution)
    return [score if end else 0.0 for score, (_, end, _) in zip(scores, cut, strict=True)]


def _same(response: str, expected: str) -> bool:
    wanted = boxed(expected) or expected
    given = boxed(response)
    number = _number(wanted)
    if number is not None:
        if given is None:
            return last_number(response) == number
        side = re.sub(r"([-−])\s+", r"\1", given.rpartition("=")[2])  # of an equation the right one
        return all_numbers(side) == [number] and not _FORMULA.search(side)
    return given is not None and _text(given) == _text(wanted)


def _number(text: str) -> Fraction | None:
    bare = _text(text)
    numbers = all_numbers(bare) if _ONLY_NUMBER.fullmatch(bare) and not re.search(r",\s+\d", text) else []
    return numbers[0] if len(numbers) == 1 else None  # 3,5,7 are several, and so are 100, 200


def _text(latex: str) -> str:
    text = (
        _NOTHING.sub("", _WORDS.sub(r"\1", _UNIT.sub("", latex)))
        .replace("dfrac", "frac")
        .replace("tfrac", "frac")
        .rstrip(".")
    )
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)  # \frac12
