"""Make the report of a run, or of two side by side: read it step by step, keeping one step in memory.

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
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from toolgrpo import __version__
from toolgrpo.episode.tool_calls import NO_NAME, NO_TOOL, ToolErrorKind
from toolgrpo.learning.advantages import is_dead
from toolgrpo.observe.doctor import PARSE_CAUSES, over_run
from toolgrpo.observe.records import results_of
from toolgrpo.report.episode_data import bounded_prompt, cut_text, episode_texts, episode_tokens, flags_of
from toolgrpo.report.files import Record, TokensByStep, batches, run_folder, step_lines, steps_shown, vocabulary_of
from toolgrpo.report.html import PageWriter
from toolgrpo.support.storage import A_REPORT, check_output, storage_errors

MOST_EPISODES = 12_000
_MOST_NAMES = 30  # of each kind that a filter knows; the page keeps tools and causes as bits
_PREVIEW = 160
_MOST_TEXTS = 1000  # of the errors of a tool


def _teaches_nothing(group: Sequence[Record]) -> bool:
    """Return whether a group's rewards are equal, and no advantage was made of their parts either."""
    return is_dead([one.get("reward_given") for one in group]) and not any(one.get("advantage") for one in group)


def step_sums(batch: Sequence[Record]) -> dict[str, Any]:
    """Return the sums, shares and quantiles of one step and mode for the charts."""
    n, first = len(batch), batch[0]
    rewards = [record["reward_given"] for record in batch if record.get("reward_given") is not None]
    groups: dict[Any, list[Record]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    tools: dict[str, list[Record]] = defaultdict(list)
    for record in batch:
        groups[record.get("group")].append(record)
        for name, value in (record.get("rewards") or {}).items():
            if value is not None:
                parts[name[:100]].append(value)
        for result in results_of(record):
            tools[_tool(result)].append(result)
    grouped = None not in groups and max(map(len, groups.values())) > 1
    means = rewards
    if grouped and len(groups) > 1:  # the episodes of one question are alike
        given = [[r["reward_given"] for r in group if r.get("reward_given") is not None] for group in groups.values()]
        means = [fmean(own) for own in given if own]
    dead = [group for group in groups.values() if _teaches_nothing(group)] if grouped else []
    ends = Counter(_all_alike(group) for group in dead)
    waits = ((record.get("timings") or {}).get("rollout_s") for record in batch)
    return {
        "mode": str(first.get("mode")),
        "step": first["step"],
        "label": first.get("label"),
        "n": n,
        "scored": sum(record.get("success") is not None for record in batch),
        "ok": sum(bool(record.get("success")) for record in batch),
        "rewarded": len(means),
        "r": round(fmean(rewards), 5) if rewards else None,
        "sd": round(stdev(means), 5) if len(means) > 1 else None,  # of one nobody knows
        "groups": [len(groups) - len(dead), ends["failed"], ends["solved"], ends["both"]] if grouped else None,
        "dropped_groups": ends["dropped"],  # whole ones
        "stops": Counter(record["stop_reason"] for record in batch),
        "causes": _causes(result for record in batch for result in results_of(record)),
        "tools": {name: _tool_sums(results) for name, results in tools.items()},
        "parts": {name: round(fmean(values), 5) for name, values in parts.items()},
        "tokens": round(sum(sum(record["mask"]) for record in batch) / n, 2),
        "turns": round(sum(len(record["turns"]) for record in batch) / n, 3),
        "rollout_s": max((seconds for seconds in waits if seconds is not None), default=None),  # of the slowest process
    }


def _all_alike(group: Sequence[Record]) -> str:
    """Return how a group whose rewards are all alike ended: all `failed`, all `solved`, `both` ways, or all `dropped`."""
    ends = {one["success"] for one in group if one.get("success") is not None}
    return "both" if len(ends) > 1 else "solved" if True in ends else "failed" if ends else "dropped"


def _tool_sums(results: Sequence[Record]) -> dict[str, Any]:
    ordered = sorted(result["duration_s"] for result in results)
    p95 = round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4)
    return {"n": len(results), "failed": _causes(results), "p95": p95}


def _tool(result: Record) -> str:
    """Return the tool of a call; names that a model made up are one."""
    return NO_TOOL if result["error"] == ToolErrorKind.UNKNOWN_TOOL else str(result.get("name") or NO_NAME)[:100]


def _causes(results: Iterable[Record]) -> Counter[str]:
    return Counter(result["error"][:100] for result in results if result["error"] is not None)


