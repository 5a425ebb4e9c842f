"""`load_tasks`: one line of text into a dataset.

arithmetic                        the embedded tasks (also: embedded)
chains                            the harder ones: four calls each
gsm8k, mbpp, aime                 from the hub, by their usual ids
gsm8k:PATH, mbpp:PATH, aime:PATH  the original format from a local file or folder
data.jsonl, .json, .parquet, .csv rows with `prompt` and `answer`
FOLDER                            one file per split: train.jsonl, test.jsonl, ...
reasoning_gym:NAME[:SIZE[:SEED]]  generated problems
mixture.yaml                      several of these, with weights, tools and rewards: see below
OWNER/NAME[:CONFIG]               any other data set of the hub with `prompt` and `answer`

A mixture is several data sets as one, for training with many tools and tasks: a YAML file.

    system_prompt: You may call tools.          # for rows that have none; optional, here or per task
    examples: [{role: user, content: Add 1 and 2.}, {role: assistant, content: "3"}]  # before a row's own; likewise
    tasks:
      - data: gsm8k:recipes/data/gsm8k_30.jsonl # anything that load_tasks takes, but no other mixture
        name: gsm8k                             # column `task`; default: the data
        split: test                             # default: the one asked for; likewise `columns`, a list
        weight: 2                               # share of the rows; default 1
        tools: [calculator]                     # column `tools`; default: the row's own, or all
        hidden_tools: [search]                  # column `hidden_tools`: callable, but not in the prompt; likewise, or none
        reward: gsm8k                           # column `reward`: a built-in name or a file, for --reward by_task; likewise

A config of TRL's with `datasets` is one, too. Invariants: no row is used twice, so the data set that runs out first (for
its weight) bounds the mixture; the order is drawn from the seed. Paths are relative to the working folder.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from toolgrpo.data.files import READERS, file_rows, find_files
from toolgrpo.data.rows import (
    Convert,
    OnBadRow,
    RawRow,
    Row,
    RowError,
    check_examples,
    check_row,
    good_rows,
    raise_bad_row,
    row_key,
    with_opening,
)
from toolgrpo.data.sources import FORMATS, HubSplit, embedded_rows, gym_rows, hub_rows
from toolgrpo.errors import DataError, UserError
from toolgrpo.support.settings_files import BadSettings, read_yaml
from toolgrpo.support.shipped_files import located

if TYPE_CHECKING:
    from datasets import Dataset

_GYM_SIZE = 1000
EMBEDDED_NAMES = {"arithmetic": "arithmetic", "embedded": "arithmetic", "chains": "chains"}
_MIXTURES = (".yaml", ".yml")
_OF_MIXTURES = ("task", "tools", "hidden_tools", "reward")  # columns


def load_tasks(
    spec: str | Path,
    *,
    split: str = "train",
    limit: int | None = None,
    on_bad_row: OnBadRow = raise_bad_row,
    seed: int = 0,
    system_prompt: str | None = None,
) -> Dataset:
    """Load the rows of `spec` (see the module), at most `limit` of them.

    `seed` orders a mixture; `system_prompt` is the text of a system message for rows that have
    none.
    """
    from toolgrpo.data.table import write_rows  # imports `datasets`; what only reads rows needs none

    if limit is not None and limit < 1:
        raise DataError(f"the limit of rows must be at least 1, got {limit}")
    if is_mixture(spec):
        mixture = Mixture.from_file(located(spec), split)
        rows = partial(mixture.rows, partial(task_rows, split=split), limit=limit, seed=seed)
    else:
        rows = partial(task_rows, str(spec), split=split, limit=limit)

    def again(first: bool) -> Iterator[Row]:
        for row in rows(on_bad_row=on_bad_row if first else lambda error: None):  # it was reported
            yield with_opening(row, system_prompt)

    dataset = write_rows(again)
    if dataset is None:
        raise DataError(f"{spec} [{split}] has no rows that can be used")
    _SOURCES[dataset.cache_files[0]["filename"]] = (str(spec), split)
    return dataset


_SOURCES: dict[str, tuple[str, str]] = {}  # spec and split of each dataset that was loaded, by its Arrow file


def places_of(rows: Any, numbers: Iterable[int]) -> dict[int, str]:
    """Return file and line of some rows for a message, also where the dataset is a selection; else their numbers from 1 on.

    The source is read again up to the last of them, which costs time only where something is wrong.
    """
    files = getattr(rows, "cache_files", ())
    sources = [_SOURCES[file["filename"]] for file in files if file["filename"] in _SOURCES]
    places = {number: f"row {number + 1}" for number in numbers}
    return places | (_places({number: rows[number] for number in places}, sources) if sources else {})


def place_of_row(row: Mapping[str, Any]) -> str | None:
    """Return file and line of a row of anything that was loaded; None where it is in none of it."""
    return _places({0: row}, _SOURCES.values()).get(0)


def _places(rows: Mapping[int, Mapping[str, Any]], sources: Iterable[tuple[str, str]]) -> dict[int, str]:
    """Return where rows stand in these sources, those that are found there."""
    wanted: defaultdict[str, list[int]] = defaultdict(list)
    for number, row in rows.items():
        wanted[_key_in_source(row)].append(number)
    places: dict[int, str] = {}
    for spec, split in dict.fromkeys(sources):
        with suppress(UserError, OSError):  # its files are not there any more
            for found in [_resolve(*part, None) for part in parts_of(spec, split)]:
                for raw in found.rows if found.place is None else ():  # not the hub's, which is asked once
                    with suppress(RowError):
                        alike = wanted.get(_key_in_source(check_row(found.convert(raw.columns))) if raw.columns else "")
                        if alike:
                            places[alike.pop(0)] = raw.where  # the next row that is the same stands elsewhere
                    if len(places) == len(rows):
                        return places
    return places


def _key_in_source(row: Mapping[str, Any]) -> str:
    """Return what a row has in common with its source, which has no opening, no columns of a mixture, and all digits."""
    columns = {
        name: value for name, value in row.items() if value is not None and name not in ("prompt", *_OF_MIXTURES)
    }
    numbers = partial(json.loads, parse_float=_rounded, parse_int=_rounded)
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1:]
    return row_key(json.dumps([row_key(prompt), numbers(json.dumps(columns, default=str))], sort_keys=True))


def _rounded(number: str) -> str:
    return f"{float(number):.12g}"


def task_rows(
    spec: str, split: str, limit: int | None = None, on_bad_row: OnBadRow = raise_bad_row, columns: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield the checked rows of anything but a mixture, of these columns alone if any are named."""
    found = _resolve(spec, split, limit)

    def convert(row: Mapping[str, Any]) -> Row:
        return found.convert({name: value for name, value in row.items() if not columns or name in columns})

    return islice(good_rows(found.rows, convert, on_bad_row), limit)


