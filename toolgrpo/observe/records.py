"""Read what a run recorded: episodes, what training saw of their tokens, and its steps.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolgrpo.observe.line_file import lines_of, parts

SCHEMA = 2

Record = dict[str, Any]


def own_name(kind: str, process_index: int) -> str:
    """Return the file of one process: `episodes.jsonl`, `episodes.rank1.jsonl` and so on."""
    return f"{kind}.jsonl" if process_index == 0 else f"{kind}.rank{process_index}.jsonl"


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
            if _EPISODE(line) and _fits(line):
                yield line


def iter_tokens(path: Path) -> Iterator[Record]:
    """Yield what the training pass saw of single episodes: a process's file, or all of a folder."""
    for file in episode_files(path, "tokens") if path.is_dir() else [path]:
        yield from filter(_TOKENS, _objects(file))


def iter_steps(folder: Path) -> Iterator[Record]:
    """Yield the lines of `steps.jsonl`: the run, its steps, measurements and events, as they came."""
    for line in _objects(folder / "steps.jsonl"):
        kind = line.get("kind")
        if isinstance(kind, str) and kind in _STEPS and _STEPS[kind](line):
            yield line


def read_vocabulary(folder: Path) -> dict[int, Record]:
    """Return the text of every token that was recorded, by its id."""
    return {
        line["id"]: line for file in episode_files(folder, "vocabulary") for line in filter(_VOCABULARY, _objects(file))
    }


def prompt_id(prompt: Any, row: Mapping[str, Any]) -> str:
    """Return what names a question in every step and every run: 12 hexadecimal digits of its row."""
    text = json.dumps([prompt_messages(prompt), dict(row)], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def prompt_messages(prompt: Any) -> list[Any]:
    """Return a prompt as messages, also where the data has it as text."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())


def row_of(record: Mapping[str, Any]) -> Record:
    """Return the row that an episode came from, with its prompt, as a rollout takes it."""
    return {"prompt": record["prompt"], **record["row"]}


def ids_checksum(ids: Sequence[int]) -> int:
    """Return what tells whether a line of `tokens.jsonl` is about these tokens."""
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

Shape = Callable[[Any], bool]

_DEEPEST = 200  # levels; Python's own reader and writer take about a thousand
_LARGEST = 1e100  # of numbers, so that sums and squares of them are numbers too
# JSON has no other numbers: a run may write NaN for one that it does not know.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


def _is_shallow(value: Any, levels: int = _DEEPEST) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    nested = [inner for inner in inside if isinstance(inner, dict | list)]
    return not nested or (levels > 0 and all(_is_shallow(inner, levels - 1) for inner in nested))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _anything(value: Any) -> bool:
    return True


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _or_none(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def _ids(value: Any) -> bool:
    """Return whether this is a list of whole numbers; there may be thousands, so no call for each."""
    return isinstance(value, list) and set(map(type, value)) <= {int} and _within_bounds(value)


def _numbers(value: Any) -> bool:
    """Return whether this is a list of numbers and None."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float, type(None)}:
        return False
    return _within_bounds([number for number in value if number is not None])


def _within_bounds(numbers: Sequence[float]) -> bool:
    return not numbers or (min(numbers) > -_LARGEST and max(numbers) < _LARGEST)


def _list_of(shape: Shape) -> Shape:
    return lambda value: isinstance(value, list) and all(map(shape, value))


def _object_of(shape: Shape) -> Shape:
    return lambda value: isinstance(value, dict) and all(map(shape, value.values()))


def _fields(required: Mapping[str, Shape], others: Mapping[str, Shape] | None = None) -> Shape:
    """Return the shape of an object with these fields; `others` may be missing or None."""

    def holds(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and shape(value[name]) for name, shape in required.items())
            and all(value.get(name) is None or shape(value[name]) for name, shape in (others or {}).items())
        )

    return holds


_ATTEMPT = _fields(
    {"status": _text},
    {"raw": _text, "name": _text, "arguments": _object_of(_anything), "detail": _text, "call_id": _text},
)
_RESULT = _fields(
    {"content": _text, "error": _or_none(_text), "duration_s": _number},
    {"name": _text, "started_s": _number, "left_out": _whole, "cached": _flag, "ends_episode": _flag},
)
_TURN = _fields(
    {"start": _whole, "end": _whole, "attempts": _list_of(_ATTEMPT), "results": _list_of(_RESULT)},
    {
        **{"content": _text, "reasoning": _text, "user": _text, "closed": _flag},
        **{"started_s": _number, "duration_s": _number},
        **{"weights": _ids, "taken_over": _list_of(_ids)},
    },
)
_EPISODE = _fields(
    {
        **{"step": _whole, "stop_reason": _text, "turns": _list_of(_TURN), "prompt": _list_of(_object_of(_anything))},
        **{"row": _object_of(_anything), "prompt_ids": _ids, "ids": _ids},
        **{"mask": _ids, "logprobs": _numbers},
    },
    {
        **{"mode": _text, "label": _text, "prompt_id": _text, "failure": _text, "success": _flag, "trained": _flag},
        **{"episode": _whole, "group": _whole, "weight_version": _whole, "reward_given": _number, "reward": _number},
        **{"rewards": _object_of(_or_none(_number)), "advantage": _number, "turn_rewards": _numbers},
        **{"turn_advantages": _numbers, "messages": _list_of(_object_of(_anything))},
        **{"metadata": _object_of(_anything), "started_s": _number, "duration_s": _number},
        **{"timings": _fields({}, {"queued_s": _number, "rollout_s": _number})},
        "segment_starts": _list_of(_fields({"start": _whole, "n_prompt": _whole})),
    },
)
_TOKENS = _fields(
    {"step": _whole, "episode": _whole},
    {
        **dict.fromkeys(("trainer_logprobs", "entropy", "correction", "advantage"), _numbers),
        "ids_crc32": _whole,
    },
)
_VOCABULARY = _fields({"id": _whole}, {"text": _text, "bytes": _text, "special": _flag})
_TIMED = {"time": _number}
_STEPS = {
    "run": _fields(
        {}, {**_TIMED, "resumed": _whole, "config": _object_of(_anything), "versions": _object_of(_anything)}
    ),
    "step": _fields(
        {"step": _whole, "metrics": _object_of(_or_none(_number))}, {**_TIMED, "phases": _object_of(_or_none(_number))}
    ),
    "eval": _fields({"step": _whole, "metrics": _object_of(_or_none(_number))}, _TIMED),
    "measured": _fields(
        {"step": _whole}, {**_TIMED, "label": _text, "n": _whole, "successes": _whole, "reward": _number}
    ),
    "event": _fields({"step": _whole, "text": _text}, {**_TIMED, "what": _text}),
}


def _fits(record: Record) -> bool:
    """Return whether what stands at each token stands at all of them."""
    return len(record["ids"]) == len(record["mask"]) == len(record["logprobs"]) and set(record["mask"]) <= {0, 1}
