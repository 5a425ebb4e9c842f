"""Recorded episodes for a terminal: tables of groups and of episodes, one episode as a conversation
or as its tokens.

Pure functions of records (docs/reference/episodes.md) that give what rich prints. All text goes through
`_text`, `_short` or `_said`: whatever a recording holds is text and nothing else, without markup and
without escape sequences.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from toolgrpo.episode.tool_calls import RUNNABLE
from toolgrpo.observe.records import is_counted, results_of, shown_prompt, shown_step
from toolgrpo.support.plain_text import counted, listed_counts, plain

Record = Mapping[str, Any]
_SHORT = 60  # characters of a prompt in a table
_LONGEST = 4000  # characters of one message


def causes_of(record: Record) -> set[str]:
    """Return the causes by which an episode can be found: its stop reason, its drop and the errors of its calls."""
    found = {record["stop_reason"]}
    if drop := record.get("drop"):
        found |= {"dropped", drop["cause"]}
    for turn in record["turns"]:
        found.update(attempt["status"] for attempt in turn["attempts"])
        found.update(result["error"] for result in turn["results"] if result["error"])
    return found - {"ok"}


def group_table(records: Sequence[Record]) -> Table:
    """Return the groups of one step, the best last."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record.get("group"), []).append(record)
    table = _table(f"{_place(records[0])}: {counted(len(groups), 'group')}, {counted(len(records), 'episode')}")
    for title in ("group", "episodes", "reward", "success", "turns", "calls", "failed", "ends", "prompt"):
        _add_column(table, title, to_the_left=title in ("ends", "prompt", "episodes"))
    for number, group in sorted(groups.items(), key=lambda item: _mean_reward(item[1])):
        ends = Counter(record["stop_reason"] for record in group)
        _add_row(
            table,
            str(number),
            f"{group[0].get('episode')}-{group[-1].get('episode')}",
            _rewards(group),
            f"{sum(bool(record.get('success')) for record in group)}/{sum(record.get('success') is not None for record in group)}",
            f"{sum(len(record['turns']) for record in group) / len(group):.1f}",
            str(sum(len(results_of(record)) for record in group)),
            str(sum(failed(record) for record in group)),
            listed_counts(ends),
            question(group[0]),
        )
    return table


def episode_table(records: Sequence[Record], *, of: int) -> Table:
    """Return a table with a line per episode; `of` is the number of all episodes."""
    shown = str(len(records)) if of == len(records) else f"{len(records)} of {of}"
    table = _table(f"{shown} episode{'' if of == 1 else 's'}")
    for title in ("episode", "step", "reward", "success", "turns", "calls", "failed", "end", "prompt"):
        _add_column(table, title, to_the_left=title in ("end", "prompt"))
    for record in records:
        _add_row(
            table,
            str(record.get("episode")),
            str(shown_step(record)),
            _reward(record),
            {True: "yes", False: "no"}.get(record.get("success"), "?"),  # type: ignore[arg-type]
            str(len(record["turns"])),
            str(len(results_of(record))),
            str(failed(record)),
            record["stop_reason"],
            question(record),
        )
    return table


def conversation(record: Record) -> Group:
    """Return an episode as a readable conversation, with its rewards at the end."""
    return Group(*conversation_lines(record))


def conversation_lines(record: Record) -> list[Text]:
    lines = [_headline(record), Text()]
    for message in shown_prompt(record):
        lines.append(_said(str(message.get("role")), message.get("content"), "cyan"))
    end = 0
    for number, turn in enumerate(record["turns"], start=1):
        lines += _begun(record, end, turn["start"])
        end = turn["end"]
        lines.append(_text(f"turn {number}, {turn.get('duration_s') or 0.0:.2f} s", "dim"))
        if turn.get("reasoning"):
            lines.append(_said("thinks", turn["reasoning"], "dim"))
        if turn.get("content"):
            lines.append(_said("says", turn["content"], "green"))
        lines += _calls(turn)
        if not turn.get("closed", True):
            lines.append(Text("  cut here by a limit", style="red"))
        if turn.get("user") is not None:
            lines.append(_said("user", turn["user"], "cyan"))
    return [*lines, Text(), _worth(record)]


def tokens(record: Record, vocabulary: Mapping[int, Mapping[str, Any]]) -> Group:
    """Return the tokens of an episode: sampled ones coloured by probability, the others dim."""
    if is_counted(record):
        return Group(
            _headline(record), Text("a chat endpoint played it, which counts tokens and does not show them"), Text()
        )
    prompt, text = Text(style="dim"), Text()
    for number in record["prompt_ids"]:
        prompt.append(_token(number, vocabulary))
    for place, (number, mask, logprob) in enumerate(
        zip(record["ids"], record["mask"], record["logprobs"], strict=True)
    ):
        for line in _begun(record, place, place + 1):
            text.append("\n").append(line).append("\n")
        text.append(_token(number, vocabulary), style=_colour(logprob) if mask else "dim")
    key = Text("probability of a sampled token: ")
    for said, logprob in (("above 0.9", -0.05), ("above 0.5", -0.5), ("above 0.1", -2.0), ("below", -5.0)):
        key.append(f" {said} ", style=_colour(logprob))
        key.append(" ")
    key.append("not sampled", style="dim")
    return Group(_headline(record), key, Text(), prompt, text, Text())


