"""A flag wins over a launch file, and the engine follows the accelerator, not the flag."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from toolgrpo.engines.policy import compute_dtype
from toolgrpo.errors import ConfigError
from toolgrpo.testing import ByteChat
from toolgrpo.testing.trainers import tiny_trainer
from toolgrpo.trainer.hardware import (
    _line_of,
    bf16_factor,
    precision_line,
    refuse_old_driver,
    settled_cpu,
    settled_precision,
    trains_on_cpu,
)

VARIABLE = "ACCELERATE_MIXED_PRECISION"


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
def test_precision(
    bf16: bool | None,
    launch_file: str | None,
    on_cpu: bool,
    settled: bool | None,
    left: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if launch_file is not None:
        monkeypatch.setenv(VARIABLE, launch_file)
    assert settled_precision(bf16, False, on_cpu=on_cpu) == (settled, False)
    assert os.environ.get(VARIABLE) == left
    with pytest.raises(ConfigError, match=r"fp16.*GPU"):
        settled_precision(bf16, True, on_cpu=True)


@pytest.mark.parametrize(
    ("environment", "given", "settled"),
    [
        ({}, (False, None, False), (False, None)),
        ({}, (False, None, True), (True, None)),  # Transformers takes bf16 on a CPU from nobody else
        ({"WORLD_SIZE": "2"}, (False, None, False), (True, None)),  # accelerate makes it gloo
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, (False, None, True), (False, None)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}, (False, None, True), (False, "gloo")),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}, (False, "mpi", False), (False, "mpi")),
    ],
)
def test_what_a_cpu_trains_with(
    environment: dict[str, str],
    given: tuple[bool, str | None, bool],
    settled: tuple[bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert settled_cpu(*given) == settled


def test_a_lock_that_deepspeed_waits_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name in ("LOCAL_RANK", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of_python = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    lock = tmp_path / "torch_extensions" / of_python / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)

    def said() -> bool:
        caplog.clear()
        settled_cpu(True, None, False)
        return str(lock) in caplog.text

    assert not said(), "no lock"
    lock.touch()
    assert said()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not said(), "another folder"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    assert said()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not said(), "one process says it"
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    assert not said()


def test_the_cpu_may_train_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not trains_on_cpu(False) and trains_on_cpu(True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # what cpu.yaml says
    assert trains_on_cpu(False)


@pytest.mark.parametrize(
    ("capabilities", "given", "settled"),
    [
        ([(8, 0)], (None, False), (None, False)),  # bf16, by TRL's default
        ([(7, 5)], (None, False), (None, True)),  # a T4, and nothing is asked for
        ([(9, 0), (7, 5)], (None, False), (None, True)),  # the weakest decides for all processes
        ([(7, 5)], (False, False), (False, False)),  # fp32 is asked for
        ([(7, 5)], (True, False), (True, False)),  # emulated, as asked
        ([(7, 0)], (None, False), None),  # a V100
        ([(7, 0)], (False, True), None),
    ],
)
def test_a_gpu_without_bf16_trains_in_fp16(
    capabilities: list[tuple[int, int]],
    given: tuple[bool | None, bool],
    settled: tuple[bool | None, bool] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "bf16")  # as recipes/accelerate/single_gpu.yaml says for every GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number=0: capabilities[number or 0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla V100")
    if settled is None:
        with pytest.raises(ConfigError, match=r"Tesla V100.*7\.0.*7\.5"):
            settled_precision(*given, on_cpu=False)
    else:
        assert settled_precision(*given, on_cpu=False) == settled


def test_fp16_for_want_of_bf16_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, said in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        line = precision_line(torch.float16, torch.device("cuda", 0))
        assert (line is not None and "capability 7.5, and bf16 needs 8.0: training is in fp16" in line) is said
    assert precision_line(torch.bfloat16, torch.device("cuda", 0)) is None


def moved_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scale: float | None = None
) -> tuple[dict[str, torch.Tensor], Any, set[torch.dtype]]:
    """Train two steps through the shared pass, with a scale in fp16: how weights moved, the scaler, the dtypes computed in.

    accelerate brings autocast and scaler to a GPU only, so they are put where it would put them; the rest is its own.
    """

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(place % 2) for place in range(len(completions))]

    dtypes: set[torch.dtype] = set()
    script: Any = lambda request, n: ByteChat.say("yes" * (1 + n % 3))  # noqa: E731
    with tiny_trainer(folder, reward, script, prefix_sharing="on", learning_rate=1e-3) as trainer:
        accelerator = trainer.accelerator
        if scale is not None:
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
            monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
        projection = trainer.model.model.layers[0].mlp.up_proj
        projection.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        after = dict(accelerator.unwrap_model(trainer.model).named_parameters())
        return {name: after[name].detach() - weight for name, weight in before.items()}, accelerator.scaler, dtypes


def test_fp16_trains_through_the_shared_pass_with_a_scaled_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, _, _ = moved_by(tmp_path / "fp32", monkeypatch)
    half, _, dtypes = moved_by(tmp_path / "fp16", monkeypatch, 2.0**16)
    assert dtypes == {torch.float16}
    for name, moved in half.items():
        assert torch.cosine_similarity(moved.flatten(), exact[name].flatten(), 0) > 0.95, name
    lost, scaler, _ = moved_by(tmp_path / "overflow", monkeypatch, 2.0**40)
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


def test_a_cpu_that_emulates_bf16_says_what_it_costs() -> None:
    assert "takes 7.4 times as long as in fp32" in (_line_of(7.4) or "")
    assert _line_of(0.2) is None, "a CPU that has bf16 is quicker in it"
    n_threads = torch.get_num_threads()
    assert bf16_factor() > 0, "measured, whatever it is on this machine"
    assert torch.get_num_threads() == n_threads


@pytest.mark.parametrize(
    ("version", "cuda", "visible", "refused"),
    [
        ("535.104.05", "13.0", None, True),
        ("580.65.06", "13.0", None, False),  # something else keeps the GPU away
        ("535.104.05", None, None, False),  # a PyTorch for CPUs
        ("535.104.05", "13.0", "", False),  # the GPU is hidden on purpose
    ],
)
def test_a_driver_that_is_too_old_is_no_want_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, visible: str | None, refused: bool
) -> None:
    driver, device = tmp_path / "version", tmp_path / "nvidiactl"
    driver.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sat Aug 19 01:15:15 UTC 2023\n")
    device.touch()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if refused:
        with pytest.raises(ConfigError, match=r"driver 535\.104\.05.* needs 580 or newer.*--use_cpu true"):
            refuse_old_driver(driver, device)
    else:
        refuse_old_driver(driver, device)
    refuse_old_driver(tmp_path / "none", device)
