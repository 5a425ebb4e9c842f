"""Every file in recipes/configs is loaded, and all that differ in more than a name run for a step, so none can rot.

What is replaced: the model (nano, with room for long prompts), the length of episodes, hub data (rows in the same original
format from disk), the engine (transformers), and the size of a batch. All else is the recipe's own: tools, rewards, LoRA,
loss.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun
from toolgrpo.errors import ToolGRPOError
from toolgrpo.observe.records import read_episodes

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path for folder in ("configs", "sources", "sql_explorer") for path in (ROOT / "recipes" / folder).glob("*.yaml")
)
REAL = ROOT.parent / "shared" / "data"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
ON_A_CPU = ("--bf16", "false", "--use_cpu", "true")
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

# What is published elsewhere and repeated by these recipes; a number here changes only together with its file.
PUBLISHED: dict[str, dict[str, Any]] = {
    "financial": {
        **{"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "learning_rate": 5e-7, "num_train_epochs": 3},
        **{"tools_script": "tools_funcs/financial_tools_complex.py", "reward_fn": "rewards/financial_tools_reward.py"},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_completion_length": 512},
    },
    "gsm8k_qwen3_1.7b": {
        **{"lora_r": 16, "lora_alpha": 32, "learning_rate": 1e-5, "num_generations": 4, "beta": 0.1},
        **{"enable_thinking": True, "tools_script": "tools_funcs/calculator_tools.py", "reward": ["gsm8k"]},
    },
    "aime_qwen2.5_0.5b": {
        **{"lora_r": 128, "engine": "vllm_colocate", "report_to": "wandb"},
        **{"tools_script": "tools_funcs/python_tools.py", "reward": ["math", "tool_use"]},
    },
}


def flat(path: Path) -> dict[str, Any]:
    return {key: value for heading in yaml.safe_load(path.read_text()).values() for key, value in heading.items()}


def offline_data(spec: str, folder: Path) -> str:
    """The same format from disk, for a recipe that would ask the hub; of a mixture, a copy in this folder."""
    if spec.startswith("outputs/sources/"):  # a script writes these
        rows = ROOT / "recipes" / "sources" / "source_rows.py"
        subprocess.run([sys.executable, str(rows), str(folder)], check=True, timeout=60)
        return str(folder / Path(spec).name)
    ours = {
        name: ROOT / "recipes" / "data" / f"{name}_{n}.jsonl" for name, n in (("gsm8k", 30), ("mbpp", 10), ("aime", 10))
    }
    real = {"gsm8k": REAL / "gsm8k_train_40.jsonl", "mbpp": REAL / "mbpp_sanitized_30.jsonl"}
    if spec == "recipes/data/mbpp_with_examples.yaml":
        text = (ROOT / spec).read_text().replace("data: mbpp\n", f"data: mbpp:{ours['mbpp']}\n")
        (folder / "mixture.yaml").write_text(text)
        return str(folder / "mixture.yaml")
    files = ours | {name: file for name, file in real.items() if file.exists()}
    return f"{spec}:{files[spec]}" if spec in files else spec


@pytest.fixture(autouse=True)
def wandb_runs_end() -> Iterator[None]:
    """A run that a recipe opened must not be the one that the next test writes to."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()


@pytest.fixture(scope="module")
def roomy_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano with a longer context: its vocabulary is small, so the schemas of eight tools fill 2,048 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toolgrpo.models import NANO

    folder = tmp_path_factory.mktemp("models") / "roomy-nano"
    model = AutoModelForCausalLM.from_pretrained(NANO)
    model.config.max_position_embeddings = 16384
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_keeps_its_promise(path: Path, tmp_path: Path) -> None:
    assert flat(path) | PUBLISHED.get(path.stem, {}) == flat(path)
    _, config, _ = parse_arguments(["--config", str(path), *ON_A_CPU, "--output_dir", str(tmp_path)])
    assert config.generation_batch_size // config.num_generations >= 2, "a batch of several tasks"


# `test_train_command.py` trains nano; with its model replaced smollm2_135m is the same run, and mbpp_qwen3_1.7b is its
# neighbour without the worked examples.
TRAINED_ELSEWHERE = ("nano", "smollm2_135m", "mbpp_qwen3_1.7b")


