"""The parts of `gpu_proof.py`, in the order in which they run. What a part needs is imported in its own process alone."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _gpu_place import Figure, Part, Place

__all__ = ["PARTS", "Figure", "Part", "Place"]

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[[Place], Iterator[Figure]]


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
    return Part(about=about, limit_s=1200, gpus=n, on_cpu=True, run=run)


STALE: dict[str, Any] = {
    "max_staleness": 1,
    "max_steps": 4,
    "learning_rate": 0.0,
    "rollout_correction": "trl",
}  # no token is off then

PARTS: dict[str, Part] = {
    "contract_transformers": Part(about="Engine contract: transformers", limit_s=900, run=contract("transformers")),
    "contract_colocate": Part(
        about="Engine contract: vLLM in the process", limit_s=1200, gpus=1, run=contract("vllm_colocate")
    ),
    "contract_server": Part(
        about="Engine contract: a vLLM server, weights by disk", limit_s=1500, gpus=1, run=contract("vllm_server")
    ),
    "nano": Part(about="nano is trained", limit_s=1800, run=nano),
    "exactness": Part(about="Shared pass: exact", limit_s=600, run=of("_gpu_shared_pass", "exactness")),
    "speed": Part(about="Shared pass beside TRL's pass", limit_s=1200, run=of("_gpu_shared_pass", "speed")),
    "speed_whole": Part(
        about="The same at a 1.5B shape", limit_s=1800, run=of("_gpu_shared_pass", "speed", whole=True)
    ),
    "flex": Part(about="Shared attention beside FlexAttention", limit_s=1200, run=of("_gpu_shared_pass", "flex")),
    "sleep": Part(about="Sleep mode", limit_s=900, gpus=1, run=engines("sleep")),
    "ipc": Part(about="Weights to a server by IPC", limit_s=1200, gpus=1, run=engines("transfer", backend="ipc")),
    "nccl": Part(about="Weights to a server by NCCL", limit_s=1200, gpus=2, run=engines("transfer", backend="nccl")),
    "adapter": processes(
        "An adapter alone to vLLM",
        "single_gpu",
        1,
        {"lora": True},
        vllm_lora_sync="adapter",
        learning_rate=3e-2,
        bf16=True,  # vLLM's kernels for GPUs compute adapters in 16 bits
    ),
    "overlap": processes("Two processes, max_staleness 1", "multi_gpu", **STALE),
    "fsdp2": processes("Two processes, FSDP2", "fsdp2"),
    "zero3": processes("Two processes, ZeRO-3", "zero3"),
    "steps_full": Part(about="20 steps of a 1.5B shape, all weights", limit_s=1800, run=training("steps", lora=False)),
    "steps_lora": Part(about="20 steps of a 1.5B shape, LoRA, bf16", limit_s=1800, run=training("steps", lora=True)),
    "memory_financial": Part(
        about="Memory of the financial recipe", limit_s=1800, run=training("recipe", config="financial_qwen2.5_0.5b")
    ),
    "memory_aime": Part(
        about="Memory of the AIME recipe", limit_s=1800, run=training("recipe", config="aime_qwen2.5_0.5b")
    ),
    "whole_step": Part(about="Whole steps beside TRL's trainer", limit_s=3600, run=training("whole_step")),
    "difference_bf16": Part(
        about="Log-probability difference by length, bf16", limit_s=1200, run=engines("difference", bits=16)
    ),
    "difference_fp32": Part(
        about="Log-probability difference by length, fp32", limit_s=1200, run=engines("difference", bits=32)
    ),
}
