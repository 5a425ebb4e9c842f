"""Whatever happens to the log, the terminal or standard output, a run goes on, and a person is told what ended it.

Each case is a process of its own on a terminal of its own, because what breaks here are descriptors.
"""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HEAD = """
import os, sys
from pathlib import Path
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.commands.terminal import Terminal

folder = Path(sys.argv[1])
terminal = Terminal.open(folder / (sys.argv[2:] or ["train.log"])[0])
"""


class Shown(NamedTuple):
    code: int
    terminal: str


def on_a_terminal(script: str, folder: Path, prepare: Callable[[], Any] | None = None, log: str = "train.log") -> Shown:
    """Run the script on a pseudo-terminal; what stood on it at the end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + script, str(folder), log], stdout=theirs, stderr=theirs, preexec_fn=prepare
    )
    os.close(theirs)
    watchdog = threading.Timer(200, process.kill)
    watchdog.start()
    shown = b""
    try:
        while part := read(ours):
            shown += part
    finally:
        code = process.wait()
        watchdog.cancel()
        os.close(ours)
    return Shown(code, shown.decode().replace("\r\n", "\n"))


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # nobody has the other end open any more
        return b""


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


TAKES_NOTHING: dict[str, tuple[Any, str]] = {"full": (None, "/dev/full"), "too large": (small_files, "train.log")}


PRINTS = """
for _ in range(1000):
    print("a library prints")
    print("a library warns", file=sys.stderr)
    sys.stdout.flush()
terminal.say("our own line")
"""


def test_what_libraries_print_while_something_is_loaded_is_in_the_log_alone(tmp_path: Path) -> None:
    shown = on_a_terminal("with terminal.busy('loading'):\n    print('a bar', file=sys.stderr)\nprint('end')", tmp_path)
    assert "loading ..." in shown.terminal and "a bar" not in shown.terminal
    assert "a bar" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("what", TAKES_NOTHING)
def test_a_log_that_takes_nothing_more_ends_no_run(tmp_path: Path, what: str) -> None:
    shown = on_a_terminal(PRINTS, tmp_path, *TAKES_NOTHING[what])
    assert shown == Shown(0, "our own line\n")


@pytest.mark.parametrize("what", TAKES_NOTHING)
def test_an_error_is_on_the_terminal_although_the_log_does_not_take_it(tmp_path: Path, what: str) -> None:
    shown = on_a_terminal(PRINTS + "raise KeyError('nobody expected this')", tmp_path, *TAKES_NOTHING[what])
    assert shown.code == 1 and "Traceback" in shown.terminal and "nobody expected this" in shown.terminal
    caused = "raise ConfigError('max_turns is 0') from KeyError('x')"
    shown = on_a_terminal(PRINTS + caused, tmp_path, *TAKES_NOTHING[what])
    assert shown.code == 1 and "ConfigError: max_turns is 0\n" in shown.terminal
    assert "the full traceback could not be written into" in shown.terminal


@pytest.mark.parametrize(
    "trick",
    [
        "sys.stdout = sys.stderr = None",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout.buffer.close(); sys.stdout.detach()",
        "sys.stdout = open(os.devnull, 'w'); sys.stdout.close(); sys.stderr = object()",
        "os.close(1); os.close(2)",
        "import io; sys.stdout = sys.stderr = io.StringIO()",
    ],
)
def test_a_plugin_that_closes_or_replaces_standard_output(tmp_path: Path, trick: str) -> None:
    script = f"{trick}\nterminal.say('still here')\nraise RewardError('reward f raised') from KeyError('x')"
    shown = on_a_terminal(script, tmp_path)
    assert shown.code == 1 and shown.terminal.startswith(
        "still here\nRewardError: reward f raised\n(the full traceback"
    )
    log = (tmp_path / "train.log").read_text()
    assert "still here" in log and "Traceback" in log


def test_what_is_printed_never_lands_in_a_file_that_got_the_number_of_standard_output(tmp_path: Path) -> None:
    script = """
os.close(1)
with (folder / "weights").open("wb") as file:
    assert file.fileno() == 1
    print("a library prints")
    terminal.move_log(folder / "moved.log")
    print("and again")
    file.write(b"weights")