@pytest.mark.parametrize(
    "path", [one for one in CONFIGS if one.stem not in TRAINED_ELSEWHERE], ids=lambda path: path.stem
)
def test_a_recipe_trains(path: Path, roomy_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    recipe, out = flat(path), tmp_path / "out"
    shown = io.StringIO()
    script, config, model = parse_arguments(
        [
            *("--config", str(path), "--model_name_or_path", str(roomy_nano), "--output_dir", str(out)),
            *("--dataset_id_or_path", offline_data(recipe["dataset_id_or_path"], tmp_path)),
            *("--eval_questions", "0", "--eval_share", "0"),  # nothing is measured
            *("--max_steps", "1", "--max_completion_length", "40", "--engine", "transformers"),
            *(*ON_A_CPU, "--dtype", "float32", "--save_strategy", "no"),
            *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1", "--num_generations", "2"),
        ]
    )
    summary = TrainingRun(script, config, model, Terminal(None, shown, quiet=False)).run()
    assert summary is not None and summary["steps"] == 1
    (log,) = [log for log in json.loads((out / "trainer_state.json").read_text())["log_history"] if "reward" in log]
    episodes = read_episodes(Path(summary["episodes"]))
    assert len(episodes) == config.generation_batch_size
    check_spread(log, [e["reward_given"] for e in episodes], config.num_generations)
    if recipe.get("use_peft"):
        adapter = json.loads((out / "adapter_config.json").read_text())
        assert (adapter["r"], adapter["lora_alpha"]) == (recipe["lora_r"], recipe["lora_alpha"])
        with safe_open(out / "adapter_model.safetensors", "pt") as weights:
            assert {name.split(".")[-3] for name in weights.keys()} == PROJECTIONS  # noqa: SIM118  # it is no dict
    assert all(f"{word:<10}" in shown.getvalue() for word in ("tools", "reward", "model", "data"))
    if path.stem == "financial_qwen2.5_0.5b":
        offered = shown.getvalue().partition("reward    ")[0]
        assert len(re.findall(r"\w\(", offered)) == 8, "eight financial tools"


def check_spread(log: dict[str, Any], rewards: list[float], group: int) -> None:
    """What is logged about a batch's rewards is what its episodes were given."""
    groups = [rewards[start : start + group] for start in range(0, len(rewards), group)]
    alike = sum(max(rewards) - min(rewards) < 1e-6 for rewards in groups)
    assert log["reward"] == pytest.approx(fmean(rewards), abs=1e-6)
    assert (log["reward/min"], log["reward/max"]) == pytest.approx((min(rewards), max(rewards)))
    assert log["reward/groups_without_spread"] == pytest.approx(alike / len(groups))
    assert log["reward_std"] >= 0.0


SAYS_WORDS = 'for a in "$@"; do echo "$a"; done'


def test_the_launch_script_passes_its_arguments_on(tmp_path: Path) -> None:
    """With an `accelerate` of our own on PATH, which writes down what it is given."""
    own, clone = tmp_path / "own", tmp_path / "copy" / "recipes"
    clone.mkdir(parents=True)
    for name in ("accelerate", "configs"):
        (clone / name).symlink_to(ROOT / "recipes" / name)
    (clone / "evaluate.py").touch()
    (own / "recipes").mkdir(parents=True)
    (own / "recipes" / "train.py").touch()  # of hers, with the name of ours
    (own / "mine.py").touch()
    script = clone / "launch.sh"
    script.write_text((ROOT / "recipes" / "launch.sh").read_text())

    def program(name: str, does: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)

    def launch(*words: str, does: str = SAYS_WORDS, **environment: str) -> subprocess.CompletedProcess[str]:
        program("accelerate", does)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}
        return subprocess.run(["bash", str(script), *words], env=env, cwd=own, capture_output=True, text=True)

    done = launch("--config", "my file.yaml", "--max_steps", "2", LAUNCH="zero2", PROCESSES="3")
    assert done.stdout.split("\n")[:-1] == [
        *("launch", "--quiet", "--config_file", f"{clone}/accelerate/zero2.yaml", "--num_processes", "3"),
        *(f"{clone}/train.py", "--config", "my file.yaml", "--max_steps", "2"),
    ]
    assert launch("--config", "f", does="pwd").stdout.strip() == str(own), "her folder, not the clone's"
    cpu = launch(LAUNCH="cpu", SCRIPT="recipes/evaluate.py").stdout.split()
    assert cpu == ["launch", "--quiet", "--config_file", f"{clone}/accelerate/cpu.yaml", f"{clone}/evaluate.py"]
    assert launch(LAUNCH="cpu", SCRIPT="mine.py").stdout.split()[-1] == "mine.py"
    threads = 'echo "$OMP_NUM_THREADS"'
    assert launch("--config", "f", does=threads, LAUNCH="cpu", OMP_NUM_THREADS="7").stdout.strip() == "7"
    if shutil.which("lscpu"):  # as many as the launcher would take, and without its four lines about them
        of = {n: launch("--config", "f", does=threads, LAUNCH="cpu", PROCESSES=n).stdout for n in ("1", "999")}
        assert int(of["1"]) >= 1 and int(of["999"]) == 1
    check_defaults(lambda *words: launch(*words, LAUNCH="cpu").stdout.splitlines())
    alone = launch("--tools_script", "tools_funcs/math_tools.py")
    assert alone.returncode == 2 and "tools of your own want rows of your own" in alone.stderr
    program("nvidia-smi", 'for gpu in 0 1 2 3; do echo "GPU $gpu: of this test"; done')
    gpus = 'echo "$CUDA_VISIBLE_DEVICES|$*"'
    assert launch("--config", "f", does=gpus, LAUNCH="single_gpu").stdout == (
        f"0|launch --quiet --config_file {clone}/accelerate/single_gpu.yaml {clone}/train.py --config f\n"
    )
    one = launch("--config", "f", does=gpus, LAUNCH="single_gpu", CUDA_VISIBLE_DEVICES="2,3")
    assert one.stdout.startswith("2|")
    assert f"multi_gpu.yaml --num_processes 4 {clone}" in launch("--config", "f", does=gpus).stdout
    assert "multi_gpu.yaml --num_processes 2" in launch("--config", "f", does=gpus, CUDA_VISIBLE_DEVICES="2,3").stdout
    for none in ("", "-1"):
        assert "cpu.yaml" in launch("--config", "f", does=gpus, CUDA_VISIBLE_DEVICES=none).stdout
    program("nvidia-smi", 'echo "NVIDIA-SMI has failed"; exit 9')
    assert "cpu.yaml" in launch("--config", "f", does=gpus).stdout
    wrong = launch(LAUNCH="gpu")
    assert wrong.returncode == 2 and f"there is no {clone}/accelerate/gpu.yaml" in wrong.stderr


