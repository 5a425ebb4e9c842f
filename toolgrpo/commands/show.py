"""Show recorded episodes in the terminal (`toolgrpo show`).

    toolgrpo show DIR               the groups of the last step (--step N: of another)
    toolgrpo show DIR 17            episode 17 as a conversation (--tokens: as its tokens)
    toolgrpo show DIR --worst 3     those of the last step with the least reward; --best, --step N
    toolgrpo show DIR --cause timeout      those of any step that met this
    toolgrpo show DIR --successes --as_examples FILE.jsonl      conversations for `toolgrpo sft`

It reads the recording alone, needs no PyTorch, and may look while a run writes.
"""

from __future__ import annotations

import heapq
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from toolgrpo.commands.arguments import TOOL_SOURCES
from toolgrpo.commands.given import Given
from toolgrpo.commands.run_file import read_run, run_file
from toolgrpo.commands.table import ShowArguments
from toolgrpo.errors import ConfigError
from toolgrpo.observe.console import SteadyConsole
from toolgrpo.observe.episode_view import causes_of, conversation, episode_table, group_table, tokens
from toolgrpo.observe.line_file import json_line
from toolgrpo.observe.records import episode_files, iter_episodes, read_vocabulary, shown_step
from toolgrpo.sft.from_run import is_training, run_examples
from toolgrpo.support.plain_text import plain
from toolgrpo.support.storage import CONVERSATIONS, check_output, storage_errors

_WIDTH_OF_A_PIPE = 160
_SHOWN = 5  # episodes, where nobody says how many


def run_show(given: Given, console: Console | None = None) -> None:
    """Run the command, without handling errors."""
    (asked,) = given.made((ShowArguments,))
    if console is None:
        width = None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE  # which has none of its own
        console = SteadyConsole(highlight=False, width=width)
    folder = recording_in(Path(asked.folder))
    if asked.episode is not None:
        _show_one(find_episode(folder, asked.episode), folder, console, as_tokens=asked.tokens)
    elif asked.as_examples:
        _write_examples(folder, asked, console)
    elif asked.worst or asked.best or asked.cause or asked.successes:
        _show_chosen(folder, asked, console)
    else:
        _show_groups(folder, asked.step, console)


def recording_in(folder: Path) -> Path:
    """Return the folder that holds the recording: this one, or the one that an evaluation made in it."""
    for place in (folder, folder / "model"):
        if episode_files(place):
            return place
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the output folder of a run (the working folder is {Path.cwd()})"
        )
    raise ConfigError(
        f"{folder} holds no episodes.jsonl; give the output folder of a run that recorded its episodes "
        f"(record_episodes is on unless it was turned off)"
    )


def find_episode(folder: Path, number: int) -> dict[str, Any]:
    """Return the last record of this number."""
    found, last = None, -1
    for record in iter_episodes(folder):
        own = record.get("episode")
        if own == number:
            found = record
        if own is not None:
            last = max(last, own)
    if found is None:
        raise ConfigError(f"there is no episode {number} in {folder}; the last one is {last}")
    return found


def _show_one(record: dict[str, Any], folder: Path, console: Console, *, as_tokens: bool) -> None:
    console.print(tokens(record, read_vocabulary(folder)) if as_tokens else conversation(record))


def _show_chosen(folder: Path, asked: ShowArguments, console: Console) -> None:
    of_last = asked.step is None and asked.cause is None and not asked.successes
    n = asked.worst or asked.best or _SHOWN
    choose = heapq.nlargest if asked.best else heapq.nsmallest
    n_found = 0

    def reward(record: dict[str, Any]) -> float:
        nonlocal n_found
        n_found += 1
        given = record.get("reward_given")  # one that could not be scored is neither best nor worst
        return float(given) if given is not None else -math.inf if asked.best else math.inf

    matching = _matching(folder, asked.step, asked.cause, successes=asked.successes)
    chosen = choose(n, _of_last_step(folder) if of_last else matching, key=reward)
    if not chosen:
        wanted = [f"is of step {asked.step}"] if asked.step is not None else []
        wanted += ["succeeded"] if asked.successes else []
        wanted += [f"has the cause {asked.cause!r}"] if asked.cause else []
        causes = set().union(*(causes_of(record) for record in _matching(folder, asked.step)))
        there_is = ", ".join(sorted(causes)) or "none"
        raise ConfigError(f"no episode in {folder} {' and '.join(wanted)}; there is {there_is}")
    console.print(episode_table(chosen, of=n_found))
    if n_found > len(chosen):
        _say(
            console,
            f"those with the {'most' if asked.best else 'least'} reward; others: --worst {min(n_found, 4 * n)}, --best {n}, "
            f"--step N, or one by its number: toolgrpo show {shlex.quote(str(folder))} {chosen[0].get('episode')}\n",
        )
    for record in chosen:
        console.print()
        _show_one(record, folder, console, as_tokens=asked.tokens)


