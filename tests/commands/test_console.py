"""The console command: what it offers, quickly, and one clear answer to a name that it does not know."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from toolgrpo import __version__
from toolgrpo.commands.main import COMMANDS, main


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
