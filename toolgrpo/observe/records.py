"""Read what a run recorded: episodes, what training saw of their tokens, and its steps.

The files and every field of them are described in docs/episodes.md. Whatever version wrote a line,
it comes out with the fields of this one (`SCHEMA`); a field that an old line has nothing for is
None or empty. A line that cannot be read is left out: a reader may look while a run writes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolgrpo.observe.line_file import lines_of, parts

__all__ = [
    "SCHEMA",
    "episode_files",
    "ids_checksum",
    "iter_episodes",
    "iter_steps",
    "iter_tokens",
    "own_name",
    "prompt_id",
    "prompt_messages",
    "read_episodes",
    "read_vocabulary",
    "row_of",
]

SCHEMA = 2

Record = dict[str, Any]


def own_name(kind: str, process_index: int) -> str:
    """Return the file of one process: `episodes.jsonl`, `episodes.rank1.jsonl` and so on."""
    return f"{kind}.jsonl" if process_index == 0 else f"{kind}.rank{process_index}.jsonl"


def episode_files(folder: Path, kind: str = "episodes") -> list[Path]:
    """Return the recordings of all processes of a run, also where all of one is set aside."""
    if not folder.is_dir():
        return []
    names = {name.split(".jsonl")[0] + ".jsonl" for name in (path.name for path in folder.glob(f"{kind}*.jsonl*"))}
    ranks = {kind: 0}
    for name in names:
        stem = name.removesuffix(".jsonl")
        rank = stem.removeprefix(f"{kind}.rank")
        if rank.isdecimal():
            ranks[stem] = int(rank)
    ordered = sorted(ranks, key=lambda stem: ranks[stem])
    return [folder / f"{stem}.jsonl" for stem in ordered if parts(folder / f"{stem}.jsonl")]


def read_episodes(path: Path | str) -> list[Record]:
    """Return all episodes of a recording, or of a run's folder, in the order they were written."""
    return list(iter_episodes(path))


def iter_episodes(path: Path | str) -> Iterator[Record]:
    """Yield the episodes of a recording, or of all recordings in a folder, one at a time."""
    path = Path(path)
    for file in episode_files(path) if path.is_dir() else [path]:
        for record in _objects(file):
            if "ids" in record:
                yield _as_of_today(record)


def iter_tokens(path: Path) -> Iterator[Record]:
    """Yield what the training pass saw of single episodes: a process's file, or all of a folder."""
    for file in episode_files(path, "tokens") if path.is_dir() else [path]:
        yield from _objects(file)


def iter_steps(folder: Path) -> Iterator[Record]:
    """Yield the lines of `steps.jsonl`: the run, its steps, measurements and events, as they came."""
    yield from _objects(folder / "steps.jsonl")


def read_vocabulary(folder: Path) -> dict[int, Record]:
    """Return the text of every token that was recorded, by its id."""
    return {
        line["id"]: line
        for file in episode_files(folder, "vocabulary")
        for line in _objects(file)
        if isinstance(line.get("id"), int)
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
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _as_of_today(record: Record) -> Record:
    """Return a record of any version with the fields of this one."""
    if record.get("schema") == SCHEMA:
        return record
    row = dict(record.get("row") or {})
    prompt = row.pop("prompt", None)
    return {
        "schema": 1,
        "episode": (record.get("metadata") or {}).get("episode"),
        "prompt_id": prompt_id(prompt, row),
        "group": None,
        "success": None,
        "rewards": {},
        "advantage": None,
        "prompt": prompt_messages(prompt),
        "weight_version": record.get("step"),
        "timings": None,
        **record,
        "row": row,
    }
