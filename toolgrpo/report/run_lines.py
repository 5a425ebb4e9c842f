"""Write what the page has of a run, one step at a time; nothing of a step is kept once it is written.

The texts and the tokens of a step are pieces, decoded when somebody looks at them. What charts,
lists and filters need of every step are lines, which the page reads as it opens:

* `batch`: the sums of the episodes of one step and mode and, where the page has those episodes, one
  row per episode, by columns, and the numbers of their pieces;
* `step`, `measured` and `event`: those of `steps.jsonl`.

A run of more than `most_episodes` is shown in part: of its steps as many as fit, evenly spread, the
first and the last among them; charts have all steps.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from toolgrpo.report.episode_data import bounded_prompt, cut_text, episode_texts, episode_tokens, flags_of
from toolgrpo.report.files import Record, TokensByStep, batches, step_lines, steps_shown, vocabulary_of
from toolgrpo.signal.advantages import is_dead

_MOST_NAMES = 30  # of each kind that a filter knows; the page keeps tools and causes as bits
_PREVIEW = 160


# What the charts need of the episodes of one step: sums, shares and quantiles.


class StepSums:
    """Adds up the episodes of one step and mode; `as_json` is what the page gets."""

    def __init__(self, mode: str, step: int, label: str | None) -> None:
        self.mode, self.step, self.label = mode, step, label
        self.n = self.successes = self.tokens = self.turns = 0
        self._rewards: list[float] = []
        self._groups: dict[Any, list[float | None]] = defaultdict(list)
        self._group_ok: dict[Any, list[bool]] = defaultdict(list)
        self._stops: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._tools: dict[str, _ToolSums] = defaultdict(_ToolSums)
        self._parts: dict[str, list[float]] = defaultdict(list)
        self.rollout_s: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one episode."""
        self.n += 1
        self.successes += bool(record.get("success"))
        reward = record.get("reward_given")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
        group = record.get("group")
        self._groups[group].append(reward)
        self._group_ok[group].append(bool(record.get("success")))
        self._stops[str(record.get("stop_reason"))] += 1
        self.tokens += sum(record.get("mask") or ())
        for name, value in (record.get("rewards") or {}).items():
            if isinstance(value, int | float):
                self._parts[str(name)[:100]].append(float(value))
        turns = record.get("turns") or ()
        self.turns += len(turns)
        for result in (result for turn in turns for result in turn.get("results") or ()):
            name, cause = str(result.get("name") or "unnamed")[:100], result.get("error")
            self._tools[name].add(cause, result.get("duration_s") or 0.0)
            if cause is not None:
                self._causes[str(cause)] += 1
        rollout_s = (record.get("timings") or {}).get("rollout_s")
        self.rollout_s = rollout_s if self.rollout_s is None else self.rollout_s

    def as_json(self) -> dict[str, Any]:
        n_rewards = len(self._rewards)
        mean = sum(self._rewards) / n_rewards if n_rewards else None
        variance = sum((reward - (mean or 0)) ** 2 for reward in self._rewards) / n_rewards if n_rewards else 0.0
        grouped = None not in self._groups and max(map(len, self._groups.values()), default=0) > 1
        dead = [group for group, rewards in self._groups.items() if is_dead(rewards)] if grouped else []
        solved = sum(all(self._group_ok[group]) for group in dead)
        return {
            "mode": self.mode,
            "step": self.step,
            "label": self.label,
            "n": self.n,
            "ok": self.successes,
            "r": None if mean is None else round(mean, 5),
            "sd": round(variance**0.5, 5),
            "groups": [len(self._groups) - len(dead), len(dead) - solved, solved] if grouped else None,
            "stops": dict(self._stops),
            "causes": dict(self._causes),
            "tools": {name: sums.as_json() for name, sums in self._tools.items()},
            "parts": {name: round(sum(values) / len(values), 5) for name, values in self._parts.items()},
            "tokens": round(self.tokens / self.n, 2),
            "turns": round(self.turns / self.n, 3),
            "rollout_s": self.rollout_s,
        }


class _ToolSums:
    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._failed: Counter[str] = Counter()

    def add(self, cause: str | None, seconds: float) -> None:
        self._seconds.append(seconds)
        if cause is not None:
            self._failed[str(cause)] += 1

    def as_json(self) -> dict[str, Any]:
        ordered = sorted(self._seconds)

        def quantile(q: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 4)

        return {"n": len(ordered), "failed": dict(self._failed), "p50": quantile(0.5), "p95": quantile(0.95)}


