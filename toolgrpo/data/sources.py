"""Sources of rows: each source yields `RawRow`s, and can be gone through again.

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
from typing import Any, Protocol

from toolgrpo.data.arithmetic import arithmetic_rows, chain_rows
from toolgrpo.data.files import find_files, read_file
from toolgrpo.data.rows import Convert, RawRow, Row, RowProblem
from toolgrpo.errors import DataError, StorageError
from toolgrpo.hub import settle_hub
from toolgrpo.named_files import no_data_file
from toolgrpo.nearest import nearest
from toolgrpo.storage import storage_errors

EMBEDDED_ROWS = {"train": 4000, "heldout": 1000}
EMBEDDED = {"arithmetic": arithmetic_rows, "chains": chain_rows}


class Source(Protocol):
    def rows(self) -> Iterator[RawRow]: ...


@dataclass(frozen=True, slots=True)
class FileRows:
    """A file, or the files of one split in a folder."""

    path: Path
    split: str

    def rows(self) -> Iterator[RawRow]:
        if self.path.is_dir():
            for file in find_files(self.path, self.split):
                yield from read_file(file)
            return
        if not self.path.exists():
            raise DataError(no_data_file(self.path))
        if self.split not in ("train", "all"):
            raise DataError(
                f"{self.path} is one file and has no split {self.split!r}. For held-out rows hold some of it out "
                f"(--eval_share 0.1), give another file (--eval_dataset_id_or_path FILE), or a folder that has a file for "
                f"each split"
            )
        yield from read_file(self.path)


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Place of a split on the hub."""

    repository: str
    config: str | None
    split: str


@dataclass(frozen=True, slots=True)
class HubRows:
    """A data set of the hub, from the network or from what `HF_DATASETS_CACHE` holds."""

    place: HubPlace

    def rows(self) -> Iterator[RawRow]:
        name = "/".join(filter(None, (self.place.repository, self.place.config)))
        for number, row in enumerate(self._load(name), start=1):
            yield RawRow(f"{name} [{self.place.split}], row {number}", row)

    def _load(self, name: str) -> Any:
        from datasets import config, load_dataset

        cache = Path(config.HF_DATASETS_CACHE)
        settle_hub(self.place.repository)
        try:
            with storage_errors(f"{name}, which is kept in {cache} (HF_DATASETS_CACHE),", cache):
                return load_dataset(self.place.repository, self.place.config, split=self.place.split)
        except StorageError:
            raise
        except Exception as error:  # the hub's client raises errors of many libraries
            raise DataError(
                f"{name} [{self.place.split}] cannot be loaded from the hub or its cache: {type(error).__name__}: {error}. "
                f"Offline, load it once where there is a network and set HF_DATASETS_CACHE, or give a local file."
            ) from error


@dataclass(frozen=True, slots=True)
class EmbeddedTasks:
    """`arithmetic` or `chains`; both are judged by a measure that is stricter than their reward."""

    name: str
    split: str
    limit: int | None

    def rows(self) -> Iterator[RawRow]:
        split: Any = self.split
        n = EMBEDDED_ROWS.get(split, 0) if self.limit is None else self.limit
        for number, row in enumerate(EMBEDDED[self.name](split, n), start=1):
            yield RawRow(f"{self.name} [{split}], row {number}", {**row, "success_measure": "arithmetic"})


@dataclass(frozen=True, slots=True)
class GymTasks:
    """`reasoning_gym:NAME`: endless problems with a scorer each.

    The reward `reasoning_gym` asks the scorer.

    The held-out split draws from another seed, and leaves out what the training split has.
    """

    name: str
    size: int
    seed: int
    split: str

    def rows(self) -> Iterator[RawRow]:
        train = self._entries(self.seed)
        if self.split == "train":
            entries = list(train)
        elif self.split == "heldout":
            seen = {entry["question"] for entry in train}
            entries = [entry for entry in self._entries(self.seed + 1_000_003) if entry["question"] not in seen]
        else:
            raise DataError(f"reasoning_gym tasks have the splits train and heldout, got {self.split!r}")
        for number, entry in enumerate(entries, start=1):
            columns = {
                "prompt": entry["question"],
                "answer": "" if entry["answer"] is None else str(entry["answer"]),
                "gym_task": self.name,
                "gym_entry": dict(entry),
            }
            yield RawRow(f"reasoning_gym:{self.name} [{self.split}], row {number}", columns)

    def _entries(self, seed: int) -> Any:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise DataError("reasoning_gym is not installed; pip install 'toolgrpo[reasoning-gym]'") from error
        if self.name not in DATASETS:
            close = ", ".join(nearest(self.name, DATASETS, 3))
            raise DataError(f"reasoning_gym has no task {self.name!r}; the nearest are {close}")
        return reasoning_gym.create_dataset(self.name, size=self.size, seed=seed)


@dataclass(frozen=True, slots=True)
class Format:
    """Translation of a dataset's rows to ours."""

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
