"""Read the recordings of a run: episodes, the training pass's view of their tokens, and steps.

The files and every field of them are described in docs/reference/episodes.md.

A line that is torn, damaged or hostile is left out: a reader may look while a run writes, and a
recording may come from anybody. Each line is checked once, here, against the shape of its kind
(`_EPISODE`, `_TOKENS`, `_STEPS`): every known field has its type or is left out or null, numbers are
below `_LARGEST`, and nothing is nested deeper than `_DEEPEST`. Readers need not look again.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import CoreSchema, SchemaValidator
from pydantic_core import core_schema as shapes

from toolgrpo.observe.line_file import lines_of, parts

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
        for line in _objects(file):
            if _EPISODE.isinstance_python(line) and _fits(line):
                yield line


def iter_tokens(path: Path) -> Iterator[Record]:
    """Yield the training pass's view of episodes, from one file or from all of a folder."""
    for file in episode_files(path, "tokens") if path.is_dir() else [path]:
        yield from (line for line in _objects(file) if _TOKENS.isinstance_python(line))


def iter_steps(folder: Path) -> Iterator[Record]:
    """Yield the lines of `steps.jsonl`: the run, its steps, measurements and events, as they came."""
    for line in _objects(folder / "steps.jsonl"):
        kind = line.get("kind")
        if isinstance(kind, str) and kind in _STEPS and _STEPS[kind].isinstance_python(line):
            yield line


def read_vocabulary(folder: Path) -> dict[int, Record]:
    """Return the text of every token that was recorded, by its id."""
    lines = (line for file in episode_files(folder, "vocabulary") for line in _objects(file))
    return {line["id"]: line for line in lines if _VOCABULARY.isinstance_python(line)}


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


def results_of(record: Mapping[str, Any]) -> list[Any]:
    return [result for turn in record["turns"] for result in turn["results"]]


def ids_checksum(ids: Sequence[int]) -> int:
    """Return the checksum by which a line of `tokens.jsonl` is matched to its episode."""
    return zlib.crc32(",".join(map(str, ids)).encode())


def _objects(path: Path) -> Iterator[Record]:
    for line in lines_of(path):
        try:
            value = _decode(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and _is_shallow(value):
            yield value


# --- the shapes of lines ---

_DEEPEST = 200  # levels; Python's own reader and writer take about a thousand
_LARGEST = 1e100  # of numbers, so that sums and squares of them are numbers too
# JSON has no other numbers: a run may write NaN for one that it does not know.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


def _is_shallow(value: Any, levels: int = _DEEPEST) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    nested = [inner for inner in inside if isinstance(inner, dict | list)]
    return not nested or (levels > 0 and all(_is_shallow(inner, levels - 1) for inner in nested))


def _shape(fields: Mapping[str, CoreSchema]) -> CoreSchema:
    """Return the shape of an object. Names of one shape share an entry; one that ends in `?` may be missing or null."""
    known = {}
    for names, inner in fields.items():
        for name in names.split():
            optional = name.endswith("?")
            shape = shapes.nullable_schema(inner) if optional else inner
            known[name.removesuffix("?")] = shapes.typed_dict_field(shape, required=not optional)
    return shapes.typed_dict_schema(known)


def _line(fields: Mapping[str, CoreSchema]) -> SchemaValidator:
    return SchemaValidator(_shape(fields))


def _list(of: CoreSchema) -> CoreSchema:
    return shapes.list_schema(of, strict=True)


_text = shapes.is_instance_schema(str)  # `str_schema` refuses half of a surrogate pair, which JSON may hold
_flag = shapes.bool_schema(strict=True)
_object = shapes.is_instance_schema(dict)
_whole = shapes.int_schema(strict=True, gt=-int(_LARGEST), lt=int(_LARGEST))
_number = shapes.float_schema(strict=True, gt=-_LARGEST, lt=_LARGEST)  # whole ones too
_ids = _list(_whole)
_numbers = _list(shapes.nullable_schema(_number))
_numbers_by_name = shapes.dict_schema(_text, shapes.nullable_schema(_number), strict=True)

_ATTEMPT = _shape({"status raw? name? detail? call_id?": _text, "arguments?": _object})
_RESULT = _shape(
    {
        "content name?": _text,
        "error": shapes.nullable_schema(_text),
        "duration_s started_s?": _number,
        "left_out?": _whole,
        "cached? ends_episode?": _flag,
    }
)
_TURN = _shape(
    {
        "start end": _whole,
        "attempts": _list(_ATTEMPT),
        "results": _list(_RESULT),
        "content? reasoning? user?": _text,
        "closed?": _flag,
        "started_s? duration_s?": _number,
        "weights?": _ids,
        "taken_over?": _list(_ids),
    }
)
_EPISODE = _line(
    {
        "step episode? group? weight_version?": _whole,
        "stop_reason mode? label? prompt_id? failure?": _text,
        "success? trained?": _flag,
        "reward_given? reward? advantage? started_s? duration_s?": _number,
        "rewards?": _numbers_by_name,
        "turns": _list(_TURN),
        "prompt messages?": _list(_object),
        "row metadata?": _object,
        "prompt_ids ids mask": _ids,
        "logprobs turn_rewards? turn_advantages?": _numbers,
        "timings?": _shape({"queued_s? rollout_s?": _number}),
        "segment_starts?": _list(_shape({"start n_prompt": _whole})),
    }
)
_TOKENS = _line({"step episode ids_crc32?": _whole, "trainer_logprobs? entropy? correction? advantage?": _numbers})
_VOCABULARY = _line({"id": _whole, "text? bytes?": _text, "special?": _flag})
_STEPS = {
    "run": _line({"time?": _number, "resumed?": _whole, "config? versions?": _object}),
    "step": _line({"step": _whole, "metrics phases?": _numbers_by_name, "time?": _number}),
    "eval": _line({"step": _whole, "metrics": _numbers_by_name, "time?": _number}),
    "measured": _line({"step n? successes?": _whole, "time? reward?": _number, "label?": _text}),
    "event": _line({"step": _whole, "text what?": _text, "time?": _number}),
}


def _fits(record: Record) -> bool:
    """Return whether ids, mask and log-probabilities have the same length."""
    return len(record["ids"]) == len(record["mask"]) == len(record["logprobs"]) and set(record["mask"]) <= {0, 1}