@dataclass
class Names:
    """The names that the rows of all runs of a page refer to by their place."""

    tools: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)


def write_run(folder: Path, number: int, names: Names, page: PageWriter, *, most_episodes: int) -> dict[str, Any]:
    """Write a run from its files, and return its entry in the index; `number` is its place among the runs of the page."""
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
    errors: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    durations: dict[str, array[float]] = defaultdict(lambda: array("d"))  # of the calls of each tool
    n_episodes = n_shown = 0
    for batch in batches(folder):
        n_episodes += len(batch)
        _count_errors(batch, errors)
        for result in (one for record in batch for one in results_of(record)):
            durations[_tool(result)].append(result["duration_s"])
        whole: dict[str, Any] = {"kind": "batch", "run": number, "sums": step_sums(batch)}
        mode, step = batch[0].get("mode"), batch[0]["step"]
        if mode != "train" or shown is None or step in shown:
            n_shown += len(batch)
            texts, tokens = _pieces(batch, trained_on.of_step(step) if mode == "train" else {}, token_ids)
            whole |= {"texts": page.piece(texts, alone=False), "tokens": page.piece(tokens), **_rows(batch, names)}
        page.line(whole)
    vocabulary = page.piece(vocabulary_of(folder, token_ids))
    found = run_findings(step_lines(folder), errors)
    medians = {tool: round(median(seconds), 4) for tool, seconds in durations.items()}
    run = {"facts": facts, "vocabulary": vocabulary, "recorded": n_episodes, "shown": n_shown}
    return {**run, "findings": found, "medians": medians}


def _count_errors(batch: Sequence[Record], errors: dict[str, Counter[tuple[str, str]]]) -> None:
    """Count what failed calls of a tool were answered, by cause and text, as far as there are not too many texts."""
    for result in (one for record in batch for one in results_of(record) if one["error"] is not None):
        of_tool, said = errors[_tool(result)], (str(result["error"])[:100], _short(result["content"]))
        if len(of_tool) < _MOST_TEXTS or said in of_tool:
            of_tool[said] += 1


def _rows(batch: list[Record], names: Names) -> dict[str, Any]:
    """Return the columns for lists and filters, and the questions that `q` counts."""
    questions: dict[str, str] = {}
    for record in batch:
        questions.setdefault(str(record.get("prompt_id")), _preview(record["prompt"]))
    places = {name: place for place, name in enumerate(questions)}
    rows = [_row(record, places[str(record.get("prompt_id"))], names) for record in batch]
    return {"questions": list(questions.items()), "rows": {name: [row[name] for row in rows] for name in rows[0]}}


def _row(record: Record, question: int, names: Names) -> dict[str, Any]:
    results = results_of(record)
    causes = _causes(results)
    return {
        "n": record.get("episode"),
        "g": record.get("group"),
        "q": question,
        "r": record.get("reward_given"),
        "ok": None if record.get("success") is None else int(record["success"]),
        "a": record.get("advantage"),
        "stop": _place(names.stops, cut_text(record["stop_reason"])[:100]),
        "turns": len(record["turns"]),
        "calls": sum(len(turn["attempts"]) for turn in record["turns"]),
        "failed": causes.total(),
        "tools": _bits(names.tools, set(map(_tool, results))),
        "causes": _bits(names.causes, set(causes)),
        "flags": flags_of(record),
        "gen": sum(record["mask"]),
        "s": round(record.get("duration_s") or 0.0, 3),
    }