class Page(Protocol):
    """What a run is written to."""

    def piece(self, value: dict[str, Any], *, alone: bool = True) -> int: ...

    def line(self, value: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunWritten:
    """What is known of a run when it is written: its `run` line, and how much of it there is."""

    facts: Record
    vocabulary: int  # the piece with the texts of its tokens
    n_episodes: int  # recorded
    n_shown: int  # in the page


@dataclass
class Names:
    """The names that the rows of all runs of a page refer to by their place."""

    tools: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)


def write_run(folder: Path, number: int, names: Names, page: Page, *, most_episodes: int) -> RunWritten:
    """Write a run from its files; `number` is its place among the runs of the page."""
    facts: Record = {}
    for line in step_lines(folder):
        if line["kind"] == "run":
            facts = line
        else:
            kept = ("kind", "step", "metrics", "phases", "time") if line["kind"] == "step" else tuple(line)
            page.line({"run": number, **{name: line.get(name) for name in kept}})
    shown = steps_shown(folder, most_episodes)
    trained_on = TokensByStep(folder)
    token_ids: set[int] = set()
    n_episodes = n_shown = 0
    for batch in batches(folder):
        n_episodes += len(batch)
        line, mode, step = _sums_of(batch, number), batch[0].get("mode"), batch[0].get("step") or 0
        if mode != "train" or shown is None or step in shown:
            n_shown += len(batch)
            texts, tokens = _pieces(batch, trained_on.of_step(step) if mode == "train" else {}, token_ids)
            line |= {"texts": page.piece(texts, alone=False), "tokens": page.piece(tokens), **_rows(batch, names)}
        page.line(line)
    return RunWritten(facts, page.piece(vocabulary_of(folder, token_ids)), n_episodes, n_shown)


def _sums_of(batch: list[Record], number: int) -> dict[str, Any]:
    sums = StepSums(str(batch[0].get("mode")), batch[0].get("step") or 0, batch[0].get("label"))
    for record in batch:
        sums.add(record)
    return {"kind": "batch", "run": number, "sums": sums.as_json()}


def _rows(batch: list[Record], names: Names) -> dict[str, Any]:
    """Return what lists and filters need of these episodes: columns, and the questions that `q` counts."""
    questions: dict[str, str] = {}
    for record in batch:
        questions.setdefault(str(record.get("prompt_id")), _preview(record.get("prompt")))
    places = {name: place for place, name in enumerate(questions)}
    rows = [_row(record, places[str(record.get("prompt_id"))], names) for record in batch]
    return {"questions": list(questions.items()), "rows": {name: [row[name] for row in rows] for name in rows[0]}}


def _row(record: Record, question: int, names: Names) -> dict[str, Any]:
    turns = record.get("turns") or ()
    results = [result for turn in turns for result in turn.get("results") or ()]
    return {
        "n": record.get("episode"),
        "g": record.get("group"),
        "q": question,
        "r": record.get("reward_given"),
        "ok": None if record.get("success") is None else int(record["success"]),
        "a": record.get("advantage"),
        "stop": _place(names.stops, cut_text(record.get("stop_reason"))[:100]),
        "turns": len(turns),
        "calls": sum(len(turn.get("attempts") or ()) for turn in turns),
        "failed": sum(result.get("error") is not None for result in results),
        "tools": _bits(names.tools, {str(result.get("name") or "unnamed")[:100] for result in results}),
        "causes": _bits(names.causes, {str(one["error"])[:100] for one in results if one.get("error") is not None}),
        "flags": flags_of(record),
        "gen": sum(record.get("mask") or ()),
        "s": round(record.get("duration_s") or 0.0, 3),
    }


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


def _place(names: list[str], name: str) -> int:
    """Return the place of a name, or that of `other` where there are too many."""
    if name not in names:
        name = name if len(names) < _MOST_NAMES else "other"
    if name not in names:
        names.append(name)
    return names.index(name)


def _bits(names: list[str], present: set[str]) -> int:
    bits = 0
    for name in sorted(present):
        if name in names or len(names) < _MOST_NAMES:
            bits |= 1 << _place(names, name)
    return bits


def _preview(prompt: Any) -> str:
    """Return the beginning of what the user said last."""
    said = [m.get("content") for m in prompt or () if isinstance(m, dict) and m.get("role") == "user"]
    text = said[-1] if said else json.dumps(prompt, default=str, ensure_ascii=False)
    text = text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)
    return " ".join(text[: 10 * _PREVIEW].split())[:_PREVIEW]
