r"""`reasoning_gym`: 1.0 if the scorer of the row's own task gives full marks to the bare answer, else 0.0.

The bare answer is what stands in the last `\boxed{}` or `<answer>` of the final response, or else its last line after
"answer:" or "answer is". Partial marks count as nothing: some of the scorers give them for a substring or for any text
at all. A scorer that raises could not read the model's answer, which is then wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from toolgrpo.rewards.numerals import boxed
from toolgrpo.rewards.reading import final_answer
from toolgrpo.trajectory import Message

__all__ = ["reasoning_gym"]


def reasoning_gym(
    completions: Sequence[Sequence[Message]],
    gym_task: Sequence[str],
    gym_entry: Sequence[dict[str, Any]],
    **kwargs: Any,
) -> list[float]:
    return [
        _score(task, bare_answer(final_answer(completion)), entry)
        for completion, task, entry in zip(completions, gym_task, gym_entry, strict=True)
    ]


def bare_answer(text: str) -> str:
    """The answer without the words around it."""
    inside = boxed(text)
    if inside is not None:
        return inside
    tagged = _last_tagged(text)
    if tagged is not None:
        return tagged
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return re.split(r"answer\s*(?:is|:)\s*:?", last, flags=re.IGNORECASE)[-1].strip(" *`").rstrip(".").strip(" *`")


def _last_tagged(text: str) -> str | None:
    """What stands in the last closed `<answer>`, found in one pass over the tags."""
    start, last = -1, None
    for tag in re.finditer(r"<(/?)answer>", text, re.IGNORECASE):
        if tag[1] and start >= 0:
            start, last = -1, text[start : tag.start()]
        elif not tag[1] and start < 0:
            start = tag.end()
    return None if last is None else last.strip()


def _score(task: str, answer: str, entry: dict[str, Any]) -> float:
    try:
        marks = _scorer(task)(answer, entry)
    except Exception:  # see the module: the scorers of many authors, fed with a model's text
        return 0.0
    return float(marks >= 1.0)


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym as library

    scorer: Callable[[str, dict[str, Any]], float] = library.create_dataset(task, size=1, seed=0).score_answer
    return scorer
