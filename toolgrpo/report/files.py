"""Read OUTPUT_DIR one step at a time, and give the page its pieces (`chunks`) as they come.

Nothing of a step is kept once its chunk is written but one row per episode, for lists and filters.
A run of more than `MOST_EPISODES` is shown in part: of its steps as many as fit, evenly spread, the
first and the last among them; charts have all steps. Lines that are torn, damaged or hostile are
left out or cut, never fatal.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from toolgrpo.errors import ConfigError
from toolgrpo.observe.line_file import lines_of
from toolgrpo.observe.records import episode_files, iter_episodes, iter_steps, iter_tokens, read_vocabulary
from toolgrpo.report.episode_data import bounded_prompt, cut_text, episode_texts, episode_tokens, flags_of
from toolgrpo.report.step_sums import StepSums

__all__ = ["MOST_EPISODES", "Episodes", "RunPieces", "read_run", "run_folder"]

MOST_EPISODES = 12_000
_MOST_TOOLS = 30  # that a filter knows by name; the page keeps them as bits
_STEP_OF_LINE = re.compile(r'^\{(?:"schema": \d+, )?"step": (\d+), "mode": "(\w+)"')
_PREVIEW = 160

_COLUMNS = (
    *("chunk", "place", "n", "g", "q", "r", "ok", "a", "stop", "turns", "calls", "failed"),
    *("tools", "causes", "flags", "gen", "s"),
)

Record = dict[str, Any]


class WritePiece(Protocol):
    """Takes a piece of data, keeps it in the page, and returns its number there."""

    def __call__(self, value: dict[str, Any], *, alone: bool = True) -> int: ...


@dataclass
class Episodes:
    """One row per episode of the page, by columns."""

    tools: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    prompts: dict[str, tuple[int, str]] = field(default_factory=dict)  # by prompt_id: its place, and a preview
    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})

    def add(self, chunk: int, place: int, record: Record) -> None:
        """Add what lists and filters need of an episode."""
        results = [result for turn in record.get("turns") or () for result in turn.get("results") or ()]
        attempts = sum(len(turn.get("attempts") or ()) for turn in record.get("turns") or ())
        values = {
            "chunk": chunk,
            "place": place,
            "n": record.get("episode"),
            "g": record.get("group"),
            "q": self._prompt(record),
            "r": record.get("reward_given"),
            "ok": None if record.get("success") is None else int(record["success"]),
            "a": record.get("advantage"),
            "stop": _place(self.stops, str(record.get("stop_reason"))),
            "turns": len(record.get("turns") or ()),
            "calls": attempts,
            "failed": sum(result.get("error") is not None for result in results),
            "tools": _bits(self.tools, {str(r.get("name") or "unnamed")[:100] for r in results}),
            "causes": _bits(self.causes, {str(r["error"]) for r in results if r.get("error") is not None}),
            "flags": flags_of(record),
            "gen": sum(record.get("mask") or ()),
            "s": round(record.get("duration_s") or 0.0, 3),
        }
        for name, column in self.rows.items():
            column.append(values[name])

    def as_json(self) -> dict[str, Any]:
        return {
            "tools": self.tools,
            "causes": self.causes,
            "stops": self.stops,
            "prompts": [[name, preview] for name, (_, preview) in self.prompts.items()],
            "rows": self.rows,
        }

    def _prompt(self, record: Record) -> int:
        name = str(record.get("prompt_id"))
        if name not in self.prompts:
            self.prompts[name] = (len(self.prompts), _preview(record.get("prompt")))
        return self.prompts[name][0]


@dataclass
class RunPieces:
    """What is known of one run when all its chunks are written."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)  # the `run` line
    chunks: list[dict[str, Any]] = field(default_factory=list)  # mode, step, label, n, and the two chunk numbers
    sums: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)  # metrics and phases
    measured: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    token_ids: set[int] = field(default_factory=set)
    n_episodes: int = 0  # recorded; those in the page may be fewer


def run_folder(folder: Path) -> Path:
    """Return where the recordings of a run lie: the folder itself, or what an evaluation made in it."""
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}; give the output_dir of a run")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give the folder it lies in, the output_dir of a run")
    for place in (folder, folder / "model"):
        if episode_files(place) or (place / "steps.jsonl").is_file():
            return place
    raise ConfigError(
        f"{folder} holds no recording (episodes.jsonl or steps.jsonl); give the output_dir of a run that had "
        f"record_episodes on"
    )


def read_run(
    folder: Path, number: int, episodes: Episodes, write: WritePiece, *, most_episodes: int = MOST_EPISODES
) -> RunPieces:
    """Read a run from its files; `number` is its place among the runs of the page."""
    run = RunPieces(folder.resolve().name)
    _read_steps(folder, run)
    shown = _steps_shown(folder, most_episodes)
    trained_on = _TokensByStep(folder)
    for batch in _batches(folder):
        run.n_episodes += len(batch)
        first = batch[0]
        mode, step, label = str(first.get("mode")), first.get("step") or 0, first.get("label")
        sums = StepSums(mode, step, label)
        for record in batch:
            sums.add(record)
        run.sums.append(sums.as_json())
        if mode == "train" and shown is not None and step not in shown:
            continue
        texts, tokens = _pieces(batch, trained_on.of_step(step) if mode == "train" else {}, run.token_ids)
        at = {"run": number, "mode": mode, "step": step, "label": label, "n": len(batch)}
        run.chunks.append({**at, "texts": write(texts, alone=False), "tokens": write(tokens)})
        for place, record in enumerate(batch):
            episodes.add(run.chunks[-1]["texts"], place, record)
    return run


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


