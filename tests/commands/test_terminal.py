"""Only our lines stand on the terminal; whatever happens to it, to the log or standard output, a run goes on, and a person
is told what ended it.

Each case is a process of its own, most on a terminal of their own, because what breaks here are descriptors.
"""

from __future__ import annotations

import io
import logging
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

from tests.support.held_folder import Holder
from toolgrpo.observe.console import FewLines, SteadyConsole, show_tool_output
from toolgrpo.tools.workers.output_log import OutputLog

HEAD = """
import os, sys
from pathlib import Path
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.commands.terminal import Terminal

folder = Path(sys.argv[1])
terminal = Terminal.open(folder / (sys.argv[2:] or ["train.log"])[0])
"""
MOVES = """
print("a library prints")
print("a library warns", file=sys.stderr)
os.write(2, b"C++ code warns\\n")
terminal.say("our own line")
terminal.move_log(folder / "moved" / "train.log", append={append})
print("later")
"""


def python(script: str, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", script, *map(str, words)], {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def run(folder: Path, ends: str = "", append: bool = False) -> tuple[subprocess.CompletedProcess[str], str]:
    return python(HEAD + MOVES.format(append=append) + ends, folder), (folder / "moved" / "train.log").read_text()


def test_only_our_own_lines_are_shown_and_a_resumed_run_logs_after_what_is_there(tmp_path: Path) -> None:
    done, log = run(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "our own line\n", "")
    for line in ("a library prints", "a library warns", "C++ code warns", "our own line", "later"):
        assert line in log
    assert not (tmp_path / "train.log").exists()
    (tmp_path / "moved" / "train.log").open("a").write("the end of the first run\n")
    _, log = run(tmp_path, append=True)
    first, _, second = log.partition("the end of the first run\n")
    assert "our own line" in first and "our own line" in second
    _, log = run(tmp_path)
    assert "the end of the first run" not in log


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("raise ConfigError('max_turns is 0')", 1, "ConfigError: max_turns is 0"),  # a user's mistake: nothing more
        ("raise KeyboardInterrupt", -2, "interrupted"),
        ("import ctypes; ctypes.string_at(0)", -11, "Fatal Python error: Segmentation fault"),
    ],
)
def test_what_ends_a_run_is_one_paragraph(tmp_path: Path, ends: str, code: int, said: str) -> None:
    """Its traceback is in the log."""
    done, log = run(tmp_path, ends)
    assert (done.returncode, done.stderr.partition("\n\n")[0].rstrip()) == (code, said)
    assert "Traceback" in log or code == -11


COMMAND = """
import sys
from pathlib import Path
from toolgrpo.commands.terminal import Terminal

terminal = Terminal.of_command("train")
print(f"was {terminal.log_file}")
terminal.log_into(Path(sys.argv[1]))
print("a library prints")
"""


HELD = """
import os, subprocess
claim = "import sys; from pathlib import Path; from toolgrpo.support.run_lock import claim_folder; "
claim += "claim_folder(Path(sys.argv[1]), int(sys.argv[2]), patience_s=0.0)"
second = subprocess.run([sys.executable, "-c", claim, sys.argv[1], os.environ["RANK"]], stderr=subprocess.PIPE)
assert b"another run writes into" in second.stderr, "the folder is kept while the command runs"
"""