def _matching(
    folder: Path, step: int | None, cause: str | None = None, *, successes: bool = False
) -> Iterator[dict[str, Any]]:
    for record in iter_episodes(folder):
        wanted = step in (None, shown_step(record)) and (cause is None or cause in causes_of(record))
        if wanted and (record.get("success") or not successes):
            yield record


def _write_examples(folder: Path, asked: ShowArguments, console: Console) -> None:
    """Write each different conversation once; `toolgrpo sft --from_run` takes near ones once too."""
    path = Path(str(asked.as_examples))
    check_output(path, "the examples", "--as_examples", CONVERSATIONS)
    found = run_examples(_matching(folder, asked.step, asked.cause), near=False, of_training=is_training(folder))
    if not found.conversations:
        raise ConfigError(f"no episode in {folder} is an example: {found}")
    with storage_errors(f"the examples {path}", path.parent):
        lines = [json_line(_as_row(one["messages"], one["n_prompt"])) for one in found.conversations]
        path.write_text("".join(lines), encoding="utf-8")
    _say(console, f"{path}: {found}")
    rows = f"--dataset_id_or_path {shlex.quote(str(path))}"
    if any(one["offered"] is not None or one["hidden"] for one in found.conversations):
        _say(console, "some episodes had their own tools, which rows of messages cannot hold; --from_run uses them")
        rows = f"--from_run {shlex.quote(str(folder))}"
    known = read_run(run_file(folder) or run_file(folder.parent))
    calls = any(message.get("tool_calls") for one in found.conversations for message in one["messages"])
    tools = [f"--{name} {shlex.quote(str(known[name]))}" for name in TOOL_SOURCES if known.get(name)]
    words = f"{rows} --output_dir DIR {' '.join(tools) or ('--tools_script TOOLS.py' if calls else '')}"
    _say(console, f"next: toolgrpo sft --model MODEL {words}")


def _as_row(said: list[Any], n: int) -> dict[str, Any]:
    """Return a conversation as a row of `toolgrpo sft`; what an assistant says in its prompt, its first `n`, is not learnt."""
    shown = any(message["role"] == "assistant" for message in said[:n])
    return {"completion": said[n:], "prompt": said[:n]} if shown else {"messages": said}


def _of_last_step(folder: Path) -> list[dict[str, Any]]:
    """Return the episodes of the last step; each process has recorded its own from the first step on."""
    last: list[dict[str, Any]] = []
    for record in iter_episodes(folder):
        if last and shown_step(last[0]) < shown_step(record):
            last = []
        if not last or shown_step(last[0]) == shown_step(record):
            last.append(record)
    return last


def _show_groups(folder: Path, step: int | None, console: Console) -> None:
    shown = _of_last_step(folder) if step is None else list(_matching(folder, step))
    steps = {shown_step(record) for record in iter_episodes(folder)}
    if not steps:
        raise ConfigError(f"no line of the recording in {folder} is a whole episode: it is damaged, or has just begun")
    if not shown:
        raise ConfigError(f"no episode in {folder} is of step {step}; there are steps {min(steps)} to {max(steps)}")
    trained = [record for record in shown if record.get("mode") == "train"]
    shown = trained or shown  # or those of the evaluation after it
    console.print(group_table(shown))
    example = f"toolgrpo show {shlex.quote(str(folder))} {shown[0].get('episode')}"
    there_are = f"steps {min(steps)} to {max(steps)}; " if max(steps) else ""  # an evaluation has none
    _say(console, f"{there_are}one episode: {example}")


def _say(console: Console, text: str) -> None:
    console.print(plain(text), markup=False)


def show(given: Given) -> int:
    """Run the command; a file that cannot be read is one sentence."""
    try:
        run_show(given)
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"{error.filename} cannot be read" if error.filename else "what is shown cannot be written"
        print(plain(f"{what}: {error.strerror or error}"), file=sys.stderr)
        return 1
    return 0
