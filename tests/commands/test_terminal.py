"""The terminal is tried in a process of its own, as a person would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
from toolgrpo.errors import ConfigError
from toolgrpo.commands.terminal import Terminal

terminal = Terminal.open(Path(sys.argv[1]) / "first.log")
print("a library prints")
print("a library warns", file=sys.stderr)
os.write(2, b"C++ code warns\\n")
terminal.say("our own line")
terminal.move_log(Path(sys.argv[1]) / "moved" / "train.log", append=sys.argv[2] == "resumed")
print("later")
what = sys.argv[2]
if what == "ours":
    raise ConfigError("max_turns must be at least 1, got 0")
if what == "interrupt":
    raise KeyboardInterrupt
if what == "crash":
    import ctypes
    ctypes.string_at(0)
"""


def run(folder: Path, what: str) -> tuple[subprocess.CompletedProcess[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), what], capture_output=True, text=True, timeout=240, check=False
    )
    return done, (folder / "moved" / "train.log").read_text()


def test_only_our_own_lines_are_shown(tmp_path: Path) -> None:
    done, log = run(tmp_path, "well")
    assert done.returncode == 0
    assert done.stdout == "our own line\n" and done.stderr == ""
    for line in ("a library prints", "a library warns", "C++ code warns", "our own line", "later"):
        assert line in log
    assert not (tmp_path / "first.log").exists()


def test_the_log_of_a_resumed_run_goes_on_after_what_is_in_it(tmp_path: Path) -> None:
    run(tmp_path, "well")
    (tmp_path / "moved" / "train.log").open("a").write("the end of the first run\n")
    _, log = run(tmp_path, "resumed")
    first, _, second = log.partition("the end of the first run\n")
    assert "our own line" in first and "our own line" in second
    _, log = run(tmp_path, "well")
    assert "the end of the first run" not in log


def test_an_error_of_ours_is_one_paragraph_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done, log = run(tmp_path, "ours")
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: max_turns must be at least 1, got 0\n")
    assert "raceback" not in done.stderr, "a user's mistake has nothing more to say"
    assert "Traceback" in log


def test_an_interrupt_is_one_word(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "interrupt")
    assert done.stderr == "interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_crash_of_the_interpreter_is_not_hidden(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "crash")
    assert done.returncode < 0 and "Segmentation fault" in done.stderr


COMMAND = """
import sys
from pathlib import Path
from toolgrpo.commands.terminal import Terminal

terminal = Terminal.of_command("train")
print(f"was {terminal.log_file}")
terminal.log_into(Path(sys.argv[1]))
print("a library prints")
"""


@pytest.mark.parametrize(("rank", "log"), [("0", "train.log"), ("3", "train.rank3.log")])
def test_a_command_logs_into_its_output_folder_and_leaves_nothing_elsewhere(
    tmp_path: Path, rank: str, log: str
) -> None:
    environment = {**os.environ, "RANK": rank, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ("toolgrpo: loading" in done.stdout) == (rank == "0")
    content = (tmp_path / "out" / log).read_text()
    assert "toolgrpo: loading" in content and "a library prints" in content
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("ends", "stays"),
    [("", False), ("raise ConfigError('typed wrong')", False), ("raise EngineError('gone')", True)],
)
def test_a_temporary_log_stays_only_where_an_error_names_it(tmp_path: Path, ends: str, stays: bool) -> None:
    script = (
        "from toolgrpo.commands.terminal import Terminal; from toolgrpo.errors import ConfigError, EngineError\n"
        f"Terminal.of_command('replay', loads=False); {ends}"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    logs = list(tmp_path.glob("*/replay.log"))
    assert [str(log) in done.stderr for log in logs] == [True] * stays and (stays or not [*tmp_path.iterdir()])


def command(folder: Path, *, rank: str = "0", then: str = "") -> subprocess.Popen[str]:
    """`COMMAND`, and then something else; in the output folder `folder / "out"`."""
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND + then, str(folder / "out")],
        env={**os.environ, "RANK": rank, "TMPDIR": str(folder / "tmp")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_second_command_in_the_same_folder_is_refused_and_leaves_the_log_of_the_first_alone(
    tmp_path: Path, rank: str
) -> None:
    first = command(tmp_path, rank=rank, then="terminal.stream.write('ready\\n')\nsys.stdin.read()")
    try:
        assert first.stdout is not None
        while (line := first.stdout.readline()) != "ready\n":
            assert line, "it never logged into the folder"
        (log,) = (tmp_path / "out").glob("*.log")
        before = log.read_text()
        second = command(tmp_path, rank=rank)
        _, said = second.communicate(timeout=200)
        assert second.returncode == 1 and f"process {first.pid} on " in said
        assert said.startswith("ConfigError: another run writes into") and "traceback" not in said
        assert log.read_text() == before
    finally:
        first.kill()
        first.communicate(timeout=60)
    third = command(tmp_path, rank=rank)
    third.communicate(timeout=200)
    assert third.returncode == 0, "after kill -9 of the first the folder is free at once"
