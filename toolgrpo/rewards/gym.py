r"""`reasoning_gym`: 1.0 if the scorer of the row's own task gives full marks to the bare answer,
else 0.0.

The bare answer is what stands in the last `\boxed{}` or `<answer>` of the final response, or else
its last line after "answer:" or "answer is". Partial marks count as nothing: some of the scorers
give them for a substring or for any text at all.

Some of the scorers evaluate the answer as Python. So all run in the sandbox; those that expect a
list read literals alone, and those that expect a formula get none but formulas. One that raises, or
takes more than 5 s, could not read the model's answer, which is then wrong. A sandbox that is lost
is replaced once, then it is an error.
"""

from __future__ import annotations

import builtins
import pickle
import re
from collections.abc import Sequence
from typing import Any

from confined_python import DEFAULT_PRELOAD, SharedSandbox
from toolgrpo.episode.trajectory import Message, final_answer
from toolgrpo.errors import RewardError
from toolgrpo.rewards.numerals import boxed

_TIMEOUT_S = 5.0
_SHARED = SharedSandbox(preload=(*DEFAULT_PRELOAD, "pickle", "reasoning_gym"))
_READ_LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")  # with eval
_COMPARE_GRIDS = ("arc_agi", "rearc")  # tuples, which a row of a dataset holds as lists
_READ_FORMULAS = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
_PROGRAM = """
import ast, pickle, sys, reasoning_gym
scorer = reasoning_gym.create_dataset({task!r}, size=1, seed=0)
if {reads_lists}:
    sys.modules[type(scorer).__module__].eval = ast.literal_eval
float(scorer.score_answer({answer!a}, pickle.loads({entry!r})))
"""
# Formulas have no text, no attribute and no function of Python's but these: what sympy evaluates
# then computes, and no more.
_NO_FORMULA = re.compile(r"""[^\x00-\x7f]|["'\[\]{}\\:;@]|__|\.\s*[A-Za-z_]""")
_NOT_IN_FORMULAS = frozenset(dir(builtins)) - {"abs", "max", "min", "pow", "round"}


def reasoning_gym(
    completions: Sequence[Sequence[Message]],
    gym_task: Sequence[str],
    gym_entry: Sequence[dict[str, Any]],
    **kwargs: Any,
) -> list[float]:
    for task in dict.fromkeys(gym_task):
        _check(task)
    answers = [bare_answer(final_answer(completion)) for completion in completions]
    marks = _SHARED.values(map(_program, gym_task, answers, gym_entry), timeout=_TIMEOUT_S)
    return [float(isinstance(mark, int | float) and mark >= 1.0) for mark in marks]


def bare_answer(text: str) -> str:
    """Return the answer without the words around it."""
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
    """Return what stands in the last closed `<answer>`, found in one pass over the tags."""
    start, last = -1, None
    for tag in re.finditer(r"<(/?)answer>", text, re.IGNORECASE):
        if tag[1] and start >= 0:
            start, last = -1, text[start : tag.start()]
        elif not tag[1] and start < 0:
            start = tag.end()
    return None if last is None else last.strip()


def _check(task: str) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise RewardError("reward reasoning_gym: pip install 'toolgrpo[reasoning-gym]' first") from error
    if task not in DATASETS:
        raise RewardError(f"reward reasoning_gym: the column gym_task names no task of the library: {task!r}")


def _program(task: str, answer: str, entry: dict[str, Any]) -> str:
    if task in _READ_FORMULAS and not _is_formula(answer):
        return "0"
    if task in _COMPARE_GRIDS:
        grid = tuple(tuple(line) for line in entry["metadata"]["output"])
        entry = {**entry, "metadata": {**entry["metadata"], "output": grid}}
    return _PROGRAM.format(task=task, answer=answer, entry=pickle.dumps(entry), reads_lists=task in _READ_LISTS)


def _is_formula(answer: str) -> bool:
    words = re.findall(r"[A-Za-z_]\w*", answer)
    return _NO_FORMULA.search(answer) is None and _NOT_IN_FORMULAS.isdisjoint(words)
