"""The parts of `gpu_proof.py`, in the order in which they run. What a part needs is imported in its own process alone."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _gpu_place import Figure, Part, Place

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[[Place], Iterator[Figure]]
FOUR_BITS = ("bitsandbytes", "vllm_bnb_plugin")


def contract(engine: str) -> Run:
    """The cases that every engine keeps, over this one: the tests of the repository."""

    def run(place: Place) -> Iterator[Figure]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            tests = ("tests/engines/test_engine_contract.py", "-k", engine, "-p", "no:cacheprovider")
            subprocess.run([sys.executable, "-m", "pytest", *tests, f"--junitxml={report}"], cwd=ROOT)
            suite = next(ElementTree.parse(report).iter("testsuite"))
        counted = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        yield Figure(
            "passed", counted["tests"] - sum(counted[name] for name in counted if name != "tests"), at_least=10
        )
        yield Figure("failed", counted["failures"] + counted["errors"], at_most=0)
        yield Figure("skipped", counted["skipped"])

    return run


def environment(place: Place) -> Iterator[Figure]:
    """What there is: each part says what it misses of it."""
    import torch

    yield Figure("CUDA of PyTorch", float(torch.version.cuda or 0), at_least=1 if place.device == "cuda" else None)
    for number in range(place.n_gpus):
        card = torch.cuda.get_device_properties(number)
        yield Figure(f"GPU {number}, {card.name}: compute capability", card.major + card.minor / 10, at_least=7.5)
        yield Figure(f"GPU {number}: free", torch.cuda.mem_get_info(number)[0] / 2**30, "GiB")
    for name in ("vllm", "trl", "peft", "deepspeed", "bitsandbytes", "vllm_bnb_plugin", "pytest", "pynvml"):
        yield Figure(f"{name} is installed", float(find_spec(name) is not None))
    yield Figure("free disk", shutil.disk_usage(tempfile.gettempdir()).free / 2**30, "GiB")


def nano(place: Place) -> Iterator[Figure]:
    """`make train`'s job, as a user starts it."""
    launch = "cpu" if place.device == "cpu" else "single_gpu"
    small = [*("--max_steps", "2", "--eval_questions", "8"), *("--per_device_train_batch_size", "16")]
    small += ["--engine", "transformers"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", f"recipes/accelerate/{launch}.yaml", "recipes/train.py"),
            *("--config", "recipes/configs/nano.yaml", "--output_dir", folder, *(small if place.tiny else ())),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    yield Figure("steps", summary["steps"], at_least=2 if place.tiny else 110)
    yield Figure("greedy held-out success before", summary["before"]["greedy"]["rate"])
    yield Figure("after", summary["after"]["greedy"]["rate"], at_least=None if place.tiny else 0.88)
    yield Figure("a step", summary["seconds_per_step"]["all"], "s")


def of(module: str, name: str, **options: Any) -> Run:
    """A part of one of the files beside this one, with these options."""

    def run(place: Place) -> Iterator[Figure]:
        made: Iterator[Figure] = getattr(importlib.import_module(module), name)(place, **options)
        return made

    return run


def engines(name: str, **options: Any) -> Run:
    return of("_gpu_engines", name, **options)


def training(name: str, **options: Any) -> Run:
    return of("_gpu_training", name, **options)


def processes(about: str, launch: str, n: int = 2, job: Any = None, **config: Any) -> Part:
    """A part that needs as many GPUs as processes, or none."""
    run = training("processes", launch=launch, n=n, job=job or {}, config={"max_steps": 2, **config})
    return Part(about=about, limit_s=1200, gpus=n, on_cpu=True, modules=("vllm",), run=run)


def with_vllm(about: str, limit_s: float, run: Run, gpus: int = 0, *modules: str) -> Part:
    return Part(about=about, limit_s=limit_s, gpus=gpus, modules=("vllm", *modules), run=run)


def recipe(name: str, config: str) -> Part:
    return with_vllm(f"Memory of the {name} recipe", 1800, training("recipe", config=config))


def alone(about: str, limit_s: float, run: Run) -> Part:
    return Part(about=about, limit_s=limit_s, run=run)


# In the 16 bits in which vLLM's kernels for GPUs compute adapters; and at a rate at which no token is off.
ADAPTER: dict[str, Any] = {"vllm_lora_sync": "adapter", "learning_rate": 3e-2, "bf16": True}
STALE: dict[str, Any] = {"max_staleness": 1, "max_steps": 4, "learning_rate": 0.0, "rollout_correction": "trl"}

PARTS: dict[str, Part] = {  # the most valuable first, for a GPU that is lent for some minutes
    "environment": alone("What is installed", 60, environment),
    "exactness": alone("Shared pass: exact", 600, of("_gpu_shared_pass", "exactness")),
    "speed_whole": alone("Shared and TRL's pass, 1.5B shape", 1800, of("_gpu_shared_pass", "speed", whole=True)),
    "speed": alone("The same at a small shape", 1200, of("_gpu_shared_pass", "speed")),
    "kept": alone("Shared pass that keeps its activations", 600, of("_gpu_shared_pass", "kept")),
    "whole_step": with_vllm("Whole steps beside TRL's trainer", 3600, training("whole_step")),
    "adapter": processes("An adapter alone to vLLM", "single_gpu", 1, {"lora": True}, **ADAPTER),
    "steps_lora": with_vllm("20 steps of a 1.5B shape, LoRA, bf16", 1800, training("steps", lora=True)),
    "steps_full": with_vllm("20 steps of a 1.5B shape, all weights", 1800, training("steps", lora=False)),
    "contract_server": with_vllm("Engine contract: a vLLM server, weights by disk", 1500, contract("vllm_server"), 1),
    "ipc": with_vllm("Weights to a server by IPC", 1200, engines("transfer", backend="ipc"), 1),
    "nccl": with_vllm("Weights to a server by NCCL", 1200, engines("transfer", backend="nccl"), 2),
    "memory_financial": recipe("financial", "financial_qwen2.5_0.5b"),
    "memory_aime": recipe("AIME", "aime_qwen2.5_0.5b"),
    "flex": alone("Shared attention beside FlexAttention", 1200, of("_gpu_shared_pass", "flex")),
    "four_bits": with_vllm(
        "The same, LoRA over 4 bits", 1800, training("steps", lora=True, packed=True), 0, *FOUR_BITS
    ),
    "contract_transformers": alone("Engine contract: transformers", 900, contract("transformers")),
    "contract_colocate": with_vllm("Engine contract: vLLM in the process", 1200, contract("vllm_colocate"), 1),
    "nano": alone("nano is trained", 1800, nano),
    "sleep": with_vllm("Sleep mode", 900, engines("sleep"), 1),
    "overlap": processes("Two processes, max_staleness 1", "multi_gpu", **STALE),
    "fsdp2": processes("Two processes, FSDP2", "fsdp2"),
    "zero3": processes("Two processes, ZeRO-3", "zero3"),
    "difference_bf16": with_vllm("Log-probability difference by length, bf16", 1200, engines("difference", bits=16)),
    "difference_fp32": with_vllm("Log-probability difference by length, fp32", 1200, engines("difference", bits=32)),
}