def source_rows(spec: str, split: str) -> Iterator[RawRow]:
    """Yield the rows of a file, a folder or the hub as they are there."""
    yield from _resolve(spec, split, None).rows


def hub_place(spec: str, split: str) -> HubSplit | None:
    """Return where on the hub these rows are; None for files, for a mixture and for what is made here."""
    return None if is_mixture(spec) else _resolve(spec, split, None).place


def hub_ids(spec: str, split: str) -> list[str]:
    """Return the data sets of the hub that these rows come from, those of a mixture's parts too."""
    return sorted({place.repository for part in parts_of(spec, split) if (place := hub_place(*part))})


def parts_of(spec: str, split: str) -> list[tuple[str, str]]:
    """Return the data and the split of each part: of a mixture's tasks, or of itself."""
    tasks = Mixture.from_file(located(spec), split).tasks if is_mixture(spec) else [Task(data=spec)]
    return [(task.data, task.split or split) for task in tasks]


def with_config(name: str, config: str) -> str:
    """Return a data set in one of its configurations: of the hub, or a folder's folder."""
    return str(Path(name) / config) if located(name).is_dir() else f"{name}:{config}"


class _Resolved(NamedTuple):
    rows: Iterator[RawRow]
    convert: Convert
    place: HubSplit | None = None


