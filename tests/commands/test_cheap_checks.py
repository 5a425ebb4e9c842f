"""What is wrong is told before PyTorch is imported, with exit code 2: counted in modules, not in seconds.

That it is told in the words of later: `test_bad_input.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tests.commands.test_bad_input import early
from tests.support.held_folder import Holder
from tests.support.ports import held_port
from toolgrpo.commands.arguments import TRACKERS
from toolgrpo.errors import ModelError
from toolgrpo.models import check_model

JOB = "--model nano --dataset_id_or_path arithmetic --reward exact_match"
SFT = "sft --model nano --output_dir out --dataset_id_or_path"
ROW = json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n"
FILES = {
    "syntax.py": "def (\n",
    "nul.py": "x = 1\0\n",
    "runs.py": "raise SystemExit('it was run')\n",
    "broken.jsonl": ROW + '{"prompt": "1+1?", "answer": \n',
    "anwser.jsonl": ROW.replace("answer", "anwser"),
    "later.jsonl": ROW + ROW.replace("answer", "anwser"),
    "user.jsonl": '{"messages": [{"role": "user", "content": "q"}]}\n',
    "mixture.yaml": "tasks: [{data: broken.jsonl}]\n",
    "mcp.json": "{",
    "plain": "x",
    "key.yaml": "training:\n  learning_rat: 1.0\n",
    "values.yaml": "model:\n  model_name_or_path: nano\ndata:\n  dataset: arithmetic\ntraining:\n  engine: vlm_server\n",
    "reward.yaml": "model_name_or_path: nano\ndataset_id_or_path: arithmetic\nreward: exact_mach\n",
    "field.yaml": "model_name_or_path: nano\ndataset_id_or_path: arithmetic\nreward: [exact_match]\ntool_workers: 0\n",
    "tools.yaml": "model_name_or_path: nano\ndataset_id_or_path: arithmetic\ntools:\n  tools_script: syntax.py\n",
}
TABLE = [
    # names
    ("tarin", "'tarin' 'train'"),
    ("train --learning_rat 1", "--learning_rat --learning_rate"),
    ("evaluate --config key.yaml", "key.yaml 2 'learning_rat' 'learning_rate'"),
    ("sft --batch-sizes=4", "--batch-sizes --batch_size"),
    (f"train {JOB} --engine vlm_colocate", "--engine 'vlm_colocate' 'vllm_colocate'"),
    ("init sop", "'sop' 'shop'"),
    ("init --shop", "--shop"),
    ("init --skills a b", "--skills a b"),
    ("completion fsh", "bash zsh fish"),
    ("env now", "env 'now'"),
    # values of a file
    ("train --config values.yaml", "values.yaml 6 engine"),
    ("train --config reward.yaml", "reward.yaml 3 'exact_mach' 'exact_match'"),
    ("train --config field.yaml", "field.yaml 4 tool_workers 0"),
    ("train --config tools.yaml", "tools.yaml 4"),
    # what is missing
    ("evaluate --model nano", "--dataset_id_or_path"),
    ("train --model", "--model_name_or_path"),
    ("sft --model nano", "--output_dir"),
    ("chat", "--model_name_or_path"),
    ("check", "--model_name_or_path look: recipes/configs/nano.yaml"),
    ("evaluate", "--model_name_or_path look: recipes/configs/nano.yaml"),
    ("gateway", "--model_name_or_path"),
    ("data", "rows"),
    ("replay", "folder episode"),
    ("replay empty", "EPISODE (or --all)"),
    # plugin files
    ("check --tools_script none.py", "none.py"),
    (f"train {JOB} --tools_script syntax.py", "syntax.py 1"),
    (f"train {JOB} --tools_script nul.py", "nul.py null"),
    (f"check {JOB} --environment syntax.py:Shop", "SyntaxError"),
    (f"evaluate {JOB} --reward_fn syntax.py", "SyntaxError"),
    (f"{SFT} user.jsonl --tools_script syntax.py", "SyntaxError"),
    (f"train {JOB} --mcp_config mcp.json", "mcp.json JSON"),
    # rows
    ("train --model nano --reward accuracy --dataset_id_or_path broken.jsonl", "broken.jsonl 2"),
    ("train --model nano --reward accuracy --dataset_id_or_path mixture.yaml", "broken.jsonl 2"),
    (f"train {JOB} --eval_questions 4 --eval_dataset_id_or_path broken.jsonl", "broken.jsonl 2"),
    ("evaluate --model nano --eval_dataset_id_or_path broken.jsonl", "broken.jsonl 2"),
    ("check --model nano --reward accuracy --dataset_id_or_path anwser.jsonl", "'anwser'"),
    ("train --model nano --reward accuracy --dataset_id_or_path later.jsonl", "later.jsonl 2 'answer'"),
    (f"train {JOB} --dataset_split tests", "train heldout 'tests'"),
    ("data broken.jsonl", "broken.jsonl 2"),
    (f"{SFT} none.jsonl", "none.jsonl"),
    (f"{SFT} user.jsonl", "user.jsonl 1 assistant"),
    # folders, models, ports
    (f"train {JOB} --output_dir plain/in", "--output_dir plain/in"),
    (f"{SFT} arithmetic --output_dir plain", "--output_dir plain"),
    (f"evaluate {JOB} --output_dir plain", "--output_dir plain"),
    (f"evaluate {JOB} --baseline plain", "--baseline plain"),
    ("train --dataset_id_or_path arithmetic --reward accuracy --model empty", "empty config.json"),
    ("chat empty", "empty config.json"),
    ("gateway --model ./none", "./none"),
    ("gateway --model nano --port PORT", "--port"),
    # what reads recordings and models
    ("replay empty 3", "episodes.jsonl"),
    ("show empty", "episodes.jsonl"),
    ("report empty", "empty"),
    ("export empty", "empty"),
]
SCRIPT = """
import contextlib, io, json, sys
from toolgrpo.commands.main import main

