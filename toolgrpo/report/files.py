"""Read OUTPUT_DIR one step at a time: the episodes of each step, the training pass's view of them,
and the lines of `steps.jsonl`.

Nothing of a step is kept once the next one is asked for. Damaged lines do not come here
(`toolgrpo.observe.records`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from toolgrpo.errors import ConfigError
from toolgrpo.observe.line_file import STEP_OF_LINE, lines_of
from toolgrpo.observe.records import episode_files, iter_episodes, iter_steps, iter_tokens, read_vocabulary
from toolgrpo.report.episode_data import cut_text

Record = dict[str, Any]


def run_folder(folder: Path) -> Path:
    """Return where the recordings of a run lie: the folder itself, or what an evaluation made in it."""
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}; give the output_dir of a run")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give its folder, the output_dir of a run")
    for place in (folder, folder / "model"):
        if episode_files(place) or (place / "steps.jsonl").is_file():
            return place
    raise ConfigError(
        f"{folder} holds no recording (episodes.jsonl or steps.jsonl); give the output_dir of a run that had "
        f"record_episodes on"
    )


def vocabulary_of(folder: Path, ids: set[int]) -> dict[str, Any]:
    """Return the texts of these token ids; bytes and special tokens as objects."""
    known = read_vocabulary(folder)
    found: dict[str, Any] = {}
    for number in sorted(ids & known.keys()):
        line = known[number]
        text = cut_text(line.get("text"))[:500]
        more = {name: line[name] for name in ("bytes", "special") if line.get(name)}
        found[str(number)] = {"text": text, **more} if more else text
    return found


def batches(folder: Path) -> Iterator[list[Record]]:
    """Yield the episodes of each step and mode of all processes, and then the held-out ones."""
    streams = [iter_episodes(file) for file in episode_files(folder)]
    yield from _together(heapq.merge(*streams, key=lambda record: record["step"]))
    files = episode_files(folder, "heldout")
    streams = [_renumbered(iter_episodes(file), process, len(files)) for process, file in enumerate(files)]
    yield from _together(heapq.merge(*streams, key=lambda record: record["step"]))


def _renumbered(records: Iterator[Record], process: int, n: int) -> Iterator[Record]:
    """Yield held-out episodes, which each of `n` processes counts for itself, with numbers of their own."""
    for record in records:
        own = {name: record[name] * n + process for name in ("episode", "group") if record.get(name) is not None}
        yield {**record, **own}


class TokensByStep:
    """The training pass's view of episodes, one step in memory; ask for steps in order."""

    def __init__(self, folder: Path) -> None:
        streams = [_without_void(file) for file in episode_files(folder, "tokens")]
        self._lines = heapq.merge(*streams, key=lambda line: line["step"])
        self._next = next(self._lines, None)

    def of_step(self, step: int) -> dict[int, Record]:
        """Return the lines of this step, by episode."""
        found: dict[int, Record] = {}
        while self._next is not None and self._next["step"] <= step:
            if self._next["step"] == step:
                found[self._next["episode"]] = self._next
            self._next = next(self._lines, None)
        return found


def _without_void(file: Path) -> Iterator[Record]:
    """Yield the lines of a file of tokens, without those that a resumed run has written again."""
    resumes, last = [], -1
    for record in iter_tokens(file):
        if record["step"] < last:
            resumes.append(record["step"])
        last = record["step"]
    below, last = _bounds(resumes), -1
    for record in iter_tokens(file):
        if record["step"] < last and len(below) > 1:  # more may have come since
            below.pop(0)
        last = record["step"]
        if record["step"] < below[0]:
            yield record


def _bounds(resumes: list[int]) -> list[float]:
    """Return what a step must be below, by the number of resumes before it; of the last one nothing is void."""
    return [*list(accumulate(reversed(resumes), min))[::-1], math.inf]


def _together(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield records that follow each other and are of one step; each mode and label for itself."""
    by_kind: dict[tuple[Any, Any], list[Record]] = {}
    step = None
    for record in records:
        if record["step"] != step:
            yield from by_kind.values()
            by_kind, step = {}, record["step"]
        by_kind.setdefault((record.get("mode"), record.get("label")), []).append(record)
    yield from by_kind.values()


def step_lines(folder: Path) -> Iterator[Record]:
    """Yield the runs, steps, measurements and events of `steps.jsonl`; a resume makes void what is after it."""
    runs = (line for line in iter_steps(folder) if line["kind"] == "run")
    resumes = [run["resumed"] for run in runs if run.get("resumed") is not None]
    below, behind = _bounds(resumes), 0
    for line in iter_steps(folder):
        kind, resumed = line["kind"], line.get("resumed")
        if kind == "run" and resumed is not None:
            behind += 1
            yield line
            if resumed < below[behind]:
                text = f"resumed after {resumed} steps"
                yield {"kind": "event", "step": resumed, "what": "resumed", "text": text, "time": line.get("time")}
        elif kind == "run" or (kind in ("step", "measured") and _done(line) <= below[behind]):
            yield line
        elif kind == "event" and line["step"] < below[behind]:
            yield {**line, "text": cut_text(line["text"])[:2000]}


def _done(line: Record) -> int:
    """Return how many steps were done at a line; one that measures says so itself."""
    n_done: int = line["step"] + (line["kind"] == "step")
    return n_done


def steps_shown(folder: Path, most_episodes: int) -> set[int] | None:
    """Return the steps whose episodes the page has; None: all."""
    counts: Counter[int] = Counter()
    for file in episode_files(folder):
        for line in lines_of(file):
            match = STEP_OF_LINE.match(line.text[:80])
            if match is not None and match[2] == "train":
                counts[int(match[1])] += 1
    total = counts.total()
    if total <= most_episodes:
        return None
    steps = sorted(counts)
    n_kept = max(2, len(steps) * most_episodes // total)
    return {steps[round(place * (len(steps) - 1) / (n_kept - 1))] for place in range(n_kept)}