@pytest.mark.parametrize(("rank", "log"), [("0", "train.log"), ("3", "train.rank3.log")])
def test_a_command_logs_into_its_folder_alone_unless_another_run_has_it(tmp_path: Path, rank: str, log: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "tmp"
    elsewhere.mkdir()
    with Holder(out, int(rank)) as first:
        (out / log).write_text("of the first\n")
        refused = python(COMMAND, out, RANK=rank)
        assert refused.returncode == 1 and f"process {first.pid} on " in refused.stderr
        assert refused.stderr.startswith("ConfigError: ") and "traceback" not in refused.stderr
        assert (out / log).read_text() == "of the first\n"
        (out / log).unlink()
    done = python(COMMAND + HELD, out, RANK=rank, TMPDIR=str(elsewhere))
    assert done.returncode == 0, "after kill -9 of the first the folder is free at once"
    assert ("toolgrpo: loading" in done.stdout) == (rank == "0")
    content = (out / log).read_text()
    assert "toolgrpo: loading" in content and "a library prints" in content
    assert list(elsewhere.iterdir()) == []


def test_what_is_shown_may_go_into_the_file_of_the_log(tmp_path: Path) -> None:
    """`toolgrpo train --output_dir X > X/train.log`: neither writes over the other, and a line says where the log is."""
    log, elsewhere = tmp_path / "train.log", tmp_path / "tmp"
    elsewhere.mkdir()
    with log.open("w") as shown:
        command = [sys.executable, "-c", COMMAND, str(tmp_path)]
        subprocess.run(command, env={**os.environ, "TMPDIR": str(elsewhere)}, stdout=shown, check=True)
    (stays,) = elsewhere.rglob("train.log")
    first, second = log.read_text().splitlines()
    assert first.startswith("toolgrpo: loading") and str(stays) in second
    assert "a library prints" in stays.read_text()


@pytest.mark.parametrize(
    ("ends", "stays"),
    [("", False), ("raise ConfigError('typed wrong')", False), ("raise EngineError('gone')", True)],
)
def test_a_temporary_log_stays_only_where_an_error_names_it(tmp_path: Path, ends: str, stays: bool) -> None:
    script = (
        "from toolgrpo.commands.terminal import Terminal; from toolgrpo.errors import ConfigError, EngineError\n"
        f"Terminal.of_command('replay', loads=False); {ends}"
    )
    said, logs = python(script, TMPDIR=str(tmp_path)).stderr, list(tmp_path.glob("*/replay.log"))
    assert [str(log) in said for log in logs] == [True] * stays and (stays or not [*tmp_path.iterdir()])


def test_the_first_lines_that_tools_print_are_shown_and_tracebacks_of_calls_are_not(tmp_path: Path) -> None:
    said: list[str] = []
    logger = logging.getLogger("toolgrpo.tools.output")
    show_tool_output(said.append)
    try:
        log = OutputLog(tmp_path / "tools.log")
        log.record(b"Traceback (most recent call last):\n  File x\nValueError: no\n")
        for number in (0, 0, *range(9)):  # as each of three workers prints what an import does
            log.record(f"line {number} \x1b[2J\n".encode())
        log.close()
    finally:
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    assert said[:5] == [f"line {n} \\x1b[2J" for n in range(5)] and len(said) == 6
    assert str(tmp_path / "tools.log") in said[5]
    logged = (tmp_path / "tools.log").read_text()
    assert "ValueError: no" in logged and "line 8" in logged


def test_a_long_line_does_not_silence_those_behind_it() -> None:
    said: list[str] = []
    show = FewLines(said.append, lambda: "train.log")
    for text in ("x" * 2500, "\n", "second", "\n"):
        show(text)
    assert said == ["x" * 2000, "second"]


def test_a_pipe_of_a_jupyter_kernel_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sets FORCE_COLOR for what its cells start, and a bar would be written frame by frame."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = SteadyConsole(file=(shown := io.StringIO()))
    console.print("[red]no code")
    assert not console.is_terminal and shown.getvalue() == "no code\n"


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
def test_a_log_that_takes_nothing_more_ends_no_run_and_hides_no_error(tmp_path: Path, what: str) -> None:
    def shown(ends: str = "") -> Shown:
        return on_a_terminal(PRINTS + ends, tmp_path, *TAKES_NOTHING[what])

    assert shown() == Shown(0, "our own line\n")
    code, said = shown("raise KeyError('nobody expected this')")
    assert code == 1 and "Traceback" in said and "nobody expected this" in said
    code, said = shown("raise ConfigError('max_turns is 0') from KeyError('x')")
    assert code == 1 and "ConfigError: max_turns is 0\n" in said and "could not be written into" in said


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
    assert shown.code == 1 and shown.terminal.startswith("still here\nRewardError: reward f raised\n(")
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


HOSTILE = r"\x1b]0;owned\x07\x1b[2J\x9b2J \u202e \ud800"


@pytest.mark.parametrize("kind", ["RewardError", "KeyError"])
def test_what_others_write_into_an_error_steers_no_terminal(tmp_path: Path, kind: str) -> None:
    shown = on_a_terminal(f"terminal.say('{HOSTILE}')\nraise {kind}('{HOSTILE}')", tmp_path)
    log = (tmp_path / "train.log").read_text()
    for text in (shown.terminal, log):
        assert not set("\x1b\x07\x9b\u202e\r") & set(text) and "owned" in text and "\\x1b[2J" in text


@pytest.mark.parametrize("where", ["pipe", "terminal"])
def test_a_terminal_that_went_away_ends_no_run(tmp_path: Path, where: str) -> None:
    ours, theirs = os.pipe() if where == "pipe" else pty.openpty()
    script = "sys.stdin.read()\nterminal.say('nobody sees it')\nterminal.console.print('nor this')\n"
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + script + "(folder / 'end').touch()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.close(ours)
    process.communicate(b"", timeout=200)
    assert process.returncode == 0 and (tmp_path / "end").exists()
    assert (tmp_path / "train.log").read_text() == "nobody sees it\n"


def test_a_run_that_is_started_without_standard_output_has_its_log(tmp_path: Path) -> None:
    closed = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-']
    subprocess.run([*closed, sys.executable, "-c", HEAD + PRINTS, str(tmp_path)], timeout=200, check=True)
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
    assert "earlier output is in bounded.log.1" in log.read_text()


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
progress.say("above the bars")
sys.stdout = None
progress.show_step(1, {"reward": 0.5})
progress.stop_steps()
log.close()
logging.getLogger("toolgrpo").warning("after it")
"""


@pytest.mark.parametrize("piped", [True, False], ids=["piped", "on a terminal with a live bar"])
def test_each_line_of_a_run_is_shown_and_logged_once_and_a_plugin_prints_in_few(tmp_path: Path, piped: bool) -> None:
    """The table of steps needs no standard output."""
    if piped:
        done = python(HEAD + WARNED, tmp_path)
        code, shown = done.returncode, done.stdout
    else:
        seen = on_a_terminal(WARNED, tmp_path)
        code, shown = seen.code, seen.terminal
    assert code == 0
    logged = (tmp_path / "train.log").read_text()
    for text in (shown, logged):
        once = ("wandb is switched off", "above the bars", " 1/3   0.50", "score 4", "after it")
        assert [text.count(one) for one in once] == [1] * len(once), text
    assert "score 5" not in shown and shown.count(str(tmp_path / "train.log")) == 1
    assert "score 8" in logged and "a library prints" in logged and "a library prints" not in shown
