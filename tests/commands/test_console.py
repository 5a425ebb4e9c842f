"""The console command: what it offers, quickly, and one clear answer to a name that it does not know."""

from __future__ import annotations

import io
import logging
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from toolgrpo import __version__
from toolgrpo.commands.main import main
from toolgrpo.commands.table import COMMANDS
from toolgrpo.observe.console import SteadyConsole, show_tool_output
from toolgrpo.tools.workers.output_log import OutputLog


def test_the_commands_are_listed_with_their_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert f"  {name}" in shown and command.purpose in shown
        assert max(map(len, shown.splitlines()[:-1])) <= 80, "all but the folder of the pages"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "there is no command 'trian'; the nearest is 'train'" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"toolgrpo {__version__}\n"


def test_the_package_brings_the_command() -> None:
    (found,) = entry_points(group="console_scripts", name="toolgrpo")
    assert found.load() is main


def test_the_first_lines_that_tools_print_are_shown_and_tracebacks_of_calls_are_not(tmp_path: Path) -> None:
    said: list[str] = []
    logger = logging.getLogger("toolgrpo.tools.output")
    show_tool_output(said.append)
    try:
        log = OutputLog(tmp_path / "tools.log")
        log.record(b"Traceback (most recent call last):\n  File x\nValueError: no\n")
        for number in range(9):
            log.record(f"line {number} \x1b[2J\n".encode())
        log.close()
    finally:
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    assert said == [f"line {n} \\x1b[2J" for n in range(5)] + [
        f"(what they print from here on is in {tmp_path / 'tools.log'})"
    ]
    assert "ValueError: no" in (tmp_path / "tools.log").read_text() and "line 8" in (tmp_path / "tools.log").read_text()


def test_a_pipe_of_a_jupyter_kernel_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sets FORCE_COLOR for what its cells start, and a bar would be written frame by frame."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = SteadyConsole(file=(shown := io.StringIO()))
    console.print("[red]no code")
    assert not console.is_terminal
    assert shown.getvalue() == "no code\n"
