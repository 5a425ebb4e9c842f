"""`toolgrpo init --tools_script`: the folder that it writes, and that it loads, checks and trains as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.page_blocks import commands_of, page_blocks
from toolgrpo.commands.main import main
from toolgrpo.data import load_tasks
from toolgrpo.sft.encoder import read_conversations

ROOT = Path(__file__).parents[2]
MATH = str(ROOT / "tools_funcs" / "math_tools.py")
pytestmark = pytest.mark.timeout(600)


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "toolgrpo", *words], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr
    return done.stdout


def test_a_folder_of_rows_is_written_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--tools_script", MATH, "rows"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split() == ["tool", "drawn", "answered", "rows"] and lines[1].startswith("add ")
    assert lines[-1] == "Next: toolgrpo check --config rows/config.yaml" and said.err == ""
    files = sorted(file.name for file in Path("rows").iterdir())
    assert files == ["README.md", "config.yaml", "heldout.jsonl", "train.jsonl", "worked.jsonl"]
    train, held_out = (load_tasks("rows", split=split) for split in ("train", "heldout"))
    assert len(train) == 160 and len(held_out) == 40
    for row in train:
        for call in json.loads(row["gold_calls"])[:1]:
            assert all(str(value) in row["prompt"][0]["content"] for value in call["arguments"].values())
    worked = [row["messages"] for row in read_conversations("rows/worked.jsonl")]
    assert [messages[0]["content"] for messages in worked] == [row["prompt"][0]["content"] for row in train]
    for messages, row in zip(worked, train, strict=True):
        made = [one["tool_calls"][0]["function"] for one in messages if one.get("tool_calls")]
        assert made == json.loads(row["gold_calls"]) and row["answer"] in messages[-1]["content"]
    config = yaml.safe_load(Path("rows/config.yaml").read_text())
    assert config["tools"]["tools_script"] == MATH and config["data"]["eval_questions"] == 40
    assert len(Path("rows/README.md").read_text().splitlines()) <= 15
    assert main(["data", "rows/train.jsonl"]) == 0 and "160 rows" in capsys.readouterr().out


def test_as_many_rows_as_asked_for_or_a_line_that_there_are_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--tools_script", MATH, "--rows", "25", "rows"]) == 0
    assert "train.jsonl (20 rows), heldout.jsonl (5 rows)" in capsys.readouterr().out
    assert "eval_questions: 5" in Path("rows/config.yaml").read_text()
    said = '    """Double a size.\n\n    Args:\n        size: It.\n    """\n'
    body = f"def double(size: Literal[1, 2, 3, 4, 5, 6, 7]) -> int:\n{said}    return 2 * size\n"
    Path("few.py").write_text(f"from typing import Literal\n\n\n{body}\n\nTOOL_FUNCTIONS = [double]\n")
    assert main(["init", "--tools_script", "few.py", "--rows", "50", "few"]) == 0
    assert "These are fewer than 50: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tools_script {tools}", "rows drawn from tools go into one folder, got none"),
        ("--tools_script {tools} full", "it is there already and not empty"),
        ("--tools_script {tools} full/file", "the rows cannot be written to full/file"),
        ("--tools_script none.py rows", "none.py (the working folder is"),
        ("--tools_script bad.py rows", "tool 'f': no docstring"),
        ("--tools_script mute.py rows", "no rows to train on could be drawn (f: none of"),
        ("--tools_script {tools} --hold_out dvide rows", "--hold_out dvide: there is no such tool"),
        ("--tools_script {tools} --rows 9 rows", "rows must be at least 10, got 9"),
        ("--rows 50 rows", "--rows applies to tools to draw rows from"),
        ("--hold_out add rows", "--hold_out applies to tools to draw rows from"),
        (f"--environment {ROOT}/tests/fixtures/tools/hostile_environment.py:Nothing rows", "No Nothing found in"),
    ],
)
def test_bad_input_is_a_sentence_and_leaves_no_folder(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    (tmp_path / "bad.py").write_text("def f(a: int) -> int:\n    return a\n\nTOOL_FUNCTIONS = [f]\n")
    mute = 'def f(a: int) -> int:\n    """F.\n\n    Args:\n        a: It.\n    """\n    raise ValueError("no")\n'
    (tmp_path / "mute.py").write_text(f"{mute}\nTOOL_FUNCTIONS = [f]\n")
    assert main(["init", *words.format(tools=MATH).split()]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "rows").exists()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_walk_of_the_tutorial_and_a_training_run_as_they_stand(tmp_path: Path) -> None:
    page = page_blocks(ROOT / "docs" / "tutorials" / "half_an_hour.md")
    tools, *commands = (block.text for block in page if "tests/draw/test_folder.py" in block.about)
    (tmp_path / "kiosk.py").write_text(tools)
    few = {"1000": "20", "240": "2"}
    init, sft, evaluate, export = (
        [few.get(word, word) for word in words[1:]] for text in commands for words in commands_of(text)
    )
    small = ["--engine", "transformers", "--max_completion_length", "96"]
    run(tmp_path, *init)
    run(tmp_path, *sft)
    said = run(tmp_path, *evaluate, *small, "--eval_questions", "2")
    assert "verdict   undecided" in said
    run(tmp_path, *export)
    assert (tmp_path / "rows" / "shown" / "Modelfile").is_file()
    small += ["--model_name_or_path", "rows/shown", "--per_device_train_batch_size", "8"]
    said = run(tmp_path, "check", "--config", "rows/config.yaml", *small, "--questions", "2", "--samples", "2")
    assert "3 of 3 answered drawn arguments" in said and "tool_result: the gold answers" in said
    run(tmp_path, "train", "--config", "rows/config.yaml", *small, "--max_steps", "2", "--eval_questions", "4")
    assert (tmp_path / "rows" / "output" / "run.yaml").is_file()