def _resolve(spec: str, split: str, limit: int | None) -> _Resolved:
    name, colon, rest = spec.partition(":")
    if spec in EMBEDDED_NAMES:
        return _Resolved(embedded_rows(EMBEDDED_NAMES[spec], split, limit), dict)
    if name in FORMATS and not Path(spec).exists():
        format_ = FORMATS[name]
        if colon and not rest:
            raise DataError(f"{spec!r} names no file; write {name}:PATH for local rows, or {name} for those of the hub")
        if colon:
            return _Resolved(file_rows(located(rest), split), format_.convert)
        if split not in format_.splits:
            raise DataError(f"{name} has the splits {', '.join(format_.splits)}, got {split!r}")
        place = format_.splits[split]
        return _Resolved(hub_rows(place), format_.convert, place)
    if name == "reasoning_gym":
        return _Resolved(_gym(rest, split), dict)
    path = located(spec)
    if path.exists() or path.suffix.lower() in READERS:
        return _Resolved(file_rows(path, split), dict)
    if spec.count("/") == 1 and not spec.startswith((".", "/", "~")):
        place = HubSplit(name, rest or None, split)
        return _Resolved(hub_rows(place), dict, place)
    raise DataError(
        f"there is no dataset named {spec!r}: no such file, and it is none of {', '.join((*EMBEDDED_NAMES, *FORMATS))}, "
        f"reasoning_gym:NAME, or OWNER/NAME on the hub"
    )


def _gym(rest: str, split: str) -> Iterator[RawRow]:
    name, _, numbers = rest.partition(":")
    size, _, seed = numbers.partition(":")
    if not name or not (size or "1").isdecimal() or not (seed or "0").isdecimal() or size == "0":
        raise DataError(f"write reasoning_gym:NAME[:SIZE[:SEED]], e.g. reasoning_gym:gsm_symbolic:500:1; got {rest!r}")
    return gym_rows(name, int(size or _GYM_SIZE), int(seed or 0), split)


class _Opening(BaseModel):
    """Messages before those of a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system_prompt: str | None = None
    examples: list[dict[str, Any]] = []

    @field_validator("examples")
    @classmethod
    def _checked(cls, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return check_examples(examples)
        except RowError as problem:
            raise ValueError(str(problem)) from problem


class Task(_Opening):
    """One part of a mixture."""

    data: str
    name: str | None = None
    split: str | None = None
    columns: list[str] | None = None
    weight: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)  # None: all rows
    tools: list[str] | None = None
    hidden_tools: list[str] | None = None
    reward: str | None = None


class Mixture(_Opening):
    """A checked mixture file."""

    tasks: list[Task] = Field(min_length=1)
    _path: Path

    @classmethod
    def from_file(cls, path: Path, split: str = "train") -> Mixture:
        try:
            read = read_yaml(path)
            of_trl = read.get("datasets") if isinstance(read, dict) else None
            mixture = cls.model_validate({"tasks": _of_trl(of_trl)} if isinstance(of_trl, list) else read or {})
        except (OSError, BadSettings) as error:
            why = error if isinstance(error, BadSettings) else f"cannot be read: {error.strerror}"
            raise DataError(f"the mixture {path} {why}") from error
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, detail['loc'])) or 'the file'}: {detail['msg']}" for detail in error.errors()
            )
            raise DataError(
                f"the mixture {path} is wrong: {problems}. It must hold `tasks:` with `data:` each"
            ) from error
        for task in mixture.tasks:
            if is_mixture(task.data):
                raise DataError(f"the mixture {path} names another mixture, {task.data}; put its tasks here")
        if len({task.weight is None for task in mixture.tasks}) > 1:
            raise DataError(f"the mixture {path} has a fraction for only some datasets; give one for all, or none")
        if split != "train" and any(task.split for task in mixture.tasks):
            raise DataError(f"{path} already names the split of each dataset; hold rows out with --eval_share 0.1")
        mixture._path = path
        return mixture

    def rows(
        self, load: Callable[..., Iterator[Row]], *, limit: int | None, seed: int, on_bad_row: OnBadRow
    ) -> Iterator[Row]:
        """Yield the rows of all tasks, by their weights, in an order drawn from the seed."""
        tasks = self.tasks
        asked = [task.model_dump(include={"split", "columns"}, exclude_none=True) for task in tasks]
        parts = [list(load(task.data, on_bad_row=on_bad_row, **more)) for task, more in zip(tasks, asked, strict=True)]
        for task, part in zip(tasks, parts, strict=True):
            if not part:
                raise DataError(f"{self._path}: {task.data} has no rows that can be used")
        weights = [task.weight or len(part) for task, part in zip(tasks, parts, strict=True)]
        total = min(len(part) / weight for weight, part in zip(weights, parts, strict=True))
        draw, rows = random.Random(seed), list[Row]()
        for task, part, weight in zip(tasks, parts, weights, strict=True):
            n = max(1, int(total * weight + 1e-9))
            # not the first ones, for a part may be sorted
            kept = range(len(part)) if n == len(part) else sorted(draw.sample(range(len(part)), n))
            rows += [self._with_task(part[place], task) for place in kept]
        draw.shuffle(rows)
        yield from rows[:limit]

    def _with_task(self, row: Row, task: Task) -> Row:
        columns: dict[str, Any] = {"task": task.name or task.data}
        for name in _OF_MIXTURES[1:]:
            if any(getattr(other, name) is not None for other in self.tasks):
                own = getattr(task, name)
                columns[name] = row.get(name) if own is None else own
        opening = task.system_prompt or self.system_prompt, task.examples or self.examples
        return with_opening({**row, **columns}, *opening)


def _of_trl(datasets: list[Any]) -> list[dict[str, Any]]:
    """Return the tasks that the `datasets` of a config of TRL's are."""
    tasks = []
    for one in datasets:
        rest = {"split": "train", **(one if isinstance(one, dict) else {"path": one})}
        path, name, files, folder = (rest.pop(key, None) for key in ("path", "name", "data_files", "data_dir"))
        if (files and path not in ("json", "csv", "parquet")) or (folder and not located(str(path)).is_dir()):
            raise DataError(
                f"{path}: data_files and data_dir are only read from this machine: `path: json`, or a folder"
            )
        inner, rest["weight"] = folder or name, rest.pop("fraction", None)
        spec = with_config(str(path), inner) if inner else path
        tasks += [{"data": data, **rest} for data in (files if isinstance(files, list) else [files or spec])]
    return tasks


