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

terminal = Terminal.open(Path(sys.argv[1]) / "first.log", main_process=sys.argv[2] != "other-rank")
print("a library prints")
print("a library warns", file=sys.stderr)
os.write(2, b"C++ code warns\\n")
terminal.say("our own line")
terminal.move_log(Path(sys.argv[1]) / "moved" / "train.log")
print("later")
what = sys.argv[2]
if what == "ours":
    raise ConfigError("max_turns must be at least 1, got 0")
if what == "bug":
    raise KeyError("nobody expected this")
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


def test_other_ranks_show_nothing(tmp_path: Path) -> None:
    done, log = run(tmp_path, "other-rank")
    assert done.stdout == "" and "our own line" in log


def test_an_error_of_ours_is_one_paragraph_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done, log = run(tmp_path, "ours")
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: max_turns must be at least 1, got 0\n")
    assert "Traceback" not in done.stderr and "train.log" in done.stderr
    assert "Traceback" in log


def test_a_bug_shows_its_whole_traceback(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "bug")
    assert "Traceback" in done.stderr and "nobody expected this" in done.stderr


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
