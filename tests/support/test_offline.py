"""What goes to the hub and comes from it, against a small hub on this machine that speaks its HTTP interface."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_families import trl_tokenizer
from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "data"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

LOAD = """
import json, sys
from toolgrpo.data import load_tasks
print(json.dumps([[dict(row) for row in load_tasks(spec, split=split)] for spec, split in json.loads(sys.argv[1])]))
"""
NOT_REACHED = """
import json, os, subprocess, sys
from toolgrpo.data import load_tasks
from toolgrpo.errors import ToolGRPOError
from toolgrpo.build import load_tokenizer
longest = load_tokenizer("somebody/model").model_max_length
refused = []
for load in (lambda: load_tokenizer("somebody/other"), lambda: load_tasks("somebody/rows", split="train")):
    try:
        load()
    except ToolGRPOError as error:
        refused.append(str(error))
print(json.dumps([longest, refused, os.environ.get("HF_HUB_OFFLINE")]))
"""
ASKED = [("gsm8k", "train"), ("gsm8k", "heldout"), ("mbpp", "train"), ("aime", "train"), ("somebody/rows", "train")]


@pytest.fixture
def hub(stand_in_hub: Any) -> Iterator[Any]:
    with stand_in_hub.StandInHub() as hub:
        yield hub


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def data_set(splits: dict[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    """The files of "CONFIGURATION/SPLIT", and the head of a README, which says where each lies."""
    import pyarrow
    import pyarrow.parquet

    head: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    files = {}
    for place, rows in splits.items():
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        files[f"{place}-00000-of-00001.parquet"] = sink.getvalue()
        head[place.partition("/")[0]].append({"split": place.partition("/")[2], "path": f"{place}-*"})
    configs = [{"config_name": config, "data_files": listed} for config, listed in head.items()]
    return {"README.md": f"---\n{json.dumps({'configs': configs})}\n---\n".encode(), **files}


def in_a_process(code: str, *arguments: str, cache: Path, **environment: str) -> tuple[Any, str]:
    """What it prints last and what it says: a process of its own, because the hub's libraries read the environment once."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            **{"HF_HOME": str(cache), "HF_DATASETS_CACHE": str(cache / "rows"), "HF_HUB_DISABLE_XET": "1"},
            **environment,
        },
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_usual_ids_are_loaded_from_the_hub_and_offline_from_its_cache(hub: Any, tmp_path: Path) -> None:
    word_problems, programs, problems = read("gsm8k_30.jsonl"), read("mbpp_10.jsonl"), read("aime_10.jsonl")
    own = {"main/train": word_problems[:20], "main/test": word_problems[20:]}
    hub.add("datasets", "openai/gsm8k", data_set(own | {"socratic/train": word_problems[:1]}))
    hub.add(
        "datasets",
        "google-research-datasets/mbpp",
        data_set({f"full/{split}": programs for split in ("train", "test")}),
    )
    hub.add("datasets", "AI-MO/aimo-validation-aime", data_set({"default/train": problems}))
    hub.add("datasets", "somebody/rows", {"train.jsonl": b'{"prompt": "1+1?", "answer": "2", "level": 3}\n'})
    found, _ = in_a_process(LOAD, json.dumps(ASKED), cache=tmp_path, HF_ENDPOINT=hub.url)
    train, heldout, mbpp, aime, rows = found
    assert [row["prompt"][0]["content"] for row in train + heldout] == [row["question"] for row in word_problems]
    assert train[0]["answer"] == word_problems[0]["answer"].rpartition("####")[2].strip()
    assert [row["tests"] for row in mbpp] == [row["test_list"] for row in programs]
    assert [row["prompt"][0]["content"] for row in aime] == [row["problem"] for row in problems]
    assert rows == [{"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "level": 3}]
    hub.repositories.clear()  # from here on there is no network, only what `datasets` left in its cache
    offline = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}
    assert in_a_process(LOAD, json.dumps(ASKED), cache=tmp_path, **offline)[0] == found


def keep_model(cache: Path, **longest_of: int) -> None:
    """What the hub's client leaves of somebody/model: revisions that differ in their longest text."""
    tokenizer = trl_tokenizer("qwen3")
    kept = cache / "models--somebody--model"
    for revision, longest in longest_of.items():
        commit = hashlib.sha1(revision.encode()).hexdigest()
        (kept / "refs").mkdir(parents=True, exist_ok=True)
        (kept / "refs" / revision).write_text(commit)
        tokenizer.save_pretrained(kept / "snapshots" / commit)
        (kept / "snapshots" / commit / "config.json").write_text('{"model_type": "qwen3"}')
        settings = kept / "snapshots" / commit / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": longest}))


def test_a_hub_that_is_not_there_is_said_once_and_what_is_kept_is_loaded(tmp_path: Path) -> None:
    keep_model(tmp_path / "hub", main=222)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (longest, (model, rows), offline), said = in_a_process(NOT_REACHED, cache=tmp_path, HF_ENDPOINT=url)
    assert longest == 222
    assert "somebody/other" in model and "somebody/rows" in rows
    assert offline == "1", "for processes that begin later"
    assert said.count(f"the hub at {url} cannot be reached") == 1
    assert "Retrying" not in said


def test_a_trained_model_is_pushed_as_trl_does_it_and_nothing_private_with_it(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants
    import transformers.utils.hub
    from huggingface_hub import ModelCard as HubCard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)  # what HF_ENDPOINT sets at the first import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    out = tmp_path / "out"
    flags = (
        f"--config recipes/configs/nano.yaml --output_dir {out} --engine transformers --use_cpu true --eval_questions 2 "
        "--max_steps 2 --per_device_train_batch_size 8 --save_strategy steps --save_steps 1 "
        "--push_to_hub --hub_model_id someone/tool-user --hub_token hf_secret"
    )
    script, config, model = parse_arguments(flags.split())
    for name in ("run.yaml", "summary.json"):
        (out / name).write_text(str(tmp_path))
    try:
        TrainingRun(script, config, model, Terminal(None, io.StringIO(), quiet=False)).run()
    finally:
        monkeypatch.undo()
        transformers.utils.hub._hf_api = None
    pushed = hub.files("models", "someone/tool-user")
    assert "Model save" in hub.commits and any("Training in progress, step" in text for text in hub.commits)
    assert pushed["model.safetensors"] == (out / "model.safetensors").read_bytes()
    said: Any = HubCard(pushed["README.md"].decode()).data
    assert {"trl", "grpo"} <= set(said.tags), "TRL's model card"
    measured = {one.dataset_name for one in said.eval_results}
    assert measured == {"arithmetic"}, "it was pushed again with what was measured"
    assert b"hf_secret" not in b"".join(pushed.values())
    assert (out / "episodes.jsonl").exists()
    private = [path for path in pushed if path.endswith((".jsonl", ".log", "_args.bin", "run.yaml", "summary.json"))]
    assert not private, "episodes, logs, the token and folders of this machine stay at home"
    copy = tmp_path / "copy"
    for path, content in pushed.items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(content)
    assert AutoModelForCausalLM.from_pretrained(copy).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(copy).chat_template == AutoTokenizer.from_pretrained(out).chat_template
