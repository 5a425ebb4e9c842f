"""What the output folder holds already is never replaced without a word, nor a run in it begun again."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolgrpo.commands.main import main

ROW = '{"prompt": "q", "answer": "1"}\n'


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_an_evaluation_leaves_a_training_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "baseline"
    run.mkdir()
    (run / "run.yaml").write_text("max_steps: 1\nrun_id: 0123456789abcdef\n")
    (run / "episodes.jsonl").write_text("{}\n")
    said = refused(
        capsys,
        "evaluate",
        "--model_name_or_path",
        "nano",
        "--dataset_id_or_path",
        "arithmetic",
        "--output_dir",
        tmp_path,
    )
    assert "which holds a training" in said and (run / "episodes.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "text", "flag", "says"),
    [
        ("heldout.jsonl", ROW, "--eval_dataset_id_or_path", "has the name of a file that the run itself writes"),
        ("run.yaml", "# mine\nmax_steps: 1\n", "--config", "was not written by a run"),
    ],
)
def test_files_of_the_user_are_not_replaced(
    tmp_path: Path, name: str, text: str, flag: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "rows.jsonl").write_text(ROW)
    data = ("--dataset_id_or_path", tmp_path / "rows.jsonl", "--model_name_or_path", "nano", "--reward", "exact_match")
    said = refused(capsys, "train", *data, flag, tmp_path / name, "--output_dir", tmp_path)
    assert says in said and (tmp_path / name).read_text() == text


def test_a_folder_of_rows_is_no_output_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(ROW)
    words = ("--model_name_or_path", "nano", "--reward", "exact_match", "--output_dir", f"{tmp_path}/")
    assert "is the output folder, too" in refused(capsys, "train", "--dataset_id_or_path", tmp_path, *words)
    assert (tmp_path / "heldout.jsonl").read_text() == ROW


def test_a_run_whose_folder_was_moved_is_not_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "moved" / "checkpoint-8").mkdir(parents=True)
    given = f"# What this run was given\nmodel_name_or_path: nano\ndataset_id_or_path: arithmetic\noutput_dir: {tmp_path / 'out'}\n"
    (tmp_path / "moved" / "run.yaml").write_text(given)
    said = refused(capsys, "train", "--config", tmp_path / "moved" / "run.yaml", "--resume_from_checkpoint", "auto")
    assert f"Give --output_dir {tmp_path / 'moved'}" in said and not (tmp_path / "out").exists()