found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = main(words.split())
        except SystemExit as exit:
            code = exit.code
    heavy = {"torch", "transformers", "trl", "vllm", "datasets", "accelerate", "peft"} & sys.modules.keys()
    found.append([code, said.getvalue(), sorted(heavy)])
print(json.dumps(found))
"""


Found = dict[str, tuple[int, str, list[str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each line of the table came to: exit code, words, and what heavy was imported until then."""
    folder = tmp_path_factory.mktemp("cheap")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "empty").mkdir()
    with held_port() as port:
        lines = [line.replace("PORT", str(port)) for line, _ in TABLE]
        command = [sys.executable, "-c", SCRIPT, json.dumps(lines)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "empty"]), "a check leaves nothing behind"
    return {line: tuple(one) for (line, _), one in zip(TABLE, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize(("line", "names"), TABLE, ids=[line for line, _ in TABLE])
def test_it_is_told_before_anything_heavy_is_imported(found: Found, line: str, names: str) -> None:
    code, said, heavy = found[line]
    assert all(word in said for word in names.split()) and "raceback" not in said and "it was run" not in said
    assert (code, heavy) == (2, [])


GIVEN = ["--model", "nano", "--dataset_id_or_path", "arithmetic", "--reward", "tool_result"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--report_to wandbb tensorboard", "report_to wandbb is not a tracker; .*; the nearest is 'wandb'"),
        ("--resume_from_checkpoint true", "no complete checkpoint in .*out to resume from; auto starts a new run"),
        ("--resume_from_checkpoint nowhere", "cannot resume from nowhere: there is no such folder"),
        ("--eval_dataset_id_or_path arithmetic", "is given, but no --eval_questions N, so nothing would be measured"),
        ("--report_to wandb tensorboard", None),
        ("--eval_dataset_id_or_path arithmetic --eval_questions 0", None),
        ("--resume_from_checkpoint auto", None),
    ],
)
def test_what_values_say_together(tmp_path: Path, flags: str, said: str | None) -> None:
    found = early([*GIVEN, "--output_dir", str(tmp_path / "out"), *flags.split()])
    assert found is None if said is None else re.search(said, str(found)), found


def test_a_training_without_a_reward_is_told_early() -> None:
    assert "no reward is given, and the reward decides what the model learns" in str(early(GIVEN[:4]))
    assert early(GIVEN[:4], "check") is None and early([*GIVEN[:4], "--agent", "my agent"]) is None


def test_the_trackers_are_those_of_transformers() -> None:
    assert sorted(TRACKERS) == sorted(INTEGRATION_TO_CALLBACK)


def test_a_folder_in_use_is_told_early(tmp_path: Path) -> None:
    job = [*GIVEN, "--output_dir", str(tmp_path)]
    with Holder(tmp_path):
        assert "another run writes into" in str(early(job)) and early([*job, "--dry_run"]) is None
    assert early(job) is None


def test_a_flag_stands_over_the_file(tmp_path: Path) -> None:
    file, there = tmp_path / "run.yaml", tmp_path / "is.py"
    file.write_text("dataset_id_or_path: none.jsonl\ntools_script: none.py\nreward_fn: [none.py]\n")
    there.touch()
    words = ["--config", str(file), "--dataset_id_or_path", "arithmetic", "--tools_script", str(there), "--model=nano"]
    assert early([*words, "--reward_fn", str(there)]) is None
    assert "none.py" in str(early(words))


@pytest.mark.parametrize("command", ["train", "check", "evaluate"])
def test_the_recipes_pass(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what another recipe makes first, and a mixture without held-out rows."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    files = [*(root / "recipes" / "configs").glob("*.yaml")]
    assert len(files) > 5
    said = {file.name: early(["--config", str(file)], command) for file in files}
    not_yet = ("outputs/smollm2_135m_shown: there is no", "gsm8k_30.jsonl is one file and has no split 'heldout'")
    assert {name: one for name, one in said.items() if one and not any(known in one for known in not_yet)} == {}


def test_a_folder_that_is_not_there_is_named_and_no_flag_that_nobody_gave() -> None:
    with pytest.raises(ModelError, match=r"^outputs/none: there is no such folder"):
        check_model("outputs/none")


def test_headings_for_anchors_and_values_where_a_heading_stands(tmp_path: Path) -> None:
    file = tmp_path / "seed.yaml"
    text = "{}: &shared\n  engine: transformers\nmodel: {{name: nano}}\ngeneration:\n  <<: *shared\ndata: {}\nreward: {{reward: exact_match}}\n"
    for heading in ("x-shared", ".shared"):
        file.write_text(text.format(heading, "{dataset: arithmetic}"))
        assert early(["--config", str(file)]) is None
    file.write_text(text.format("defaults", "ok.jsonl"))
    said = str(early(["--config", str(file)])).splitlines()
    assert "line 1: unknown heading 'defaults'" in said[0] and "begins with x-" in said[0]
    assert said[1].endswith("line 6: 'data' is a heading; put `dataset_id_or_path: ok.jsonl` under it")
    assert [line for line in said[2:] if "is missing" not in line] == []


DEFECTS = {
    "  batch_size: 4": "'batch_size'; write per_device_train_batch_size",
    "  wombat: 1": "unknown key 'wombat'; the nearest known key is",
    "  num_generations: eight": "num_generations must be a whole number, got 'eight'",
    "  lr: 1e-5\n  learning_rate: 2e-5": "'learning_rate' is given twice ('learning_rate'); keep one",
    "  beta: 0.1\n  num_iterations: 6": "write max_steps 6 for steps",
    "  data: {max_rows: 3}": "it is a heading that is one level too deep, under 'training'",
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
        said = str(early(["--config", str(file)]))
        assert {line: said.count(words) for line, words in DEFECTS.items()} == {line: line in lines for line in DEFECTS}
        extra = ("modle: {dtipe: bf16}" in lines) + (missing != "")
        assert len(said.splitlines()) == len(lines) + extra, said
        assert f"--{missing} is missing" in said or not missing
