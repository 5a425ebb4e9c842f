"""A damaged or hostile line costs itself: no reader raises, nothing in it steers a terminal, and a sentence names it.

Every field of every kind of line is replaced by every odd value, removed and renamed, and every object
gets a field more. Each command then reads all of these lines, through the one schema.
"""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.recorded_run import record_run
from toolgrpo.commands.main import main, read
from toolgrpo.commands.replay import run_replay
from toolgrpo.commands.show import run_show
from toolgrpo.commands.terminal import Terminal
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.observe.episode_view import causes_of, conversation, episode_table, group_table, tokens
from toolgrpo.observe.line_file import LONGEST
from toolgrpo.observe.records import iter_steps, iter_tokens, read_episodes, read_vocabulary
from toolgrpo.report.build import build_report
from toolgrpo.report.live import LiveReport
from toolgrpo.sft.encoder import read_conversations

STEERING = "\x1b[2J\x1b]0;owned\x07[/red]\u202e\x9b"
TOO_LARGE = "a number that no float holds"
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 3.5, 10**9, "1", -(10**400), float("nan"), float("inf"), TOO_LARGE, STEERING, "\ud800"),
    *([], {}, [STEERING], {STEERING: [{}]}, "of no enumeration"),
)
READERS: dict[str, Callable[[Path], Any]] = {
    **{"episodes.jsonl": read_episodes, "tokens.jsonl": iter_tokens},
    **{"vocabulary.jsonl": read_vocabulary, "steps.jsonl": iter_steps},
}
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
        for value in (*VALUES, "removed", "renamed", "one more"):
            odd = holder = json.loads(text)
            for key in path[:-1]:
                holder = holder[key]
            if value in ("removed", "renamed") and isinstance(value, str):
                old = holder.pop(path[-1])
                if value == "renamed" and isinstance(holder, dict):
                    holder[STEERING] = old
            elif value == "one more" and isinstance(holder, dict):
                holder["no_such_field"] = 1
            else:
                holder[path[-1]] = value
            yield json.dumps(odd).replace(json.dumps(TOO_LARGE), "1e999")


def longest_of_each_kind(file: Path) -> list[str]:
    lines = sorted(file.read_text().splitlines(), key=len)
    return list({json.loads(line).get("kind"): line for line in lines}.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("run"), steps=1)