def check_defaults(launch: Callable[..., list[str]]) -> None:
    """Model, tools, reward and data default one by one, in a line each."""
    own = {"model": "model_name_or_path", "tools": "tools_script", "reward": "reward_fn", "data": "dataset_id_or_path"}
    config = flat(ROOT / "recipes" / "configs" / "financial.yaml")
    for share in product((False, True), repeat=4):
        given = {name: flag for (name, flag), mine in zip(own.items(), share, strict=True) if mine}
        if "tools" in given and "data" not in given:
            continue
        lines = launch(*(word for flag in given.values() for word in (f"--{flag}", "mine")))
        words = lines[len(lines) - lines[::-1].index("launch") :]
        assert {name for name in own if any(line.startswith(f"{name:<9} ") for line in lines)} == own.keys() - given
        assert Counter(words)["mine"] == len(given)
        assert all(words.count(f"--{own[name]}") == 1 for name in ("model", "tools", "data"))
        taken = parse_flags(words[next(n for n, word in enumerate(words) if word.endswith("train.py")) + 1 :])
        rewards = {key: taken.get(key) for key in ("reward", "reward_fn")}
        if "reward" not in given:
            of_example = {"reward": None, "reward_fn": [config["reward_fn"]]}
            assert rewards == ({"reward": ["accuracy"], "reward_fn": None} if "data" in given else of_example)
        for key in config.keys() - own.values():
            wanted = "data" not in given if key.startswith("eval_") else "model" not in given
            assert (key in taken) == wanted and (not wanted or taken[key] == config[key]), (key, given)


def parse_flags(words: list[str]) -> dict[str, Any]:
    from toolgrpo.commands.main import read

    return dict(read("train", words).right())


def test_the_example_data_is_what_its_rewards_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    from toolgrpo.data import load_tasks
    from toolgrpo.rewards import check_gold, get_reward

    for name, reward, n in (("gsm8k", "gsm8k", 30), ("aime", "math", 10), ("mbpp", "code_exec", 10)):
        assert check_gold(load_tasks(f"{name}:recipes/data/{name}_{n}.jsonl"), get_reward(reward)) == n
    rows = load_tasks("recipes/data/multi_tool_mixture.yaml")
    assert Counter(row["task"] for row in rows) == {"finance": 45, "word_problems": 30, "competition": 7, "programs": 7}
    assert {row["task"]: row["tools"] for row in rows}["word_problems"] == ["calculator"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--use_peft", "--lora_target_modules", "q_proj", "nope"], "nope; it has down_proj"),
        (["--attn_implementation", "nope"], "is not supported"),
        (["--reward", "gsm8k", "--reward_weights", "1", "--dataset_id_or_path", "BAD", "--dry_run"], "holds no number"),
    ],
)
def test_what_libraries_and_checks_say_against_a_run_is_one_error(
    flags: list[str], says: str, roomy_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "q", "answer": "no number"}\n' * 8)
    flags = [str(tmp_path / "bad.jsonl") if flag == "BAD" else flag for flag in flags]
    run = ("--model_name_or_path", str(roomy_nano), "--output_dir", str(tmp_path / "out"), "--engine", "transformers")
    words = ["--config", "recipes/configs/nano.yaml", *run, *ON_A_CPU, "--eval_questions", "0", *flags]
    with pytest.raises(ToolGRPOError, match=says):
        TrainingRun(*parse_arguments(words), Terminal(None, io.StringIO(), quiet=False)).run()