def _batches(folder: Path) -> Iterator[list[Record]]:
    """Yield the episodes of each step and mode of all processes, and then the held-out ones."""
    streams = [filter(_usable, iter_episodes(file)) for file in episode_files(folder)]
    yield from _together(heapq.merge(*streams, key=lambda record: record.get("step") or 0))
    for file in episode_files(folder, "heldout"):
        yield from _together(filter(_usable, iter_episodes(file)))


class _TokensByStep:
    """What the training pass saw of episodes, one step in memory; steps are asked for in order."""

    def __init__(self, folder: Path) -> None:
        streams = [filter(_is_of_step, iter_tokens(file)) for file in episode_files(folder, "tokens")]
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


def _is_of_step(line: Record) -> bool:
    return isinstance(line.get("episode"), int) and isinstance(line.get("step"), int)


def _usable(record: Record) -> bool:
    """Return whether a line has the shape of an episode; others were damaged, and are left out."""
    lists = [record.get(name) for name in ("prompt_ids", "ids", "mask", "logprobs", "turns")]
    if not all(isinstance(value, list) for value in lists) or not isinstance(record.get("step"), int):
        return False
    parts = [
        part
        for turn in record["turns"]
        if isinstance(turn, dict)
        for part in (*(turn.get("attempts") or ()), *(turn.get("results") or ()))
    ]
    whole = all(isinstance(part, dict) for part in (*record["turns"], *parts))
    return whole and len(record["ids"]) == len(record["mask"]) == len(record["logprobs"])


def _together(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield records that follow each other and are of one step; each mode and label for itself."""
    by_kind: dict[tuple[Any, Any], list[Record]] = {}
    step = None
    for record in records:
        if record.get("step") != step:
            yield from by_kind.values()
            by_kind, step = {}, record.get("step")
        by_kind.setdefault((record.get("mode"), record.get("label")), []).append(record)
    yield from by_kind.values()


def _pieces(
    batch: list[Record], seen: Mapping[int, Record], token_ids: set[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the texts and the tokens of a step; what its episodes share stands there once."""
    prompts: dict[str, Any] = {}
    prompt_ids: dict[str, list[int]] = {}
    tokens = []
    for record in batch:
        name = str(record.get("prompt_id"))
        prompts.setdefault(name, bounded_prompt(record))
        own = list(record.get("prompt_ids") or ())
        prompt_ids.setdefault(name, own)
        number = record.get("episode")
        piece = episode_tokens(record, seen.get(number) if isinstance(number, int) else None)
        tokens.append(piece if own == prompt_ids[name] else {**piece, "p": own})
        token_ids.update(own)
        token_ids.update(piece["i"])
    return (
        {"prompts": prompts, "episodes": [episode_texts(record) for record in batch]},
        {"prompts": prompt_ids, "episodes": tokens},
    )


def _read_steps(folder: Path, run: RunPieces) -> None:
    """Sort the lines of `steps.jsonl`; a resume makes void what is after it."""
    for line in iter_steps(folder):
        kind, step = line.get("kind"), line.get("step")
        if kind == "run":
            run.facts = line
            resumed = line.get("resumed")
            if isinstance(resumed, int):
                run.steps = [one for one in run.steps if one["step"] < resumed]
                run.events = [one for one in run.events if one["step"] < resumed]
                run.events.append(
                    {**line, "step": resumed, "what": "resumed", "text": f"resumed after {resumed} steps"}
                )
        elif not isinstance(step, int):
            continue
        elif kind == "step" and isinstance(line.get("metrics"), dict):
            run.steps.append(line)
        elif kind == "measured":
            run.measured.append(line)
        elif kind == "event":
            run.events.append({**line, "text": cut_text(line.get("text"))[:2000]})


def _steps_shown(folder: Path, most_episodes: int) -> set[int] | None:
    """Return the steps whose episodes the page has; None: all."""
    counts: Counter[int] = Counter()
    for file in episode_files(folder):
        for line in lines_of(file):
            match = _STEP_OF_LINE.match(line[:80])
            if match is not None and match[2] == "train":
                counts[int(match[1])] += 1
    total = counts.total()
    if total <= most_episodes:
        return None
    steps = sorted(counts)
    n_kept = max(2, len(steps) * most_episodes // total)
    return {steps[round(place * (len(steps) - 1) / (n_kept - 1))] for place in range(n_kept)}


def _place(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _bits(names: list[str], present: set[str]) -> int:
    bits = 0
    for name in sorted(present):
        if name in names or len(names) < _MOST_TOOLS:
            bits |= 1 << _place(names, name)
    return bits


def _preview(prompt: Any) -> str:
    """Return the beginning of what the user said last."""
    said = [m.get("content") for m in prompt or () if isinstance(m, dict) and m.get("role") == "user"]
    text = said[-1] if said else json.dumps(prompt, default=str, ensure_ascii=False)
    text = text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)
    return " ".join(text[: 10 * _PREVIEW].split())[:_PREVIEW]
