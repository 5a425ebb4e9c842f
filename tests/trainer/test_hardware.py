"""A flag wins over a launch file, and the engine follows the accelerator, not the flag."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from toolgrpo.engines.policy import compute_dtype
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.hardware import (
    _line_of,
    bf16_factor,
    refuse_old_driver,
    settled_bf16,
    settled_cpu,
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
    assert settled_bf16(bf16, False, on_cpu=on_cpu) is settled
    assert os.environ.get(VARIABLE) == left


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


def test_the_cpu_may_train_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not trains_on_cpu(False) and trains_on_cpu(True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # what cpu.yaml says
    assert trains_on_cpu(False)


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
