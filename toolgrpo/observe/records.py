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
            if _has(line, _EPISODE) and _fits(line):
                yield line


def iter_tokens(path: Path) -> Iterator[Record]:
    """Yield the training pass's view of episodes, from one file or from all of a folder."""
    for file in episode_files(path, "tokens") if path.is_dir() else [path]:
        yield from (line for line in _objects(file) if _has(line, _TOKENS))


def iter_steps(folder: Path) -> Iterator[Record]:
    """Yield the lines of `steps.jsonl`: the run, its steps, measurements and events, as they came."""
    for line in _objects(folder / "steps.jsonl"):
        kind = line.get("kind")
        if isinstance(kind, str) and kind in _STEPS and _has(line, _STEPS[kind]):
            yield line


def read_vocabulary(folder: Path) -> dict[int, Record]:
    """Return the text of every token that was recorded, by its id."""
    lines = (line for file in episode_files(folder, "vocabulary") for line in _objects(file))
    return {line["id"]: line for line in lines if _has(line, _VOCABULARY)}


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
#
# A shape is an object's fields (a name that ends in `?` may be missing or null), a list of one
# shape, or a function that says whether a value is right.

Shape = Any

_DEEPEST = 200  # levels; Python's own reader and writer take about a thousand
_LARGEST = 1e100  # of numbers, so that sums and squares of them are numbers too
# JSON has no other numbers: a run may write NaN for one that it does not know.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


def _is_shallow(value: Any, levels: int = _DEEPEST) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    nested = [inner for inner in inside if isinstance(inner, dict | list)]
    return not nested or (levels > 0 and all(_is_shallow(inner, levels - 1) for inner in nested))


def _has(value: Any, shape: Shape) -> bool:
    """Return whether a value has this shape."""
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has(one, shape[0]) for one in value)
    if not isinstance(shape, dict):
        return bool(shape(value))
    if not isinstance(value, dict):
        return False
    for name, inner in shape.items():
        known = name.removesuffix("?")
        if known is name and name not in value:
            return False
        given = value.get(known)
        if not (given is None and known is not name) and not _has(given, inner):
            return False
    return True


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _ids(value: Any) -> bool:
    """Return whether this is a list of integers, without a call per element: there may be thousands."""
    return isinstance(value, list) and set(map(type, value)) <= {int} and _within_bounds(value)


def _numbers(value: Any) -> bool:
    """Return whether this is a list of numbers and None."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float, type(None)}:
        return False
    return _within_bounds([number for number in value if number is not None])


def _within_bounds(numbers: Sequence[float]) -> bool:
    return not numbers or (min(numbers) > -_LARGEST and max(numbers) < _LARGEST)


def _numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and _numbers(list(value.values()))


_ATTEMPT = {
    **{"status": _text, "raw?": _text, "name?": _text, "arguments?": _object, "detail?": _text},
    "call_id?": _text,
}
_RESULT = {
    **{"content": _text, "error": _text_or_none, "duration_s": _number, "name?": _text, "started_s?": _number},
    **{"left_out?": _whole, "cached?": _flag, "ends_episode?": _flag},
}
_TURN = {
    **{"start": _whole, "end": _whole, "attempts": [_ATTEMPT], "results": [_RESULT], "content?": _text},
    **{"reasoning?": _text, "user?": _text, "closed?": _flag, "started_s?": _number, "duration_s?": _number},
    **{"weights?": _ids, "taken_over?": [_ids]},
}
_EPISODE = {
    **{"step": _whole, "stop_reason": _text, "turns": [_TURN], "prompt": [_object], "row": _object},
    **{"prompt_ids": _ids, "ids": _ids, "mask": _ids, "logprobs": _numbers},
    **{"mode?": _text, "label?": _text, "prompt_id?": _text, "failure?": _text, "success?": _flag, "trained?": _flag},
    **{"episode?": _whole, "group?": _whole, "weight_version?": _whole, "reward_given?": _number},
    **{"reward?": _number, "rewards?": _numbers_by_name, "advantage?": _number, "turn_rewards?": _numbers},
    **{"turn_advantages?": _numbers, "messages?": [_object], "metadata?": _object, "started_s?": _number},
    **{"duration_s?": _number, "timings?": {"queued_s?": _number, "rollout_s?": _number}},
    "segment_starts?": [{"start": _whole, "n_prompt": _whole}],
}
_TOKENS = {
    **{"step": _whole, "episode": _whole, "trainer_logprobs?": _numbers, "entropy?": _numbers},
    **{"correction?": _numbers, "advantage?": _numbers, "ids_crc32?": _whole},
}
_VOCABULARY = {"id": _whole, "text?": _text, "bytes?": _text, "special?": _flag}
_STEPS = {
    "run": {"time?": _number, "resumed?": _whole, "config?": _object, "versions?": _object},
    "step": {"step": _whole, "metrics": _numbers_by_name, "time?": _number, "phases?": _numbers_by_name},
    "eval": {"step": _whole, "metrics": _numbers_by_name, "time?": _number},
    "measured": {
        **{"step": _whole, "time?": _number, "label?": _text, "n?": _whole, "successes?": _whole},
        "reward?": _number,
    },
    "event": {"step": _whole, "text": _text, "time?": _number, "what?": _text},
}


def _fits(record: Record) -> bool:
    """Return whether ids, mask and log-probabilities have the same length."""
    return len(record["ids"]) == len(record["mask"]) == len(record["logprobs"]) and set(record["mask"]) <= {0, 1}
