"""What `toolgrpo init` writes runs as it stands, by the lines of its README."""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from toolgrpo.commands.main import main
from toolgrpo.tools import load_tools, run_tool

ROOT = Path(__file__).parents[2]
FEWER = {"sft": "--max_steps 1", "check": "--estimate", "train": "--max_steps 1 --engine transformers"}


def lines(path: Path) -> list[list[str]]:
    text = path.read_text().replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip().startswith("toolgrpo ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    monkeypatch.chdir(tmp_path / "my_task")
    return tmp_path / "my_task"


def test_its_files_fit_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: (folder / name).read_text() for name in ("data.jsonl", "examples.jsonl")}
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    runpy.run_path("make_rows.py", run_name="__main__")
    assert rows == {name: (folder / name).read_text() for name in rows}
    with load_tools("my_tools.py") as tools:
        assert run_tool(tools, {"name": "price", "arguments": {"part": 127}}).content == "4"
        assert "there is no part 1" in run_tool(tools, {"name": "stock", "arguments": {"part": 1}}).content
    reward = runpy.run_path("my_reward.py")["reward_func"]
    said = [[{"role": "assistant", "content": text}] for text in ("It costs 7.", "47", "7.5 and 70", "")]
    cut = [{"role": "tool", "content": "7"}]
    assert reward([*said, cut], ["7"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]
    of_readme = [words for words in lines(ROOT / "README.md") if words in lines(folder / "README.md")]
    assert of_readme == lines(folder / "README.md"), "the project's README shows the same lines"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_lines_of_its_readme_run(folder: Path) -> None:
    for words in lines(folder / "README.md"):
        fewer = FEWER.get(words[1], "").split()
        subprocess.run([sys.executable, "-m", *words, *fewer], input="/quit\n", text=True, cwd=folder, check=True)
    assert (folder / "outputs" / "my_task" / "Modelfile").is_file()
