"""`toolgrpo env` and `toolgrpo data`: what they print of a machine and of rows."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolgrpo.commands.look import data_lines, environment_lines
from toolgrpo.commands.main import main, read
from toolgrpo.errors import DataError


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"What is {n}+1?\x1b[2J", "answer": str(n + 1), "tools": ["add"]} for n in range(5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_what_a_bug_report_needs_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = dict.fromkeys(("HF_TOKEN", "VLLM_API_KEY", "VLLM_S3_SECRET"), "hf_secret")
    for name, value in {**secrets, "VLLM_HOST": "http://me:hf_secret@host", "VLLM_CPU_KVCACHE_SPACE": "2"}.items():
        monkeypatch.setenv(name, value)
    said = "\n".join(environment_lines())
    for part in (
        platform.python_version(),
        f"torch        {torch.__version__}",
        "cores, ",
        "sandbox  ",
        "CACHE_SPACE=2",
    ):
        assert part in said, said
    assert "hf_secret" not in said


def look_at(*words: str) -> str:
    return "\n".join(data_lines(read("data", [*words])))


def test_rows_as_the_reward_and_as_the_model_see_them(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", rows, "--show", "2", "--system_prompt", "Be short."]) == 0
    said = capsys.readouterr().out
    assert "5 rows with " in said and ", line 2" in said and ", line 3" not in said and "\x1b" not in said
    assert "  system: Be short.\n  user: What is 0+1?" in said
    assert '  answer: "2"' in said and '  tools: ["add"]' in said
    seen = look_at(rows, "--show", "1", "--model", "nano", "--tools_script", "arithmetic")
    assert '"name": "add"' in seen and '"name": "divide"' not in seen and "<|im_start|>user\nWhat is 0+1?" in seen


def test_bad_rows_are_skipped_where_that_is_asked(rows: str) -> None:
    with Path(rows).open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"line 6: .*--skip_bad_rows"):
        look_at(rows)
    said = look_at(rows, "--skip_bad_rows", "--eval_dataset_id_or_path", rows)
    assert said.startswith("1 bad row was skipped:") and "5 rows with " in said and "5 of 5 held-out rows" in said


def test_rows_that_do_not_suit_the_tools_or_are_trained_on(rows: str) -> None:
    with pytest.raises(DataError, match=r"5 .*rows\.jsonl, line 1 to 5: .*'add'"):
        look_at(rows, "--tools_script", "calculator")
    said = look_at(rows, "--show", "0", "--eval_dataset_id_or_path", rows, "--eval_questions", "3")
    assert said.splitlines()[1].startswith("3 of 3 held-out rows have a prompt that is trained on")


def test_what_the_output_does_not_take(rows: str) -> None:
    """ASCII gets escapes, and a full disk is one sentence."""
    Path(rows).write_text(json.dumps({"prompt": "Où?", "answer": "4"}), encoding="utf-8")
    command = [sys.executable, "-m", "toolgrpo", "data", rows]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run(command, env=ascii_only, capture_output=True, text=True, check=True)
    assert "user: O\\xf9?" in said.stdout and not said.stderr
    with Path("/dev/full").open("w") as full:
        refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "the disk is full" in refused.stderr
