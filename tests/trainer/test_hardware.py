"""A flag wins over a launch file, the engine follows the accelerator, and what a machine cannot do is refused.

Real launches of several processes: tests/trainer/test_scale_backends.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator

from tests.support.trainings import by_length, varied
from toolgrpo.engines.policy import Backend, compute_dtype
from toolgrpo.errors import ConfigError
from toolgrpo.testing.trainers import tiny_trainer
from toolgrpo.trainer import hardware

VARIABLE = "ACCELERATE_MIXED_PRECISION"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    of_deepspeed = ("ACCELERATE_USE_DEEPSPEED", "LOCAL_RANK", "TORCH_EXTENSIONS_DIR")
    for name in (VARIABLE, "ACCELERATE_USE_CPU", "WORLD_SIZE", *of_deepspeed):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("bf16", "launch_file", "on_cpu", "settled", "left"),
    [
        (None, None, True, False, None),  # fp32 is what a CPU is quick in
        (None, "bf16", True, True, "bf16"),  # asked for in the launch file
        (None, "no", True, False, "no"),
        (None, "bf16", False, None, "bf16"),  # TRL's own default
        (False, "bf16", False, False, "no"),  # the flag wins
        (False, "bf16", True, False, "no"),
        (True, "no", False, True, "no"),  # Transformers lets a true flag win by itself
    ],
)
def test_precision(bf16: bool | None, launch_file: str | None, on_cpu: bool, settled: bool | None, left: Any) -> None:
    with mock.patch.dict(os.environ, {VARIABLE: launch_file} if launch_file else {}):
        assert hardware.settled_precision(bf16, False, on_cpu=on_cpu) == (settled, False)
        assert os.environ.get(VARIABLE) == left


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("launch", "given", "settled"),
    [
        ({}, (False, None, False), (False, None)),
        ({}, (False, None, True), (True, None)),  # Transformers takes bf16 on a CPU from nobody else
        ({"WORLD_SIZE": "2"}, (False, None, False), (True, None)),  # accelerate makes it gloo
        (DEEPSPEED, (False, None, True), (False, None)),
        ({**DEEPSPEED, "WORLD_SIZE": "2"}, (False, None, True), (False, "gloo")),
        ({**DEEPSPEED, "WORLD_SIZE": "2"}, (False, "mpi", False), (False, "mpi")),
    ],
)
def test_what_a_cpu_trains_with(launch: Any, given: Any, settled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with mock.patch.dict(os.environ, launch):
        assert hardware.settled_cpu(*given) == settled


def test_a_lock_that_deepspeed_waits_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_python = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    lock = tmp_path / "torch_extensions" / of_python / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for launch, named in (
        ({}, True),
        ({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, False),  # another folder
        ({"TORCH_EXTENSIONS_DIR": str(lock.parents[1]), "LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),  # one process says it
        ({"ACCELERATE_USE_DEEPSPEED": "false"}, False),
    ):
        caplog.clear()
        with mock.patch.dict(os.environ, {**DEEPSPEED, "XDG_CACHE_HOME": str(tmp_path), **launch}):
            hardware.settled_cpu(True, None, False)
        assert (str(lock) in caplog.text) is named, launch


def test_the_cpu_may_train_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not hardware.trains_on_cpu(False) and hardware.trains_on_cpu(True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # what cpu.yaml says
    assert hardware.trains_on_cpu(False)


def have_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu if isinstance(gpu, int) else gpu.index]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla V100")


def test_a_gpu_without_bf16_trains_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "bf16")  # as recipes/accelerate/single_gpu.yaml says for every GPU
    for capabilities, given, settled in (
        ([(8, 0)], (None, False), (None, False)),  # bf16, by TRL's default
        ([(9, 0), (7, 5)], (None, False), (None, True)),  # a T4: the weakest decides for all processes
        ([(7, 5)], (True, False), (True, False)),  # emulated, as asked
        ([(7, 5)], (False, False), (False, False)),  # fp32 is asked for
    ):
        have_gpus(monkeypatch, *capabilities)
        assert hardware.settled_precision(*given, on_cpu=False) == settled, (capabilities, given)


def test_fp16_needs_a_gpu_that_something_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"fp16.*GPU"):
        hardware.settled_precision(None, True, on_cpu=True)
    have_gpus(monkeypatch, (7, 0))
    for fp16 in (False, True):
        with pytest.raises(ConfigError, match=r"Tesla V100.*7\.0.*7\.5"):
            hardware.settled_precision(None, fp16, on_cpu=False)


def test_a_precision_that_costs_time_or_range_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, (7, 5), (8, 0))
    line = hardware.precision_line(torch.float16, torch.device("cuda", 0)) or ""
    assert "capability 7.5, and bf16 needs 8.0" in line
    assert hardware.precision_line(torch.float16, torch.device("cuda", 1)) is None
    assert hardware.precision_line(torch.bfloat16, torch.device("cuda", 0)) is None
    assert "7.4 times" in (hardware._line_of(7.4) or "")
    assert hardware._line_of(0.2) is None, "a CPU that has bf16 is quicker in it"
    n_threads = torch.get_num_threads()
    assert hardware.bf16_factor() > 0, "measured, whatever it is on this machine"
    assert torch.get_num_threads() == n_threads


def moved_by(folder: Path, scale: float | None = None) -> tuple[dict[str, torch.Tensor], Any, set[torch.dtype]]:
    """Train two steps through the shared pass, with a scale in fp16: how weights moved, the scaler, the dtypes computed in.

    accelerate brings autocast and scaler to a GPU only, so they are put where it would put them; the rest is its own.
    """
    dtypes: set[torch.dtype] = set()
    with tiny_trainer(folder, by_length, varied, prefix_sharing="on", learning_rate=1e-3) as trainer:
        accelerator = trainer.accelerator
        if scale is not None:
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
        projection = trainer.model.model.layers[0].mlp.up_proj
        projection.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        with mock.patch.object(accelerator.state, "_mixed_precision", "no" if scale is None else "fp16"):
            trainer.train()
            after = dict(accelerator.unwrap_model(trainer.model).named_parameters())
        return {name: after[name].detach() - weight for name, weight in before.items()}, accelerator.scaler, dtypes


def test_fp16_trains_through_the_shared_pass_with_a_scaled_loss(tmp_path: Path) -> None:
    exact, _, _ = moved_by(tmp_path / "fp32")
    half, _, dtypes = moved_by(tmp_path / "fp16", 2.0**16)
    assert dtypes == {torch.float16}
    for name, moved in half.items():
        assert torch.cosine_similarity(moved.flatten(), exact[name].flatten(), 0) > 0.95, name
    lost, scaler, _ = moved_by(tmp_path / "overflow", 2.0**40)
    assert not any(moved.any() for moved in lost.values()), "a step whose gradients overflow is left out"
    assert scaler.get_scale() == 2.0**38, "and the scale is halved, twice"


def test_the_engine_computes_in_what_the_accelerator_says() -> None:
    model = torch.nn.Linear(2, 2)
    assert compute_dtype(model, "no") is torch.float32
    assert compute_dtype(model, "bf16") is torch.bfloat16 and compute_dtype(model, "fp16") is torch.float16
    packed = torch.nn.Module()
    packed.register_parameter("packed", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    packed.register_parameter("norm", torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    assert compute_dtype(packed, "no") is torch.bfloat16, "of weights that are packed as bytes"


def test_a_driver_that_is_too_old_is_no_want_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, device = tmp_path / "version", tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for version, cuda, hidden in (
        ("580.65.06", "13.0", {}),  # something else keeps the GPU away
        ("535.104.05", None, {}),  # a PyTorch for CPUs
        ("535.104.05", "13.0", {"CUDA_VISIBLE_DEVICES": ""}),  # the GPU is hidden on purpose
    ):
        driver.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sat Aug 19 01:15:15 UTC 2023\n")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with mock.patch.dict(os.environ, hidden):
            hardware.refuse_old_driver(driver, device)
    with pytest.raises(ConfigError, match=r"535\.104\.05.*580.*--use_cpu true"):
        hardware.refuse_old_driver(driver, device)
    hardware.refuse_old_driver(tmp_path / "none", device)


def test_training_on_another_backend_than_was_asked_for_is_refused() -> None:
    alone = Accelerator(cpu=True)
    assert hardware.check_backend(alone, {}) == Backend(kind="NO", n_processes=1)
    asked_for_fsdp, started_two = {"ACCELERATE_USE_FSDP": "true"}, {"WORLD_SIZE": "2"}
    wanted = ((asked_for_fsdp, "asked for FSDP"), (DEEPSPEED, "asked for DeepSpeed"), (started_two, "2 .*one process"))
    for launch, named in wanted:
        with pytest.raises(ConfigError, match=named):
            hardware.check_backend(alone, launch)


def test_one_process_does_not_spread_the_model_over_several_gpus() -> None:
    state, device = SimpleNamespace(distributed_type="NO"), SimpleNamespace(type="cuda")
    alone = SimpleNamespace(state=state, num_processes=1, device=device)
    assert hardware.check_backend(alone, {}, n_gpus=1).kind == "NO"
    with pytest.raises(ConfigError, match=r"4 GPUs.*CUDA_VISIBLE_DEVICES=0"):
        hardware.check_backend(alone, {}, n_gpus=4)
    assert hardware.check_backend(Accelerator(cpu=True), {}, n_gpus=4).kind == "NO", "the CPU trains, whatever there is"