@pytest.fixture(scope="module")
def broken(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, with every damaged form of a line of each kind before the good ones."""
    folder: Path = tmp_path_factory.mktemp("broken") / "[/red]"
    folder.mkdir(parents=True)
    for file in (*READERS, "heldout.jsonl"):
        good = (run / file).read_text().splitlines()
        bad = [odd for line in longest_of_each_kind(run / file) for odd in damaged(line) if file in READERS]
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
    assert built.n_episodes == sum(len(read_episodes(broken / f"{which}.jsonl")) for which in ("episodes", "heldout"))
    for which in ("episodes", "heldout"):
        good = read_episodes(run / f"{which}.jsonl")
        assert read_episodes(broken / f"{which}.jsonl")[-len(good) :] == good
    assert list(iter_steps(broken))[-1] == list(iter_steps(run))[-1]


@pytest.mark.parametrize("file", READERS)
def test_a_line_is_taken_whole_or_named_with_its_field(
    run: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is taken differs from a good line in what may be anything, or by a value that another line could have."""
    n_taken = n_named = 0
    for text in longest_of_each_kind(run / file):
        for odd in damaged(text):
            caplog.clear()
            folder = tmp_path / str(n_taken + n_named)  # of a file a thing is said once
            folder.mkdir()
            (folder / file).write_text(f"{odd}\n")
            if list(READERS[file](folder)):
                n_taken += 1
                assert not caplog.messages, odd
                continue
            n_named += 1
            (said,) = caplog.messages
            assert said.startswith(f"{folder / file}, line 1: ") and said.endswith("; this line is left out"), said
            assert is_tame(said) and len(said) < 600, said
            assert any(name in said for name in names_in(text)) or " is no field of it" in said, said
    assert n_named > 20 and n_taken > 3


def names_in(text: str) -> set[str]:
    return {key for path in places(json.loads(text)) for key in path if isinstance(key, str)}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("mode",), "dream", "mode should be 'train', 'eval' or 'heldout', got 'dream'"),
        (("schema",), 3, "schema should be 2, got 3"),
        (("turns", 0, "attempts", 0, "status"), "fine", "turns[0].attempts[0].status should be 'ok'"),
        (("turns", 0, "results", 0, "zzz"), 1, "turns[0].results[0]: 'zzz' is no field of it"),
        (("turns", 0, "end"), 10**6, "turns[0] goes from token 0 to 1000000"),
        (("turns", 0, "weights"), [1, 2, 3], "turns[0].weights"),
        (("segment_starts",), [{"start": 10**6, "n_prompt": 1, "parent": 0}], "segment_starts: "),
        (("segment_starts",), [{"start": 0, "n_prompt": 1, "parent": 9}], "segment_starts: "),
        (("mask",), [1], "mask has 1 entries for"),
        (("row",), {"n": float("nan")}, "row: a number in it is too large, or none"),
        (("logprobs", 0), float("-inf"), "logprobs[0] should be"),
        (("reward_given",), float("nan"), "reward_given should be"),
        (("ids", 0), -1, "ids[0] should be greater than or equal to 0, got -1"),
    ],
)
def test_every_reader_says_what_is_wrong(
    run: Path, tmp_path: Path, path: tuple[Any, ...], value: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One odd line among good ones: each command leaves that out, with the same words, and does its work."""
    solved, *_ = (run / "episodes.jsonl").read_text().splitlines()
    odd = holder = json.loads(solved)
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    said = f"/episodes.jsonl, line 2: {says}"
    for number, command in enumerate(COMMANDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "episodes.jsonl").write_text(f"{solved}\n{json.dumps({**odd, 'episode': 1})}\n")
        (folder / "run.yaml").write_text("reward: [accuracy]\n")
        caplog.clear()
        command(folder)
        assert [said in one and "this line is left out" in one for one in caplog.messages] == [True], command


def test_turns_that_say_where_weights_changed_still_read(run: Path, tmp_path: Path) -> None:
    """As recordings had them before."""
    record = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    record["turns"][0] |= {"weights": [0, 1], "taken_over": [[1, 1]]}
    (tmp_path / "episodes.jsonl").write_text(f"{json.dumps(record)}\n")
    (found,) = read_episodes(tmp_path)
    assert Trajectory.from_record(found).turns[0].weights == (0, 1)


def shown(folder: Path, *words: str) -> str:
    text = io.StringIO()
    run_show(read("show", [str(folder), *words]), Console(file=text, width=300, force_terminal=False))
    return text.getvalue()


def examples(folder: Path) -> None:
    shown(folder, "--successes", "--as_examples", str(folder / "rows.jsonl"))
    assert len(read_conversations(folder / "rows.jsonl")) == 1


def replayed(folder: Path, *words: str) -> str:
    text = io.StringIO()
    run_replay(read("replay", [str(folder), *words]), Terminal(None, text, quiet=False))
    return text.getvalue()


def replay_all(folder: Path) -> None:
    assert "this line is left out" in replayed(folder, "--all"), "it is said on the terminal, not in the log alone"


def report(folder: Path) -> None:
    assert build_report([folder]).n_episodes == 1


def live_page(folder: Path) -> None:
    page = LiveReport([folder])
    assert b"</html>" in page.page()
    page.close()


def no_such_episode(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no episode 1 in"):
        replayed(folder, "1")


COMMANDS: tuple[Callable[[Path], Any], ...] = (
    *(shown, lambda folder: shown(folder, "0", "--tokens"), lambda folder: shown(folder, "--cause", "finished")),
    *(examples, report, live_page, no_such_episode),
    *(lambda folder: replayed(folder, "0"), replay_all),
)


def test_every_damaged_episode_is_left_out_or_shown_as_text(broken: Path) -> None:
    n_lines = len((broken / "episodes.jsonl").read_text(errors="replace").splitlines())
    records = read_episodes(broken)
    assert 0.05 * n_lines < len(records) < 0.5 * n_lines, "some are damaged, and some harmless"
    assert is_tame(printed(group_table(records), episode_table(records, of=len(records))))
    for record in records:
        causes_of(record)
        Trajectory.from_record(record)
        assert is_tame(printed(conversation(record)))
    others = {json.dumps([one[name] for name in ("prompt_ids", "ids", "mask", "logprobs")]): one for one in records}
    for record in others.values():
        assert is_tame(printed(tokens(record, {})))
    vocabulary = read_vocabulary(broken)
    assert is_tame(printed(tokens({**records[-1], "prompt_ids": [*vocabulary]}, vocabulary)))
    (broken / "run.yaml").write_text("reward: [accuracy]\n")
    assert f"of {len(records)} episodes get another reward" in replayed(broken, "--all")


def test_a_line_without_end_is_not_read_to_its_end(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A gzipped part that unpacks to more than a line may have, and a sparse file of a terabyte."""
    good = (run / "episodes.jsonl").read_text()
    with gzip.open(tmp_path / "episodes.jsonl.0001.gz", "wb", 1) as packed:
        packed.write(good.encode() + bytes(LONGEST + 1))
    (tmp_path / "episodes.jsonl").write_text(good)
    with (tmp_path / "episodes.rank1.jsonl").open("wb") as sparse:
        sparse.truncate(1 << 40)
    tracemalloc.start()
    n = len(read_episodes(tmp_path))
    assert n == 2 * len(good.splitlines()) and tracemalloc.get_traced_memory()[1] < 4 * LONGEST
    tracemalloc.stop()
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        f"it has more than {LONGEST:,} bytes, and the file is not read further; this line is left out"
    ] * 2


@pytest.mark.parametrize("arguments", [(), ("0",), ("0", "--tokens"), ("--worst", "3"), ("--cause", "finished")])
def test_the_command_shows_a_damaged_recording(broken: Path, arguments: tuple[str, ...]) -> None:
    text = shown(broken, *arguments)
    assert text and is_tame(text)


def test_a_recording_without_one_whole_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "episodes.jsonl").write_text("\n".join(ODD_LINES) + "\n", errors="replace")
    (tmp_path / "episodes.jsonl.0001").mkdir()
    for arguments in ([], ["--worst"], ["7"]):
        assert main(["show", str(tmp_path), *arguments]) == 2
        assert capsys.readouterr().err.startswith("ConfigError: ")
    assert build_report([tmp_path]).n_episodes == 0