def _begun(record: Record, start: int, end: int) -> list[Text]:
    """Return a line for each segment that begins in this range of tokens."""
    return [
        _text(f"segment {number} begins, with a history of {one['n_prompt']} tokens", "bold cyan")
        for number, one in enumerate(record.get("segment_starts") or (), start=2)
        if start <= one["start"] < end
    ]


def _place(record: Record) -> str:
    step = f"step {shown_step(record)}"
    if record.get("mode") != "eval":
        return step
    return f"evaluation after {step}" if record["step"] else "evaluation"


def _headline(record: Record) -> Text:
    success = {True: "success", False: "no success"}.get(record.get("success"), "")  # type: ignore[arg-type]
    parts = [
        f"episode {record.get('episode')}",
        _place(record),
        f"group {record.get('group')}",
        f"reward {_reward(record)}",
        success,
        f"ended: {record['stop_reason']}",
    ]
    return _text(", ".join(part for part in parts if part), "bold")


def _calls(turn: Record) -> Iterable[Text]:
    for attempt, result in zip_longest(turn["attempts"], turn["results"][: len(turn["attempts"])]):
        status = attempt["status"]
        label = "calls" if status == "ok" else f"calls, {status}"
        yield _said(label, call_text(attempt), "yellow" if status in RUNNABLE else "red")
        if result is None:
            yield Text("  not answered", style="red")
            continue
        failed_by = "" if result["error"] is None else f", {result['error']}"
        style = "red" if failed_by else "magenta"
        yield _said(f"result, {result['duration_s']:.2f} s{failed_by}", result["content"], style)
        if result.get("left_out"):
            yield _text(f"  {result['left_out']} characters were left out", "red")


def call_text(attempt: Record) -> str:
    """Return a call as Python writes it, or as the model wrote it where it cannot be read."""
    if attempt.get("name") is None or attempt.get("arguments") is None:
        return str(attempt.get("raw"))
    return f"{attempt['name']}({', '.join(f'{name}={_json(value)}' for name, value in attempt['arguments'].items())})"


def _worth(record: Record) -> Text:
    text = Text()
    for name, value in (record.get("rewards") or {}).items():
        text.append(f"{plain(name)} {number_text(value)}  ", style="bold")
    text.append(f"together {_reward(record)}", style="bold")
    if record.get("advantage") is not None:
        text.append(f", advantage {record['advantage']:.3g}")
    if record.get("turn_advantages"):
        by_turn = ("none" if value is None else format(value, "+.3g") for value in record["turn_advantages"])
        text.append(f" (by turn {', '.join(by_turn)})")
    if drop := record.get("drop"):
        text.append(f"\ndropped ({plain(drop['cause'])}): {_cut(plain(drop['reason']))}", style="red")
    if record.get("failure"):
        text.append(f"\n{plain(record['failure'])}", style="red")
    row = {name: value for name, value in (record.get("row") or {}).items() if value is not None}
    if row:
        text.append(f"\nrow: {_cut(plain(_json(row)))}", style="dim")
    return text


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style)


def _said(who: str, what: Any, style: str) -> Text:
    text = what if isinstance(what, str) else "" if what is None else _json(what)
    body = _cut(plain(text)).replace("\n", "\n  ")
    return Text(f"{plain(who)}: ", style=f"bold {style}").append(body, style="not bold")


def _token(number: int, vocabulary: Mapping[int, Mapping[str, Any]]) -> str:
    known = vocabulary.get(number)
    if known is None:
        return f"[{number}]"
    text = str(known.get("text", ""))
    if known.get("bytes"):
        return f"<{plain(known['bytes'])}>"
    return plain(text).replace("\t", "\\t").replace("\n", "\\n\n")


def _colour(logprob: float | None) -> str:
    if logprob is None:
        return "bold"
    if logprob > -0.105:
        return "black on green"
    if logprob > -0.693:
        return "black on bright_green"
    return "black on yellow" if logprob > -2.303 else "white on red"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)


def _add_column(table: Table, title: str, *, to_the_left: bool) -> None:
    """Add a column; that of prompts takes the width that the others leave."""
    side: Literal["left", "right"] = "left" if to_the_left else "right"
    table.add_column(title, justify=side, no_wrap=True, ratio=1 if title == "prompt" else None)


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(_short, cells))


def failed(record: Record) -> int:
    return sum(result["error"] is not None for result in results_of(record))


def number_text(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _reward(record: Record) -> str:
    return number_text(record.get("reward_given"))


def _given(group: Sequence[Record]) -> list[float]:
    """Return the rewards of those episodes that could be scored."""
    return [record["reward_given"] for record in group if record.get("reward_given") is not None]


def _mean_reward(group: Sequence[Record]) -> float:
    rewards = _given(group)
    return fmean(rewards) if rewards else -math.inf


def _rewards(group: Sequence[Record]) -> str:
    rewards = _given(group)
    if not rewards:
        return "none"
    low, high = min(rewards), max(rewards)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def question(record: Record) -> str:
    prompt = record.get("prompt") or []
    content = prompt[-1].get("content") if prompt else ""
    return content if isinstance(content, str) else _json(content)


def _short(text: str) -> Text:
    line = " ".join(plain(text).split())
    return Text(line if len(line) <= _SHORT else f"{line[: _SHORT - 4]} ...")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text) - _LONGEST} more characters)"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
