"""Read the recordings of a run: episodes, the training pass's view of their tokens, and steps.

The files and every field of them are described in docs/reference/episodes.md.

A recording may come from anybody, and a reader may look while a run writes. So each line is checked
once, here, against the one schema of its kind, and every command reads through it. The schema of an
episode is made of the dataclasses that it is written from. A line that does not fit is left out, and
one warning per file names the first such line and the field. Readers need not look again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError
from pydantic_core import core_schema as shapes

from toolgrpo.episode.dropped import Drop
from toolgrpo.episode.segments import SegmentStart, check_starts
from toolgrpo.episode.trajectory import Trajectory, Turn, with_observation
from toolgrpo.observe.line_file import Line, lines_of, parts
from toolgrpo.support.plain_text import counted, plain

SCHEMA = 2

Record = dict[str, Any]


def episode_files(folder: Path, kind: str = "episodes") -> list[Path]:
    """Return the recordings of all processes of a run, also where all of one is set aside."""
    if not folder.is_dir():
        return []
    ranks: dict[str, int] = {}
    for path in folder.glob(f"{kind}*.jsonl*"):
        stem = path.name.split(".jsonl")[0]
        rank = stem.removeprefix(f"{kind}.rank")
        if stem == kind or rank.isdecimal():
            ranks[stem] = 0 if stem == kind else int(rank)
    ordered = [folder / f"{stem}.jsonl" for stem in sorted(ranks, key=lambda stem: ranks[stem])]
    return [path for path in ordered if parts(path)]


def read_episodes(path: Path | str) -> list[Record]:
    """Return all episodes of a recording, or of a run's folder, in the order they were written."""
    return list(iter_episodes(path))


def iter_episodes(path: Path | str) -> Iterator[Record]:
    """Yield the episodes of a recording, or of all recordings in a folder, one at a time."""
    path = Path(path)
    for file in episode_files(path) if path.is_dir() else [path]:
        yield from _good_lines(file, _episode_fault)


def iter_tokens(path: Path) -> Iterator[Record]:
    """Yield the training pass's view of episodes, from one file or from all of a folder."""
    for file in episode_files(path, "tokens") if path.is_dir() else [path]:
        yield from _good_lines(file, _TOKENS)


def iter_steps(folder: Path) -> Iterator[Record]:
    """Yield the lines of `steps.jsonl`: the run, its steps, measurements and events, as they came."""
    return _good_lines(folder / "steps.jsonl", _step_fault)


def read_vocabulary(folder: Path) -> dict[int, Record]:
    """Return the text of every token that was recorded, by its id."""
    files = episode_files(folder, "vocabulary")
    return {line["id"]: line for file in files for line in _good_lines(file, _VOCABULARY)}