"""
    assert on_a_terminal(script, tmp_path).code == 0
    assert (tmp_path / "weights").read_bytes() == b"weights"
    assert (tmp_path / "moved.log").read_text() == "a library prints\nand again\n"


BARS = """
from toolgrpo.observe.progress import RunProgress
progress = RunProgress(terminal.console, say=terminal.say)
progress.start_steps(3)
print("a library prints")
progress.say("above the bars")
sys.stdout = None
progress.show_step(1, {"reward": 0.5})
progress.stop_steps()
"""


def test_the_bars_show_nothing_of_libraries_and_need_no_standard_output(tmp_path: Path) -> None:
    shown = on_a_terminal(BARS, tmp_path)
    assert shown.code == 0 and "above the bars" in shown.terminal and " 1/3   0.50" in shown.terminal
    assert "a library prints" not in shown.terminal
    assert (tmp_path / "train.log").read_text().startswith("a library prints\nabove the bars\nstep reward ")


HOSTILE = r"\x1b]0;owned\x07\x1b[2J\x9b2J \u202e \ud800"


@pytest.mark.parametrize("kind", ["RewardError", "KeyError"])
def test_what_others_write_into_an_error_steers_no_terminal(tmp_path: Path, kind: str) -> None:
    shown = on_a_terminal(f"terminal.say('{HOSTILE}')\nraise {kind}('{HOSTILE}')", tmp_path)
    log = (tmp_path / "train.log").read_text()
    for text in (shown.terminal, log):
        assert not set("\x1b\x07\x9b\u202e\r") & set(text) and "owned" in text
        assert "\\x1b[2J" in text


@pytest.mark.parametrize("where", ["pipe", "terminal"])
def test_a_terminal_that_went_away_ends_no_run(tmp_path: Path, where: str) -> None:
    ours, theirs = os.pipe() if where == "pipe" else pty.openpty()
    script = (
        "sys.stdin.read()\nterminal.say('nobody sees it')\nterminal.console.print('nor this')\n(folder / 'end').touch()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + script, str(tmp_path)], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.close(ours)
    process.communicate(b"", timeout=200)
    assert process.returncode == 0 and (tmp_path / "end").exists()
    assert (tmp_path / "train.log").read_text() == "nobody sees it\n"


def test_a_run_that_is_started_without_standard_output_has_its_log(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', sys.executable, "-c", HEAD + PRINTS, str(tmp_path)],
        timeout=200,
        check=False,
    )
    assert done.returncode == 0
    log = (tmp_path / "train.log").read_text()
    assert log.count("a library prints\n") == log.count("a library warns\n") == 1000 and "our own line" in log


def test_a_log_has_a_limit_and_keeps_its_end(tmp_path: Path) -> None:
    """C++ libraries and a plugin write 3 MB each; the limit is 100 kB, and a look is taken every 10 ms."""
    script = """
import time
from toolgrpo.commands import terminal as run_log
run_log._LIMIT_BYTES, run_log._LOOK_EVERY_S = 100_000, 0.01
from toolgrpo.commands.terminal import RunLog
log = RunLog(folder / "bounded.log", limit_bytes=100_000)
log.take_standard_output()
for number in range(300):
    os.write(2, b"c" * 10_000 + b"\\n")
    print("p" * 10_000)
    time.sleep(0.002)
print("the end")
log.keep_within_limit()
"""
    assert on_a_terminal(script, tmp_path).code == 0
    log, aside = tmp_path / "bounded.log", tmp_path / "bounded.log.1"
    assert log.read_text().endswith("the end\n") or aside.read_text().endswith("the end\n")
    assert log.stat().st_size + aside.stat().st_size < 2_500_000, "of 6 MB; both are about 100 kB where nothing is slow"
    assert "what was before is in bounded.log.1" in log.read_text()


WARNED = """
import logging
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.steps import StepLog
(folder / "reward.py").write_text("def f(n):\\n    for i in range(n): print('score', i)\\n")
sys.path.insert(0, str(folder))
import reward
progress = RunProgress(terminal.console, say=terminal.say)
log = StepLog(folder / "steps.jsonl", facts={}, say=progress.say, shows_warnings=progress.brings_own_log)
progress.start_steps(3)
logging.getLogger("toolgrpo.observe.trackers").warning("wandb is switched off")
reward.f(9)
print("a library prints")
progress.stop_steps()
log.close()
logging.getLogger("toolgrpo").warning("after it")
"""


@pytest.mark.parametrize("piped", [True, False], ids=["piped", "on a terminal with a live bar"])
def test_warnings_are_on_the_terminal_and_in_the_log_once_and_a_plugin_prints_in_few_lines(
    tmp_path: Path, piped: bool
) -> None:
    if piped:
        words = [sys.executable, "-c", HEAD + WARNED, str(tmp_path)]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=200, check=True).stdout
    else:
        shown = on_a_terminal(WARNED, tmp_path).terminal
    logged = (tmp_path / "train.log").read_text()
    for text in (shown, logged):
        assert text.count("wandb is switched off") == text.count("after it") == text.count("score 4") == 1
    assert "score 5" not in shown and shown.count(f"print from here on is in {tmp_path / 'train.log'}") == 1
    assert "score 8" in logged and "a library prints" not in shown
