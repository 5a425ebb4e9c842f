"""A training on a real (pseudo-)terminal: what a person has on the screen, and after an interrupt."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.pseudo_terminal import WIDTH, on_terminal, screen_of

TRAIN = """
import sys, warnings
from pathlib import Path
from toolgrpo.commands.terminal import Terminal
from toolgrpo.observe.progress import RunProgress
from toolgrpo.testing import ByteChat, ScriptedTools, tiny_trainer

folder, steps = Path(sys.argv[1]), int(sys.argv[2])

def script(request, number):
    answered = ">tool:" in ByteChat.text(request.ids)
    return ByteChat.say("end" + "." * (number % 5) if answered else 'call add {"a": 1, "b": 2}')

def run(name, steps, reward, **parts):
    parts["tools"] = ScriptedTools({"add": lambda a, b: str(a + b)})
    trainer = tiny_trainer(folder / name, reward, script, parts=parts, max_steps=steps, disable_tqdm=name == "command")
    try:
        trainer.train()
        if name == "command":
            trainer.save_model(str(folder / name))
    finally:
        trainer.close()

def reward(completions, **_):
    return [float(len(c[-1]["content"]) % 3) for c in completions]

def noisy(completions, **_):
    warnings.warn("a library warns")
    return reward(completions)

if steps < 10:
    run("python", 2, reward)
print("from here on as a command", flush=True)
terminal = Terminal.open(folder / "train.log")
run("command", steps, noisy, progress=RunProgress(terminal.console, say=terminal.say))
"""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def steps_in(screen: list[str]) -> list[str]:
    titles = next(number for number, line in enumerate(screen) if line.lstrip().startswith("step reward success"))
    return [line for line in screen[titles + 1 :] if line.lstrip()[:1].isdigit()]


def test_lines_and_one_bar_and_nothing_of_libraries(tmp_path: Path) -> None:
    session = on_terminal(TRAIN, tmp_path, "3")
    assert session.code == 0, session.stream
    in_python, as_command = session.stream.split("from here on as a command")

    screen = screen_of(in_python)
    shown = steps_in(screen)
    assert [line.split()[0] for line in shown] == ["1/2", "2/2"]
    loaded = [line.split()[0] for line in screen if line.startswith(("model ", "tools ", "reward ", "engine "))]
    assert loaded == ["model", "tools", "reward", "engine"]
    assert not any(noise in in_python for noise in ("{'loss'", "'reward':", "it/s"))

    screen = screen_of(as_command)
    shown = steps_in(screen)
    assert [line.split()[0] for line in shown] == ["1/3", "2/3", "3/3"]
    assert all(len(line) < WIDTH for line in shown), "a line is a line"
    bars = [line for line in screen if "━" in line]
    assert len(bars) == 1 and "3/3" in bars[0]
    assert not any(noise in as_command for noise in ("{'", "warn", "Writing model shards", "it/s"))
    log = (tmp_path / "train.log").read_text()
    assert log.count("'loss'") == 3 and "a library warns" in log and " 3/3 " in log and "━" not in log

    assert "\x1b[?25l" not in session.stream, "the cursor is never hidden"
    assert session.before == session.after


def test_two_interrupts_leave_the_terminal_as_it_was(tmp_path: Path) -> None:
    sent: list[int] = []

    def interrupt(stream: str, pid: int) -> None:
        if (not sent and " 2/500 " in stream) or (len(sent) == 1 and "SIGINT" in stream):
            sent.append(pid)
            os.killpg(pid, signal.SIGINT)

    session = on_terminal(TRAIN, tmp_path, "500", during=interrupt)
    assert len(sent) == 2 and "a second signal ends the run at once" in session.stream
    assert "\x1b[?25l" not in session.stream and session.before == session.after


def test_the_screen_is_read_as_a_terminal_shows_it() -> None:
    assert screen_of("one\r\nbar 1\r\x1b[2Ktwo\r\nbar 2\x1b[31m!\x1b[0m\r\x1b[1A2") == ["one", "2wo", "bar 2!"]
    assert screen_of("abcdef", width=4) == ["abcd", "ef"]
    with pytest.raises(AssertionError, match="unknown sequence"):
        screen_of("\x1b[5J")