def prompt_id(prompt: Any, row: Mapping[str, Any]) -> str:
    """Return the id of a row, the same in every step and run: 12 hexadecimal digits."""
    text = json.dumps([prompt_messages(prompt), dict(row)], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def prompt_messages(prompt: Any) -> list[Any]:
    """Return a prompt as messages, also where the data has it as text."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())


def shown_step(record: Mapping[str, Any]) -> int:
    """Return the step of an episode as people count: the first is 1; a record has how many were done before.

    An evaluation belongs to the step that it comes after.
    """
    return int(record["step"]) + (record.get("mode") != "eval")


def row_of(record: Mapping[str, Any]) -> Record:
    """Return the row that an episode came from, with its prompt, as a rollout takes it."""
    return {"prompt": record["prompt"], **record["row"]}


def shown_prompt(record: Mapping[str, Any]) -> list[Any]:
    """Return the prompt as the model was shown it: behind that of the row, what an environment said first."""
    observation = (record.get("metadata") or {}).get("observation")
    prompt: list[Any] = record["prompt"]
    return with_observation(prompt, observation) if prompt and isinstance(observation, str) else prompt


def results_of(record: Mapping[str, Any]) -> list[Any]:
    return [result for turn in record["turns"] for result in turn["results"]]


def is_counted(record: Mapping[str, Any]) -> bool:
    """Return whether a chat endpoint played an episode: its ids are zeros, one for each token."""
    return "usage" in (record.get("metadata") or {})


def ids_checksum(ids: Sequence[int]) -> int:
    """Return the checksum by which a line of `tokens.jsonl` is matched to its episode."""
    return zlib.crc32(",".join(map(str, ids)).encode())


Fault = Callable[[Record], str | None]
"""Says what is wrong with a line: the field, and why; None if nothing is."""

logger = logging.getLogger(__name__)


def _good_lines(path: Path, fault_of: Fault) -> Iterator[Record]:
    """Yield the lines that fit; then warn of the others, once for each file."""
    n_left_out, first = 0, ""
    try:
        for line in lines_of(path):
            value, fault = _decoded(line)
            fault = fault or fault_of(value)
            if not fault:
                yield value
                continue
            first = first or f"{line.where}: {fault}"
            n_left_out += 1
    finally:
        if n_left_out:
            what = "this line is" if n_left_out == 1 else f"this line and {counted(n_left_out - 1, 'other')} are"
            _warn_once(plain(f"{first}; {what} left out"))


@lru_cache(1024)  # a command reads a file more than once, and a live page again and again
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _decoded(line: Line) -> tuple[Record, str | None]:
    """Return the object that a line holds, or what is wrong with it."""
    if line.fault:
        return {}, line.fault
    if line.text.count("{") + line.text.count("[") > _MOST_BRACKETS:
        return {}, f"it has more than {_MOST_BRACKETS:,} brackets"
    try:
        value = _decode(line.text)
    except RecursionError:
        return {}, "it is nested too deeply"
    except ValueError as error:
        return {}, f"it is not valid JSON ({_short(str(error))})"
    return (value, "") if isinstance(value, dict) else ({}, "it is no JSON object")


def _object_once(pairs: list[tuple[str, Any]]) -> Record:
    """Return an object; Python would silently take the last of two fields of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field stands in it twice")
    return found


_decode = json.JSONDecoder(object_pairs_hook=_object_once).decode


# --- schemas of lines ---

_MOST_BRACKETS = 2_000_000  # an object of two bytes takes 64 in memory
_DEEPEST = 200  # levels; Python's own reader and writer take about a thousand
_LARGEST = 1e100  # of numbers that are ours, so that sums and squares of them are numbers too


def _object(fields: Mapping[str, CoreSchema], *, others: bool = False) -> CoreSchema:
    """Return the schema of an object; a name that ends in `?` may be missing. `others`: any other field is taken."""
    known = {
        name.removesuffix("?"): shapes.typed_dict_field(inner, required=not name.endswith("?"))
        for names, inner in fields.items()
        for name in names.split()
    }

    def check_names(value: Any) -> Any:
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is not None:  # not left to pydantic, which lists every one of a million
            raise ValueError(f"{_short(unknown)!r} is no field of it")
        return value

    schema = shapes.typed_dict_schema(known)
    return schema if others else shapes.no_info_before_validator_function(check_names, schema)


def _list(of: CoreSchema, length: int | None = None) -> CoreSchema:
    return shapes.list_schema(of, strict=True, fail_fast=True, min_length=length, max_length=length)


def _check_free(value: Any) -> Any:
    """Check what may hold anything: its numbers are numbers to Python and JSON, and it is not too deep."""
    level = [value]
    for _ in range(_DEEPEST):
        nested = []
        for inner in (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)):
            if isinstance(inner, dict | list):
                nested.append(inner)
            elif isinstance(inner, float) and not math.isfinite(inner):
                raise ValueError("a number in it is too large, or none")
        if not nested:
            return value
        level = nested
    raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def _check_numbers(value: Any) -> Any:
    for name, number in value.items():
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, int | float) or not -_LARGEST < number < _LARGEST
        ):
            raise ValueError(f"{_short(name)!r} is no number in it")
    return value


_text = shapes.is_instance_schema(str)  # `str_schema` refuses half of a surrogate pair, which JSON may hold
_flag = shapes.bool_schema(strict=True)
_anything = shapes.no_info_after_validator_function(_check_free, shapes.is_instance_schema(dict))
_whole = shapes.int_schema(strict=True, gt=-(2**53), lt=2**53)
_count = shapes.int_schema(strict=True, ge=0, lt=2**53)
_number = shapes.float_schema(strict=True, gt=-_LARGEST, lt=_LARGEST, allow_inf_nan=False)  # whole ones too
_number_or_none = shapes.nullable_schema(_number)
_ids = _list(shapes.int_schema(strict=True, ge=0, lt=2**31))
_numbers = _list(_number_or_none)
_numbers_by_name = shapes.no_info_after_validator_function(_check_numbers, shapes.is_instance_schema(dict))
_PLAIN = {int: _whole, float: _number, str: _text, bool: _flag, dict: _anything, Mapping: _anything}
_MAY_BE_MISSING = ("segment_starts",)  # the recorder leaves them out where they are empty