def _pieces(
    batch: list[Record], seen: Mapping[int, Record], token_ids: set[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the texts and the tokens of a step; what its episodes share stands there once."""
    prompts: dict[str, Any] = {}
    prompt_ids: dict[str, list[int]] = {}
    texts, tokens = [], []
    for record in batch:
        name, prompt, text = str(record.get("prompt_id")), bounded_prompt(record), episode_texts(record)
        shared = prompts.setdefault(name, prompt)
        texts.append(text if prompt["m"] == shared["m"] else {**text, "m": prompt["m"]})
        own = record["prompt_ids"]
        prompt_ids.setdefault(name, own)
        piece = episode_tokens(record, seen.get(record.get("episode", -1)))
        tokens.append(piece if own == prompt_ids[name] else {**piece, "p": own})
        token_ids.update(own)
        token_ids.update(piece["i"])
    return {"prompts": prompts, "episodes": texts}, {"prompts": prompt_ids, "episodes": tokens}


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


def _preview(prompt: Sequence[Record]) -> str:
    """Return the beginning of what the user said last."""
    said = [message.get("content") for message in prompt if message.get("role") == "user"]
    text = said[-1] if said else json.dumps(prompt, default=str, ensure_ascii=False)
    return _short(text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False))


def _short(text: str) -> str:
    return " ".join(text[: 10 * _PREVIEW].split())[:_PREVIEW]


# What the doctor's rules say of a whole run, for the page: a list of
# `{rule, sentence, link, steps, filter}`.
#
# The rules and their sentences are those of `observe/doctor.py`. `filter` is what the page's search
# shows as examples of a rule: the same words as in a link to the search.

# The episodes that show what a rule means.
_EXAMPLES = {
    "infrastructure_fails": {"cause": "timeout"},
    "no_tool_calls": {"ready": "nocall"},
    "groups_all_failed": {"success": "no", "ready": "dead"},
    "groups_all_solved": {"success": "yes", "ready": "dead"},
    "groups_all_alike": {"ready": "dead"},
    "broken_calls": {"ready": "brokencall"},
    "cut_by_length": {"ready": "cut"},
    "tool_fails": {"ready": "failedcall"},
    "void_turns": {"ready": "void"},
    "copied_results": {"ready": "copied"},
    "reward_without_success": {"ready": "hack"},
}


def run_findings(
    lines: Iterable[dict[str, Any]], errors: Mapping[str, Counter[tuple[str, str]]]
) -> list[dict[str, Any]]:
    """Return each rule that held, with its last sentence and the steps at which it held.

    `lines` are those of `steps.jsonl`, `errors` the failed calls of each tool by cause and text.
    """
    logs = ({**_numbers(line["metrics"]), "step": line["step"] + 1} for line in lines if line["kind"] == "step")
    found: dict[str, dict[str, Any]] = {}
    for spoken in over_run(logs):
        steps = [*found.get(spoken.rule, {"steps": []})["steps"], spoken.step]
        about: dict[str, Any] = {} if spoken.tool is None else {"tool": spoken.tool}
        quoted = ""
        for (cause, text), n in errors.get(spoken.tool or "", Counter()).most_common(1):
            about |= {"cause": cause, "ready": ""}
            quoted = f'; most often ({n} times in the run) it is answered "{text}"'
        found[spoken.rule] = {
            "rule": spoken.rule,
            "sentence": spoken.sentence + quoted,
            "link": spoken.link,
            "steps": steps,
            "filter": {"from": max(1, spoken.step - 10), "to": spoken.step, **_EXAMPLES.get(spoken.rule, {}), **about},
        }
    return list(found.values())


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Built:
    """A report that was written."""

    path: Path
    n_bytes: int
    n_episodes: int  # recorded
    n_shown: int  # in the page

    @property
    def url(self) -> str:
        return self.path.resolve().as_uri()


def build_report(
    folders: Sequence[Path], to: Path | None = None, *, live: str = "", most_episodes: int = MOST_EPISODES
) -> Built:
    """Read one or two output folders and write one page, into the first of them unless told otherwise.

    `live` is the state of the recordings that a served page is made for.
    """
    places = [run_folder(folder) for folder in folders]
    path = to or folders[0] / "report.html"
    with storage_errors(f"the report {path}", path.parent):
        names = " and ".join(folder.resolve().name for folder in folders)
        check_output(path, "the report", "--out", A_REPORT)
        page = PageWriter(path, f"{names} · toolgrpo report", live=live)
        try:
            n_episodes, n_shown = _write(page, folders, places, most_episodes)
        except BaseException:
            page.abandon()
            raise
    return Built(path, path.stat().st_size, n_episodes, n_shown)


def _write(page: PageWriter, folders: Sequence[Path], places: Sequence[Path], most_episodes: int) -> tuple[int, int]:
    """Write all runs; return how many episodes were recorded, and how many the page has."""
    names, runs = Names(), []
    for number, (folder, place) in enumerate(zip(folders, places, strict=True)):
        run = write_run(place, number, names, page, most_episodes=most_episodes)
        runs.append({"name": _run_name(folder, folders), **run})
    page.finish({"version": __version__, "runs": runs, "broken": list(PARSE_CAUSES), **asdict(names)})
    return sum(run["recorded"] for run in runs), sum(run["shown"] for run in runs)


def _run_name(folder: Path, folders: Sequence[Path]) -> str:
    """Return the folder's name, with the one it lies in where another run has the same."""
    path = folder.resolve()
    alike = sum(other.resolve().name == path.name for other in folders) > 1
    return str(Path(path.parent.name, path.name)) if alike else path.name
