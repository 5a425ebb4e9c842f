"""Every block of README.md, docs and recipes' page does what it says, run in order in an empty folder.

The notation of the comments before blocks is in `tests/support/page_blocks.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.page_blocks import PAGES, SHELL, Block, commands_of, page_blocks
from tests.support.page_rooms import PythonRoom, run_command
from toolgrpo.commands.given import ALIASES
from toolgrpo.commands.other_names import LAUNCHER_FLAGS
from toolgrpo.commands.table import COMMANDS, flags_of

ROOT = Path(__file__).parents[2]
BLOCKS = [block for page in PAGES for block in page_blocks(page)]
FLAGS = {name: {*flags_of(name), *ALIASES, "config", *LAUNCHER_FLAGS} for name in COMMANDS}
SCRIPTS = {f"recipes/{name}.py": name for name in ("train", "evaluate", "check", "sft")} | {
    "recipes/launch.sh": "train"
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_every_block_says_what_it_is_and_can_be_read(block: Block) -> None:
    assert block.doing != "unsaid", f"{block.where}: say on the line before it: file, run, or not run and why"
    if block.of is not None:
        assert block.text == (ROOT / block.of / block.about).read_text(), f"{block.where} differs from {block.of}"
    if block.language in SHELL and "it is what is printed" not in block.about:
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.where}: {done.stderr}"
        for words in commands_of(block.text):
            check_flags(words, block)
    elif block.language == "python":
        ast.parse(block.text)
    elif block.language == "json":
        is_one = block.text.startswith("{\n") or "\n  " in block.text
        for document in [block.text] if is_one else block.text.splitlines():
            json.loads(document)
    elif block.language == "yaml":
        yaml.safe_load(block.text)


def check_flags(words: list[str], block: Block) -> None:
    """The flags behind `toolgrpo COMMAND`, or a recipe's script, are its own."""
    command = None
    for before, word in zip(["", *words], words, strict=False):
        if before.endswith("toolgrpo") and re.fullmatch("[a-z]+", word):
            assert word in COMMANDS, f"{block.where}: there is no command {word}"
            command = word
        elif word in SCRIPTS:
            command = SCRIPTS[word]
        elif command in FLAGS and word.startswith("--") and word != "--help":
            flag = word[2:].partition("=")[0]
            assert flag in FLAGS[command], f"{block.where}: toolgrpo {command} has no flag {word}"


RUNS = [
    *(pytest.param(page, False, id=page.stem) for page in dict.fromkeys(b.page for b in BLOCKS if b.doing == "run")),
    *(
        pytest.param(page, True, id=f"{page.stem}-slowly", marks=pytest.mark.slow)
        for page in dict.fromkeys(block.page for block in BLOCKS if block.slowly)
    ),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("page", "slowly"), RUNS)
def test_the_blocks_run(page: Path, slowly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    folder, output = tmp_path / "empty", tmp_path / "output.txt"
    folder.mkdir()
    output.touch()
    with PythonRoom(folder, output) as python:
        for block in page_blocks(page):
            if block.doing == "file":
                (folder / block.about).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.about).write_text(block.text)
            if block.doing != "run" or (block.slowly and not slowly):
                continue
            if block.language == "python":
                raised = python.run(block.text, block.where)
                assert raised is None, f"{block.where}:\n{raised}\n{tail(output)}"
            elif block.language in SHELL:
                run_shell(block, folder, output)
            else:
                pytest.fail(f"{block.where}: a block of {block.language} cannot be run")


def run_shell(block: Block, folder: Path, output: Path) -> None:
    """Commands of ours in a room of theirs, whatever else in bash."""
    commands = commands_of(block.text)
    if all(words[0] == "toolgrpo" for words in commands):
        for words in commands:
            code = run_command(words[1:], folder, output)
            assert code == 0, f"{block.where}: {' '.join(words)}: exit code {code}\n{tail(output)}"
        return
    assert not any(words[0] == "toolgrpo" for words in commands), f"{block.where}: give toolgrpo a block of its own"
    with output.open("a") as printed:
        done = subprocess.run(["bash", "-e"], input=block.text, text=True, cwd=folder, stdout=printed, stderr=printed)
    assert done.returncode == 0, f"{block.where}:\n{tail(output)}"


def tail(output: Path) -> str:
    return output.read_text(errors="replace")[-4000:]