def _schema_of(kind: Any) -> CoreSchema:
    """Return the schema of a type in a record; an object has every field of its dataclass, and no other."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(_fields_of(kind))
    if origin is UnionType:
        return shapes.nullable_schema(_schema_of(inner[0]))
    if origin is tuple:
        return _list(_schema_of(inner[0]), None if inner[1] is ... else len(inner))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return shapes.literal_schema([str(one) for one in kind])
    return _PLAIN[origin or kind]


def _fields_of(kind: Any) -> dict[str, CoreSchema]:
    older = {"taken_over?": _list(_list(_whole, 2))} if kind is Turn else {}  # of recordings written before
    return older | {
        f"{name}?" if name in _MAY_BE_MISSING else name: _schema_of(hint) for name, hint in get_type_hints(kind).items()
    }


_content = shapes.nullable_schema(shapes.union_schema([_text, _list(_anything)]))
_MESSAGE = shapes.no_info_before_validator_function(
    lambda value: _check_free(value) if isinstance(value, dict) else value,
    _object(
        {"role": _text, "content?": _content, "tool_calls?": shapes.nullable_schema(_list(_anything))}, others=True
    ),
)
_TIMES = {"queued_s duration_s rollout_s": _number, "segments": _list(_anything)}
_EPISODE = _object(
    {
        **_fields_of(Trajectory),
        "schema": shapes.literal_schema([SCHEMA]),
        "step episode": _count,
        "group weight_version": _whole,
        "mode": shapes.literal_schema(["train", "eval", "heldout"]),
        "prompt_id label?": _text,
        "success": shapes.nullable_schema(_flag),
        "trained?": _flag,
        "reward_given advantage": _number_or_none,
        "rewards": _numbers_by_name,
        "turn_rewards? turn_advantages?": _numbers,
        "drop?": _schema_of(Drop),
        "prompt messages": _list(_MESSAGE),
        "row": _anything,
        "timings": _object(_TIMES),
        "prompt_ids ids": _ids,
        "mask": _list(shapes.int_schema(strict=True, ge=0, le=1)),
    }
)


def _checked_by(schema: CoreSchema) -> Fault:
    validate = SchemaValidator(schema).validate_python

    def fault_of(record: Record) -> str | None:
        try:
            validate(record)
        except ValidationError as error:
            return _sentence(error)
        return None

    return fault_of


def _sentence(error: ValidationError) -> str:
    """Return the first thing that is wrong: `turns[0].attempts[1].status should be ..., got ...`."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "missing":
        return f"{field} is missing"
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "value_error":
        return f"{field}: {said}" if field else said
    return f"{field} {said}, got {_short(repr(first['input']))}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]} ..."


_of_episode = _checked_by(_EPISODE)
_TOKENS = _checked_by(
    _object(
        {
            "schema": shapes.literal_schema([SCHEMA]),
            "step episode ids_crc32": _count,
            "trainer_logprobs? entropy? correction? advantage?": shapes.nullable_schema(_numbers),
        }
    )
)
_VOCABULARY = _checked_by(_object({"id": _count, "text bytes?": _text, "special?": _flag}))
_STEPS: dict[str, dict[str, CoreSchema]] = {  # with more fields, by kind
    "run": {"resumed?": shapes.nullable_schema(_count), "config? versions?": _anything},
    "step": {"step": _count, "metrics phases?": _numbers_by_name},
    "eval": {"step": _count, "metrics": _numbers_by_name},
    "measured": {"step n successes": _count, "questions?": _count, "reward": _number_or_none, "label": _text},
    "event": {"step": _count, "text what": _text},
}
_STEP_FAULTS = {
    kind: _checked_by(_object({**fields, "kind": _text, "time?": _number_or_none}, others=True))
    for kind, fields in _STEPS.items()
}


def _step_fault(line: Record) -> str | None:
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in _STEP_FAULTS:
        return f"kind should be one of {', '.join(_STEP_FAULTS)}, got {_short(repr(kind))}"
    for name, value in line.items() if not (fault := _STEP_FAULTS[kind](line)) else ():
        try:
            _check_free([value])
        except ValueError as error:
            return f"{_short(name)}: {error}"
    return fault


def _episode_fault(record: Record) -> str | None:
    """Return what is wrong with an episode: one of its fields, or how its tokens, turns and segments go together."""
    if fault := _of_episode(record):
        return fault
    n = len(record["ids"])
    for name in ("mask", "logprobs"):
        if len(record[name]) != n:
            return f"{name} has {len(record[name])} entries for {counted(n, 'token')} in ids"
    end = 0
    for place, turn in enumerate(record["turns"]):
        if not end <= turn["start"] <= turn["end"] <= n:
            return f"turns[{place}] goes from token {turn['start']} to {turn['end']}, and {end} to {n} are left for it"
        end = turn["end"]
    try:
        check_starts([SegmentStart(**one) for one in record.get("segment_starts", ())], record["mask"])
    except ValueError as error:
        return f"segment_starts: {_short(str(error))}"
    return None
