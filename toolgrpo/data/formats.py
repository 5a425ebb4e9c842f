"""Known data sets in their original formats: GSM8K, MBPP and AIME, and where the hub keeps them.

A format turns one original row into `prompt`, `answer` and the columns that its reward wants.
MBPP's prompt shows one test of three, for the name and the arguments of the function; the others
stay hidden, so they cannot be hard-coded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolgrpo.data.rows import Convert, Row, RowProblem


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where a split lies on the hub."""

    repository: str
    config: str | None
    split: str


@dataclass(frozen=True, slots=True)
class Format:
    """How rows of one data set become rows of ours."""

    convert: Convert
    splits: Mapping[str, HubPlace]  # "heldout" is the split to measure on


def gsm8k(columns: Mapping[str, Any]) -> Row:
    """Convert {question, answer: "... #### N"}.

    The answer is the bare N; the worked solution stays as `solution`.
    """
    question, solution = _text(columns, "question"), _text(columns, "answer")
    marked = re.search(r"####\s*(\S.*)\s*$", solution)
    if marked is None:
        raise RowProblem("the answer does not end in '#### NUMBER', as GSM8K's do")
    return {"prompt": question, "answer": marked.group(1).strip().replace(",", ""), "solution": solution}


def mbpp(columns: Mapping[str, Any]) -> Row:
    """Convert both forms of MBPP.

    `test_setup` runs before the code, `test_setup_code` after it and before the tests.
    """
    task = _text(columns, "text" if "text" in columns else "prompt")
    tests = columns.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise RowProblem("it has no 'test_list' with at least one test")
    imports = columns.get("test_imports") or []
    return {
        "prompt": f"{task.strip()}\nYour code should pass this test, and others like it:\n{tests[0].strip()}",
        "answer": _text(columns, "code").replace("\r\n", "\n"),
        "tests": [test.replace("\r\n", "\n") for test in tests],
        "test_imports": "\n".join(imports),
        "test_setup_code": str(columns.get("test_setup_code") or "").replace("\r\n", "\n"),
        "task_id": columns.get("task_id"),
    }


def aime(columns: Mapping[str, Any]) -> Row:
    """Convert {problem, answer, ...} or {input, output}.

    An answer is an integer from 0 to 999, leading zeros or not.
    """
    by_name = {name.lower(): value for name, value in columns.items()}
    question = "problem" if "problem" in by_name else "question" if "question" in by_name else "input"
    answer = "answer" if "answer" in by_name else "output"
    problem = _text(by_name, question)
    given = str(by_name.get(answer, "")).strip()
    if not re.fullmatch(r"\d{1,3}(\.0+)?", given):
        raise RowProblem(f"the {answer} must be an integer from 0 to 999, as AIME's are; got {given[:40]!r}")
    return {"prompt": problem, "answer": str(int(float(given)))}


def _text(columns: Mapping[str, Any], name: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RowProblem(f"it has no text in {name!r}; its columns are {', '.join(map(str, columns)) or '(none)'}")
    return value


def _mbpp(split: str) -> HubPlace:
    return HubPlace("google-research-datasets/mbpp", "full", split)


_GSM8K_TEST = HubPlace("openai/gsm8k", "main", "test")
_AIME_25 = HubPlace("math-ai/aime25", None, "test")

FORMATS: dict[str, Format] = {
    "gsm8k": Format(
        gsm8k, {"train": HubPlace("openai/gsm8k", "main", "train"), "test": _GSM8K_TEST, "heldout": _GSM8K_TEST}
    ),
    "mbpp": Format(
        mbpp,
        {
            "train": _mbpp("train"),
            "validation": _mbpp("validation"),
            "test": _mbpp("test"),
            "prompt": _mbpp("prompt"),
            "heldout": _mbpp("test"),
        },
    ),
    "aime": Format(
        aime, {"train": HubPlace("AI-MO/aimo-validation-aime", None, "train"), "test": _AIME_25, "heldout": _AIME_25}
    ),
}
