"""Where rows come from: each source yields `RawRow`s, and can be gone through again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolgrpo.data.arithmetic import SPLITS, arithmetic_rows
from toolgrpo.data.chains import chain_rows
from toolgrpo.data.files import find_files, read_file
from toolgrpo.data.formats import HubPlace
from toolgrpo.data.rows import RawRow
from toolgrpo.errors import DataError, StorageError
from toolgrpo.hub import settle_hub
from toolgrpo.missing_files import no_data_file
from toolgrpo.nearest import nearest
from toolgrpo.storage import storage_errors

ARITHMETIC_ROWS = {"train": 4000, "heldout": 1000}


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
class ArithmeticTasks:
    """The embedded tasks."""

    split: str
    limit: int | None

    def rows(self) -> Iterator[RawRow]:
        split = next((known for known in SPLITS if known == self.split), None)
        if split is None:
            raise DataError(f"the arithmetic tasks have the splits {' and '.join(SPLITS)}, got {self.split!r}")
        n = ARITHMETIC_ROWS[split] if self.limit is None else self.limit
        for number, row in enumerate(arithmetic_rows(split, n), start=1):
            columns = {**row, "success_measure": "arithmetic"}  # stricter than its reward: `measures.py`
            yield RawRow(f"arithmetic [{self.split}], row {number}", columns)


@dataclass(frozen=True, slots=True)
class ChainTasks:
    """The harder embedded tasks."""

    split: str
    limit: int | None

    def rows(self) -> Iterator[RawRow]:
        split = next((known for known in SPLITS if known == self.split), None)
        if split is None:
            raise DataError(f"the chains have the splits {' and '.join(SPLITS)}, got {self.split!r}")
        n = ARITHMETIC_ROWS[split] if self.limit is None else self.limit
        for number, row in enumerate(chain_rows(split, n), start=1):
            yield RawRow(f"chains [{self.split}], row {number}", {**row, "success_measure": "arithmetic"})


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
