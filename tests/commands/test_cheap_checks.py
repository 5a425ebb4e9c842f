"""What is wrong is told before PyTorch is imported, with exit code 2: counted in modules, not in seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.ports import held_port

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
    "promt.jsonl": ROW.replace("prompt", "promt"),
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
    ("tarin", "there is no command 'tarin'; the nearest is 'train'"),
    ("train --learning_rat 1", "unknown flag --learning_rat; the nearest known flag is --learning_rate"),
    ("evaluate --config key.yaml", "key.yaml, line 2: unknown key 'learning_rat'; the nearest known key is"),
    ("sft --batch-sizes=4", "unknown flag --batch-sizes; the nearest known flag is --batch_size"),
    ("train --num_generations eight", "--num_generations must be a whole number, got 'eight'"),
    (f"train {JOB} --engine vlm_colocate", "got 'vlm_colocate'; the nearest is 'vllm_colocate'"),
    (f"train {JOB} exact_mach", "there is no built-in reward 'exact_mach'; the nearest is 'exact_match'"),
    ("init sop", "there is no task 'sop'; the nearest is 'shop'"),
    ("init --shop", "unknown flag --shop"),
    ("init --skills a b", "--skills takes one folder, got a and b"),
    ("completion fsh", "give bash, zsh or fish"),
    ("env now", "toolgrpo env takes no words (got 'now')"),
    # values of a file
    ("train --config values.yaml", "values.yaml, line 6: engine must be one of"),
    ("train --config reward.yaml", "reward.yaml, line 3: there is no built-in reward 'exact_mach'"),
    ("train --config field.yaml", "field.yaml, line 4: tool_workers must be at least 1, got 0"),
    ("train --config tools.yaml", "tools.yaml, line 4: "),
    # what is missing
    ("evaluate --model nano", "--dataset_id_or_path is missing"),
    ("train --model", "--model_name_or_path needs a value after it"),
    ("sft --model nano", "--output_dir is missing"),
    ("chat", "--model_name_or_path is missing"),
    ("data", "say which rows"),
    ("replay", "give the run's output folder and the number of an episode"),
    # plugin files
    ("check --tools_script none.py", "No such file: "),
    (f"train {JOB} --tools_script syntax.py", "line 1"),
    (f"train {JOB} --tools_script nul.py", "null bytes"),
    (f"check {JOB} --environment syntax.py:Shop", "SyntaxError"),
    (f"evaluate {JOB} --reward_fn syntax.py", "SyntaxError"),
    ("chat nano --tools_script syntax.py", "SyntaxError"),
    (f"{SFT} user.jsonl --tools_script syntax.py", "SyntaxError"),
    (f"train {JOB} --mcp_config mcp.json", "is not valid JSON"),
    # rows
    ("train --model nano --reward accuracy --dataset_id_or_path broken.jsonl", "broken.jsonl, line 2: it is not valid"),
    ("train --model nano --reward accuracy --dataset_id_or_path mixture.yaml", "broken.jsonl, line 2: it is not valid"),
    (f"train {JOB} --eval_questions 4 --eval_dataset_id_or_path broken.jsonl", "broken.jsonl, line 2: "),
    ("evaluate --model nano --eval_dataset_id_or_path broken.jsonl", "broken.jsonl, line 2: "),
    ("check --model nano --reward accuracy --dataset_id_or_path anwser.jsonl", "the nearest is 'anwser'"),
    ("train --model nano --reward accuracy --dataset_id_or_path later.jsonl", "line 2: it has no 'answer', although"),
    ("train --model nano --reward accuracy --dataset_id_or_path promt.jsonl", "rename 'promt' to 'prompt'"),
    (f"train {JOB} --dataset_split tests", "have the splits train and heldout, got 'tests'"),
    ("data broken.jsonl", "broken.jsonl, line 2: "),
    ("data nonsense", "there is no data named 'nonsense'"),
    (f"{SFT} none.jsonl", "there is no file none.jsonl"),
    (f"{SFT} user.jsonl", "user.jsonl, line 1: no assistant message"),
    # folders, models, ports
    (f"train {JOB} --output_dir plain/in", "cannot be a folder to write to"),
    (f"{SFT} arithmetic --output_dir plain", "cannot be a folder to write to"),
    (f"evaluate {JOB} --output_dir plain", "cannot be a folder to write to"),
    (f"evaluate {JOB} --baseline plain", "--baseline plain is a file; give the folder"),
    ("train --dataset_id_or_path arithmetic --reward accuracy --model empty", "is a folder without config.json"),
    ("chat empty", "is a folder without config.json"),
    ("gateway --model ./none", "there is no such folder"),
    ("gateway --model nano --port PORT", "choose another --port"),
    # what reads recordings and models
    ("replay empty 3", "holds no episodes.jsonl"),
    ("show empty", "holds no episodes.jsonl"),
    ("report empty", "holds no recording"),
    ("export empty", "holds no trained model"),
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
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


@pytest.mark.parametrize(("line", "says"), TABLE, ids=[line for line, _ in TABLE])
def test_it_is_told_before_anything_heavy_is_imported(
    found: dict[str, tuple[int, str, list[str]]], line: str, says: str
) -> None:
    code, said, heavy = found[line]
    assert says in said and "raceback" not in said and "it was run" not in said
    assert (code, heavy) == (2, [])
