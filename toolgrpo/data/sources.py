"""Sources of rows: each yields `RawRow`s.

At the end stand known data sets in their original formats: GSM8K, MBPP and AIME, and where the hub
keeps them. A format turns one original row into `prompt`, `answer` and the columns that its reward
wants. MBPP's prompt shows one test of three, for the name and the arguments of the function; the
others stay hidden, so they cannot be hard-coded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolgrpo.data.arithmetic import arithmetic_rows, chain_rows
from toolgrpo.data.files import find_files, read_file
from toolgrpo.data.rows import Convert, RawRow, Row, RowError, unfilled
from toolgrpo.errors import DataError, StorageError
from toolgrpo.support.offline import settle_hub
from toolgrpo.support.shipped_files import nearest, no_data_file
from toolgrpo.support.storage import storage_errors

EMBEDDED_ROWS = {"train": 4000, "heldout": 1000}
EMBEDDED = {"arithmetic": arithmetic_rows, "chains": chain_rows}


def file_rows(path: Path, split: str) -> Iterator[RawRow]:
    """Yield the rows of a file, or of the files of one split in a folder."""
    if path.is_dir():
        for file in find_files(path, split):
            yield from read_file(file)
        return
    if not path.exists():
        raise DataError(no_data_file(path))
    if split not in ("train", "all"):
        raise DataError(
            f"{path} is one file and has no split {split!r}. For held-out rows hold some of it out "
            f"(--eval_share 0.1), give another file (--eval_dataset_id_or_path FILE), or a folder that has a file for "
            f"each split"
        )
    yield from read_file(path)


@dataclass(frozen=True, slots=True)
class HubSplit:
    """Place of a split on the hub."""

    repository: str
    config: str | None
    split: str


def hub_rows(place: HubSplit) -> Iterator[RawRow]:
    """Yield a data set of the hub, from the network or from what `HF_DATASETS_CACHE` holds."""
    name = "/".join(filter(None, (place.repository, place.config)))
    for number, row in enumerate(_from_hub(place, name), start=1):
        yield RawRow(f"{name} [{place.split}], row {number}", unfilled(row))


def _from_hub(place: HubSplit, name: str) -> Any:
    from datasets import config, load_dataset

    cache = Path(config.HF_DATASETS_CACHE)
    settle_hub(place.repository)
    try:
        with storage_errors(f"{name}, which is kept in {cache} (HF_DATASETS_CACHE),", cache):
            return load_dataset(place.repository, place.config, split=place.split)
    except StorageError:
        raise
    except Exception as error:  # the hub's client raises errors of many libraries
        raise DataError(
            f"{name} [{place.split}] cannot be loaded from the hub or its cache: {type(error).__name__}: {error}. "
            f"Offline, load it once where there is a network and set HF_DATASETS_CACHE, or give a local file."
        ) from error


def embedded_rows(name: str, split: Any, limit: int | None) -> Iterator[RawRow]:
    """Yield `arithmetic` or `chains`; both are judged by a measure that is stricter than their reward."""
    n = EMBEDDED_ROWS.get(split, 0) if limit is None else limit
    for number, row in enumerate(EMBEDDED[name](split, n), start=1):
        yield RawRow(f"{name} [{split}], row {number}", {**row, "success_measure": "arithmetic"})


def gym_rows(name: str, size: int, seed: int, split: str) -> Iterator[RawRow]:
    """Yield `reasoning_gym:NAME`: endless problems with a scorer each, which the reward `reasoning_gym` asks.

    The held-out split draws from another seed, and leaves out what the training split has.
    """
    train = _gym_entries(name, size, seed)
    if split == "train":
        entries = list(train)
    elif split == "heldout":
        seen = {entry["question"] for entry in train}
        entries = [entry for entry in _gym_entries(name, size, seed + 1_000_003) if entry["question"] not in seen]
    else:
        raise DataError(f"reasoning_gym tasks have the splits train and heldout, got {split!r}")
    for number, entry in enumerate(entries, start=1):
        columns = {
            "prompt": entry["question"],
            **({} if entry["answer"] is None else {"answer": str(entry["answer"])}),  # None: many are right
            "gym_task": name,
            "gym_entry": dict(entry),
        }
        yield RawRow(f"reasoning_gym:{name} [{split}], row {number}", columns)


def _gym_entries(name: str, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("reasoning_gym is not installed; pip install 'toolgrpo[reasoning-gym]'") from error
    if name not in DATASETS:
        close = ", ".join(nearest(name, DATASETS, 3))
        raise DataError(f"reasoning_gym has no task {name!r}; the nearest are {close}")
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


@dataclass(frozen=True, slots=True)
class Format:
    """Translation of a dataset's rows to ours."""

    convert: Convert
    splits: Mapping[str, HubSplit]  # "heldout" is the split to measure on


def gsm8k(columns: Mapping[str, Any]) -> Row:
    """Convert {question, answer: "... #### N"}.

    The answer is the bare N; the worked solution stays as `solution`.
    """
    question, solution = _text(columns, "question"), _text(columns, "answer")
    marked = re.search(r"####\s*(\S.*)\s*$", solution)
    if marked is None:
        raise RowError("the answer does not end in '#### NUMBER', as GSM8K's do")
    return {"prompt": question, "answer": marked.group(1).strip().replace(",", ""), "solution": solution}


def mbpp(columns: Mapping[str, Any]) -> Row:
    """Convert both forms of MBPP.

    `test_setup` runs before the code, `test_setup_code` after it and before the tests.
    """
    task = _text(columns, "text" if "text" in columns else "prompt")
    tests = columns.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise RowError("it has no 'test_list' with at least one test")
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
        raise RowError(f"the {answer} must be an integer from 0 to 999, as AIME's are; got {given[:40]!r}")
    return {"prompt": problem, "answer": str(int(float(given)))}


def _text(columns: Mapping[str, Any], name: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"it has no text in {name!r}; its columns are {', '.join(map(str, columns)) or '(none)'}")
    return value


def _mbpp(split: str) -> HubSplit:
    return HubSplit("google-research-datasets/mbpp", "full", split)


_GSM8K_TEST = HubSplit("openai/gsm8k", "main", "test")
_AIME_25 = HubSplit("math-ai/aime25", None, "test")

FORMATS: dict[str, Format] = {
    "gsm8k": Format(
        gsm8k, {"train": HubSplit("openai/gsm8k", "main", "train"), "test": _GSM8K_TEST, "heldout": _GSM8K_TEST}
    ),
    "mbpp": Format(
        mbpp, {split: _mbpp(split) for split in ("train", "validation", "test", "prompt")} | {"heldout": _mbpp("test")}
    ),
    "aime": Format(
        aime, {"train": HubSplit("AI-MO/aimo-validation-aime", None, "train"), "test": _AIME_25, "heldout": _AIME_25}
    ),
}
