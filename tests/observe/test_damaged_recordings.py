"""A damaged or hostile line costs itself: no reader raises, nothing in it steers a terminal.

Every field of every kind of line is replaced by every odd value, removed and renamed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.recorded_run import record_run
from toolgrpo.commands.main import main
from toolgrpo.commands.show import run_show
from toolgrpo.observe.episode_view import causes_of, conversation, episode_table, group_table, tokens
from toolgrpo.observe.records import iter_steps, read_episodes, read_vocabulary
from toolgrpo.report.build import build_report

STEERING = "\x1b[2J\x1b]0;owned\x07[/red]\u202e\x9b"
FILES = ("episodes.jsonl", "heldout.jsonl", "tokens.jsonl", "vocabulary.jsonl", "steps.jsonl")
TOO_LARGE = "a number that no float holds"
VALUES: tuple[Any, ...] = (
    *(None, True, -(10**400), float("nan"), TOO_LARGE, STEERING, "\ud800"),
    *([], {}, [STEERING], {STEERING: [{}]}),
)
ODD_LINES = (
    *("", "null", "[]", "3", '"text"', "{", '{"ids"', '{"ids": 3}', "\x00\x01", "{}", '{"ids": []}', STEERING),
    *("[" * 100_000, '{"row":' * 100_000, '{"row": ' + "[" * 600 + "]" * 600 + "}", '{"ids": [' + "9" * 5000 + "]}"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value inside a line; of a list to its first element."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def damaged(text: str) -> Iterator[str]:
    """Yield a line in each way in which one of its values can be another, be missing, or have another name."""
    for path in places(json.loads(text)):
        for value in (*VALUES, "removed", "renamed"):
            odd = holder = json.loads(text)
            for key in path[:-1]:
                holder = holder[key]
            if value in ("removed", "renamed") and isinstance(value, str):
                old = holder.pop(path[-1])
                if value == "renamed" and isinstance(holder, dict):
                    holder[STEERING] = old
            else:
                holder[path[-1]] = value
            yield json.dumps(odd).replace(json.dumps(TOO_LARGE), "1e999")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("run"), steps=1)


@pytest.fixture(scope="module")
def broken(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, with every damaged form of a line of each kind before the good ones."""
    folder: Path = tmp_path_factory.mktemp("broken") / "[/red]"
    folder.mkdir(parents=True)
    for file in FILES:
        good = (run / file).read_text().splitlines()
        kinds = {json.loads(line).get("kind"): line for line in sorted(good, key=len)}  # the longest of each
        bad = [odd for line in kinds.values() for odd in damaged(line)] if file != "heldout.jsonl" else []
        lines = [*bad, *ODD_LINES, *good]
        (folder / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="replace")
    return folder


def printed(*things: Any) -> str:
    shown = io.StringIO()
    Console(file=shown, width=100, force_terminal=False).print(*things)
    return shown.getvalue()


def is_tame(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_the_report_of_a_damaged_run_has_what_is_whole(run: Path, broken: Path) -> None:
    built = build_report([broken])
    assert built.n_episodes == sum(len(read_episodes(broken / file)) for file in FILES[:2])
    for file in FILES[:2]:
        good = read_episodes(run / file)
        assert read_episodes(broken / file)[-len(good) :] == good
    assert list(iter_steps(broken))[-1] == list(iter_steps(run))[-1]


def test_every_damaged_episode_is_left_out_or_shown_as_text(broken: Path) -> None:
    n_lines = len((broken / "episodes.jsonl").read_text(errors="replace").splitlines())
    records = read_episodes(broken)
    assert 0.2 * n_lines < len(records) < 0.9 * n_lines, "some are damaged, and some harmless"
    assert is_tame(printed(group_table(records), episode_table(records, of=len(records))))
    for record in records:
        causes_of(record)
        assert is_tame(printed(conversation(record)))
    others = {json.dumps([one[name] for name in ("prompt_ids", "ids", "mask", "logprobs")]): one for one in records}
    for record in others.values():
        assert is_tame(printed(tokens(record, {})))


def test_a_damaged_vocabulary_names_tokens_as_text(broken: Path) -> None:
    vocabulary = read_vocabulary(broken)
    record = read_episodes(broken)[-1]
    assert is_tame(printed(tokens({**record, "prompt_ids": [*vocabulary]}, vocabulary)))


@pytest.mark.parametrize("arguments", [(), ("0",), ("0", "--tokens"), ("--worst", "3"), ("--cause", "finished")])
def test_the_command_shows_a_damaged_recording(broken: Path, arguments: tuple[str, ...]) -> None:
    shown = io.StringIO()
    run_show([str(broken), *arguments], Console(file=shown, width=300, force_terminal=False))
    assert shown.getvalue() and is_tame(shown.getvalue())


def test_a_recording_without_one_whole_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "episodes.jsonl").write_text("\n".join(ODD_LINES) + "\n", errors="replace")
    (tmp_path / "episodes.jsonl.0001").mkdir()
    for arguments in ([], ["--worst"], ["7"]):
        assert main(["show", str(tmp_path), *arguments]) == 2
        assert capsys.readouterr().err.startswith("ConfigError: ")
    assert build_report([tmp_path]).n_episodes == 0
