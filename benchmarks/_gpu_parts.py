"""The parts of `gpu_proof.py`, in the order in which they run. What a part needs is imported in its own process alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

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
    small = (
        "--max_steps",
        "2",
        "--eval_questions",
        "8",
        "--per_device_train_batch_size",
        "16",
        "--engine",
        "transformers",
    )
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


def shared_pass(name: str) -> Run:
    def run(place: Place) -> Iterator[Figure]:
        import _gpu_shared_pass

        parts: dict[str, Run] = {
            "exactness": _gpu_shared_pass.exactness,
            "speed": _gpu_shared_pass.speed,
            "flex": _gpu_shared_pass.flex,
        }
        return parts[name](place)

    return run


def engines(name: str, **options: bool | int) -> Run:
    def run(place: Place) -> Iterator[Figure]:
        import _gpu_engines

        made: Iterator[Figure] = getattr(_gpu_engines, name)(place, **options)
        return made

    return run


PARTS: dict[str, Part] = {
    "contract_transformers": Part(about="Engine contract: transformers", limit_s=900, run=contract("transformers")),
    "contract_colocate": Part(
        about="Engine contract: vLLM in the process", limit_s=1200, gpus=1, run=contract("vllm_colocate")
    ),
    "contract_server": Part(
        about="Engine contract: a vLLM server, weights through a folder",
        limit_s=1500,
        gpus=1,
        run=contract("vllm_server"),
    ),
    "nano": Part(about="nano is trained", limit_s=1800, run=nano),
    "exactness": Part(about="Shared pass: exact", limit_s=600, run=shared_pass("exactness")),
    "speed": Part(about="Shared pass: speed with SDPA, beside TRL's pass", limit_s=1200, run=shared_pass("speed")),
    "flex": Part(about="Shared attention beside FlexAttention", limit_s=1200, run=shared_pass("flex")),
    "sleep": Part(about="Sleep mode", limit_s=900, gpus=1, run=engines("sleep")),
    "nccl": Part(about="Weights to a server by NCCL", limit_s=1200, gpus=2, run=engines("nccl")),
    "steps_full": Part(
        about="20 steps of a 1.5B shape, all weights, bf16", limit_s=1800, run=engines("steps", lora=False)
    ),
    "steps_lora": Part(about="20 steps of a 1.5B shape, LoRA, bf16", limit_s=1800, run=engines("steps", lora=True)),
    "difference_bf16": Part(
        about="Log-probability difference by length, bf16", limit_s=1200, run=engines("difference", bits=16)
    ),
    "difference_fp32": Part(
        about="Log-probability difference by length, fp32", limit_s=1200, run=engines("difference", bits=32)
    ),
}
