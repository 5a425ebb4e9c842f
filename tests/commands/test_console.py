"""The console command: what it offers, quickly, and one clear answer to a name that it does not know."""

from __future__ import annotations

import subprocess
import sys
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


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "there is no command 'trian'; the nearest is 'train'" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"toolgrpo {__version__}\n"


def test_the_package_brings_the_command() -> None:
    (found,) = entry_points(group="console_scripts", name="toolgrpo")
    assert found.load() is main


def test_nothing_heavy_is_imported_to_say_what_there_is() -> None:
    script = (
        "import sys, runpy; sys.argv = ['toolgrpo']\n"
        "try:\n    runpy.run_module('toolgrpo', run_name='__main__')\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(*{'torch', 'transformers', 'trl', 'vllm', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == ""
