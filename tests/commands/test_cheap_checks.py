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
    ("tarin", "'tarin' 'train'"),
    ("train --learning_rat 1", "--learning_rat --learning_rate"),
    ("evaluate --config key.yaml", "key.yaml 2 'learning_rat' 'learning_rate'"),
    ("sft --batch-sizes=4", "--batch-sizes --batch_size"),
    ("train --num_generations eight", "--num_generations 'eight'"),
    (f"train {JOB} --engine vlm_colocate", "--engine 'vlm_colocate' 'vllm_colocate'"),
    (f"train {JOB} exact_mach", "'exact_mach' 'exact_match'"),
    ("init sop", "'sop' 'shop'"),
    ("init --shop", "--shop"),
    ("init --skills a b", "--skills a b"),
    ("completion fsh", "bash zsh fish"),
    ("env now", "env 'now'"),
    # values of a file
    ("train --config values.yaml", "values.yaml 6 engine"),
    ("train --config reward.yaml", "reward.yaml 3 'exact_mach'"),
    ("train --config field.yaml", "field.yaml 4 tool_workers 0"),
    ("train --config tools.yaml", "tools.yaml 4"),
    # what is missing
    ("evaluate --model nano", "--dataset_id_or_path"),
    ("train --model", "--model_name_or_path"),
    ("sft --model nano", "--output_dir"),
    ("chat", "--model_name_or_path"),
    ("data", "rows"),
    ("replay", "folder episode"),
    # plugin files
    ("check --tools_script none.py", "none.py"),
    (f"train {JOB} --tools_script syntax.py", "syntax.py 1"),
    (f"train {JOB} --tools_script nul.py", "nul.py null"),
    (f"check {JOB} --environment syntax.py:Shop", "SyntaxError"),
    (f"evaluate {JOB} --reward_fn syntax.py", "SyntaxError"),
    ("chat nano --tools_script syntax.py", "SyntaxError"),
    (f"{SFT} user.jsonl --tools_script syntax.py", "SyntaxError"),
    (f"train {JOB} --mcp_config mcp.json", "mcp.json JSON"),
    # rows
    ("train --model nano --reward accuracy --dataset_id_or_path broken.jsonl", "broken.jsonl 2"),
    ("train --model nano --reward accuracy --dataset_id_or_path mixture.yaml", "broken.jsonl 2"),
    (f"train {JOB} --eval_questions 4 --eval_dataset_id_or_path broken.jsonl", "broken.jsonl 2"),
    ("evaluate --model nano --eval_dataset_id_or_path broken.jsonl", "broken.jsonl 2"),
    ("check --model nano --reward accuracy --dataset_id_or_path anwser.jsonl", "'anwser'"),
    ("train --model nano --reward accuracy --dataset_id_or_path later.jsonl", "later.jsonl 2 'answer'"),
    ("train --model nano --reward accuracy --dataset_id_or_path promt.jsonl", "promt.jsonl 'promt' 'prompt'"),
    (f"train {JOB} --dataset_split tests", "train heldout 'tests'"),
    ("data broken.jsonl", "broken.jsonl 2"),
    ("data nonsense", "'nonsense'"),
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


@pytest.mark.parametrize(("line", "names"), TABLE, ids=[line for line, _ in TABLE])
def test_it_is_told_before_anything_heavy_is_imported(
    found: dict[str, tuple[int, str, list[str]]], line: str, names: str
) -> None:
    code, said, heavy = found[line]
    assert all(word in said for word in names.split()) and "raceback" not in said and "it was run" not in said
    assert (code, heavy) == (2, [])
