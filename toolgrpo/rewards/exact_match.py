"""`exact_match`: 1.0 if the answer appears in the final response as a whole, else 0.0.

A row whose answer is None is not scored. Case and spacing are ignored. A number appears however it is written ("12500" in "$12,500"), and as a whole: "7" is not in
"72", "7.5", "7/10" or "-7".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from toolgrpo.episode.trajectory import Message, final_answer
from toolgrpo.rewards.numerals import WORD, all_numbers, plain, whole_number

_NO_NUMBER = re.compile(  # 1.2.3, 7b, 4.5kg; 1e5 is one
    rf"(?<!\d)(?<!\d[.,/])(?:\d+(?:\.\d+){{2,}}|\d+(?:[.,/]\d+)*(?![eE][-+]?\d+(?!\w))(?![\d_]){WORD}\w*)"
)
_FRACTION = re.compile(r"(?<![\d/.,])\d[\d.,]*\s?/\s?(?!(?:19|20)\d\d(?!\d))\d+(?:\.\d+)?(?![/\d])")  # no date


def exact_match(completions: Sequence[Sequence[Message]], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    return [
        None if expected is None else float(gives_answer(completion, expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def gives_answer(completion: Sequence[Message], answer: Any) -> bool:
    """Return whether the final response has the answer as a whole: "7" is not in "47", "7.5" or "-7"."""
    said, number = final_answer(completion), whole_number(str(answer))
    if number is not None and number in all_numbers(_NO_NUMBER.sub(" ", said)):
        return True
    return _appears(_plain(str(answer)), _plain(said if number is None else _FRACTION.sub(" ", plain(said))))


def _appears(answer: str, text: str) -> bool:
    if not answer or answer not in text:
        return False
    before = rf"(?<!{WORD})" if answer[0] in "-−" or answer[0].isalnum() else ""
    before += r"(?<!\d[.,])(?<![-−])(?<![-−][$€£¥₹])" if answer[0].isdigit() else ""
    after = rf"(?!{WORD})" if answer[-1].isalnum() else ""
    # a fraction is another number, a date is none
    after += r"(?![.,]\d)(?!\s?/\s?\d+(?![/\d]))" if answer[-1].isdigit() else ""
    return re.search(f"{before}{re.escape(answer)}{after}", text) is not None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