def is_mixture(spec: str | Path) -> bool:
    return str(spec).lower().endswith(_MIXTURES)


# Held-out rows, where no file or split of them was given.

_NAMES = ("heldout", "test", "eval", "validation")  # of splits, the first that there is


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The places of the rows to train on and of those to measure on, in their order."""

    train: list[int]
    heldout: list[int]


def hold_out(prompts: Iterable[Any], share: float, seed: int) -> HeldOut:
    """Hold out about this share of the rows, drawn by the seed.

    Rows of one prompt stay together, so no held-out question is trained on.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(json.dumps(prompt, sort_keys=True, default=str), []).append(place)
    if len(places) < 2:
        raise DataError(f"eval_share needs at least two different prompts to hold one out, got {len(places)}")
    questions = list(places.values())
    random.Random(seed).shuffle(questions)
    wanted = max(1, round(share * sum(map(len, questions))))
    heldout: list[int] = []
    for question in questions[:-1]:  # one at least is left to train on
        if len(heldout) >= wanted:
            break
        heldout += question
    held = set(heldout)
    return HeldOut(sorted(place for rows in questions for place in rows if place not in held), sorted(heldout))


def held_out_split(spec: str) -> str:
    """Return the split of a data set that is meant for measuring; `train` is the whole of a single file."""
    name, _, rest = spec.partition(":")
    path = located(spec)
    if name in EMBEDDED_NAMES or name == "reasoning_gym":
        return "heldout"
    if name in FORMATS and not path.exists():
        if not rest:
            return next((split for split in _NAMES if split in FORMATS[name].splits), "train")
        path = located(rest)
    if path.is_dir():
        return next((split for split in _NAMES if _has(path, split)), "train")
    return "train" if path.exists() or path.suffix else "test"


def _has(folder: Path, split: str) -> bool:
    try:
        return bool(find_files(folder, split))
    except DataError:
        return False
