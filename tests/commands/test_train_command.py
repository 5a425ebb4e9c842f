"""The one command, as a user starts it: real accelerate, real vLLM, real nano, real tool workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolgrpo.engines.vllm_options import vllm_is_for_cpu
from toolgrpo.observe.records import read_episodes

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S + 600)]
COMMAND = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu.yaml"),
    *("recipes/train.py", "--config", "recipes/configs/nano.yaml", "--max_steps", "2", "--eval_questions", "16"),
    *("--per_device_train_batch_size", "16"),
]

# Runs in every Python process of the command: writes down each address that is not this machine.
WATCH = """
import os, sys

open(os.environ["NETWORK_LOG"] + ".armed", "a").close()

def _watch(event, args):
    if event == "socket.connect":
        address = args[1]
        if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
            open(os.environ["NETWORK_LOG"], "a").write(f"connect {address}\\n")
    elif event == "socket.getaddrinfo" and args[0] not in (None, "", "localhost", "127.0.0.1", os.uname().nodename):
        open(os.environ["NETWORK_LOG"], "a").write(f"look up {args[0]}\\n")

sys.addaudithook(_watch)
"""


Trained = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("train")
    (folder / "sitecustomize.py").write_text(WATCH)
    free = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}  # to ask a hub if it would
    env = {**free, "PYTHONPATH": str(folder), "NETWORK_LOG": str(folder / "network.txt")}
    words = [*COMMAND, "--output_dir", str(folder / "out")]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S), folder


def test_it_trains_and_shows_what_a_person_wants_to_see(trained: Trained) -> None:
    done, folder = trained
    assert done.returncode == 0, done.stderr
    engine = "vllm_colocate" if vllm_is_for_cpu() else "transformers"
    wanted = ("add(a: integer, b: integer)", f"engine    {engine} (", "training  2 steps (of ", " 2/2 ")
    for text in (*wanted, "held-out success", "s each with saving and measuring (rollout"):
        assert text in done.stdout
    for noise in ("WARNING", "Warning", "INFO", "%|"):
        assert noise not in done.stdout + done.stderr, "library output belongs in the log"
    assert (folder / "out" / "train.log").read_text().count("reward") > 0


def test_what_it_says_it_wrote_is_there(trained: Trained) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, folder = trained
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["before"]["greedy"]["n"] == 16 and summary["steps"] == 2
    model = AutoModelForCausalLM.from_pretrained(summary["model"])
    assert len(AutoTokenizer.from_pretrained(summary["model"])) <= model.config.vocab_size
    episodes = read_episodes(Path(summary["episodes"]))
    assert len(episodes) == 32
    assert all(len(e["ids"]) == len(e["mask"]) == len(e["logprobs"]) for e in episodes)
    assert any(e["turns"][0]["results"] for e in episodes), "some episode called a tool"


def test_it_talks_to_no_other_machine(trained: Trained) -> None:
    done, folder = trained
    assert done.returncode == 0 and (folder / "network.txt.armed").exists()
    log = folder / "network.txt"
    assert not log.exists(), f"the run reached out: {log.read_text()}"
