"""What is told before PyTorch is imported. That it is told in the words of later: `test_bad_input.py`."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tests.commands.test_bad_input import early
from tests.support.held_folder import Holder
from toolgrpo.commands.arguments import TRACKERS

JOB = ["--model", "nano", "--dataset_id_or_path", "arithmetic", "--reward", "tool_result"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--report_to wandbb tensorboard", "report_to wandbb is no tracker; .*; the nearest is 'wandb'"),
        ("--resume_from_checkpoint true", "there is no complete checkpoint in .*out to resume from; auto begins anew"),
        ("--resume_from_checkpoint nowhere", "cannot resume from nowhere: there is no such folder"),
        ("--eval_dataset_id_or_path arithmetic", "is given, but no --eval_questions N, so nothing would be measured"),
        ("--report_to wandb tensorboard", None),
        ("--eval_dataset_id_or_path arithmetic --eval_questions 0", None),
        ("--resume_from_checkpoint auto", None),
    ],
)
def test_what_values_say_together(tmp_path: Path, flags: str, said: str | None) -> None:
    job = [*JOB, "--output_dir", str(tmp_path / "out")]
    found = early([*job, *flags.split()])
    assert found is None if said is None else re.search(said, str(found)), found


def test_a_training_without_a_reward_is_told_early() -> None:
    assert "no reward is given, and it decides what the model learns" in str(early(JOB[:4]))
    assert early(JOB[:4], "check") is None and early([*JOB[:4], "--agent", "my agent"]) is None


@pytest.mark.parametrize("command", ["train", "check", "evaluate", "chat", "gateway"])
def test_a_missing_model_is_told_early(command: str) -> None:
    assert "--model_name_or_path is missing; for a first look: " in str(early([], command))


def test_the_trackers_are_those_of_transformers() -> None:
    assert sorted(TRACKERS) == sorted(INTEGRATION_TO_CALLBACK)


def test_a_folder_in_use_is_told_early(tmp_path: Path) -> None:
    job = [*JOB, "--output_dir", str(tmp_path)]
    with Holder(tmp_path):
        assert "another run writes into" in str(early(job)) and early([*job, "--dry_run"]) is None
    assert early(job) is None


def test_a_flag_stands_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dataset_id_or_path: none.jsonl\ntools_script: none.py\nreward_fn: [none.py]\n")
    (tmp_path / "is.py").touch()
    flags = [*("--dataset_id_or_path", "arithmetic"), *("--tools_script", str(tmp_path / "is.py")), "--model=nano"]
    assert early(["--config", str(file), *flags, "--reward_fn", str(tmp_path / "is.py")]) is None
    said = early(["--config", str(file), *flags])
    assert said is not None and "none.py" in said


@pytest.mark.parametrize("command", ["train", "check", "evaluate"])
def test_the_recipes_pass(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    files = [*(root / "recipes" / "configs").glob("*.yaml")]
    assert len(files) > 5
    said = {file.name: early(["--config", str(file)], command) for file in files}
    not_yet = (
        "outputs/smollm2_135m_shown: there is no such folder",
        "gsm8k_30.jsonl is one file and has no split 'heldout'",
    )
    wrong = {name: one for name, one in said.items() if one is not None and not any(known in one for known in not_yet)}
    assert wrong == {}, "all but what another recipe makes first, and a mixture without held-out rows"


DEFECTS = {
    "  batch_size: 4": "'batch_size'; write per_device_train_batch_size",
    "  wombat: 1": "unknown key 'wombat'; the nearest known key is",
    "  num_generations: eight": "num_generations must be a whole number, got 'eight'",
    "  lr: 1e-5\n  learning_rate: 2e-5": "'learning_rate' is given twice ('learning_rate'); keep one",
    "  beta: 0.1\n  num_iterations: 6": "write max_steps 6 for steps",
    "  data: {max_rows: 3}": "it is a heading, and stands one level too deep, under 'training'",
    "  bf16: 7": "bf16 must be true or false, got 7",
    "modle: {dtipe: bf16}": "unknown heading 'modle'",
    "tools: {tools_script: none.py}": "No such file: ",
}


@pytest.mark.parametrize("missing", ["", "model_name_or_path", "dataset_id_or_path"])
def test_everything_that_is_wrong_is_told_at_once(missing: str, tmp_path: Path) -> None:
    """Each mistake, and all of them, each told once, and nothing else."""
    file = tmp_path / "seed.yaml"
    good = {"model_name_or_path": "model: {name: nano, lora_r: 8, lora_alpha: 16}"}
    good["dataset_id_or_path"] = "data: {dataset: arithmetic}"
    for chosen in (*combinations(DEFECTS, 1), tuple(DEFECTS)):
        lines = list(chosen)
        under = sorted(lines, key=lambda line: not line.startswith(" "))
        file.write_text("\n".join([*(text for name, text in good.items() if name != missing), "training:", *under]))
        said = early(["--config", str(file)])
        assert said is not None
        for line, words in DEFECTS.items():
            assert said.count(words) == (line in lines), (words, said)
        extra = ("modle: {dtipe: bf16}" in lines) + (missing != "")
        assert len(said.splitlines()) == len(lines) + extra, said
        assert f"--{missing} is missing" in said or not missing
