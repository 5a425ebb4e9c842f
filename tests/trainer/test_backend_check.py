"""A launch that would train on another backend than the one asked for is refused. Real launches: tests/e2e/test_scale_*."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from toolgrpo.engines.policy import Backend
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.hardware import check_backend


def test_one_plain_process_is_what_it_is() -> None:
    backend = check_backend(Accelerator(cpu=True), {})
    assert backend == Backend(kind="NO", n_processes=1)
    assert str(backend) == "one process" and not backend.splits_parameters


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "asked for FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "asked for DeepSpeed"),
        ({"WORLD_SIZE": "2"}, "started 2 processes, but accelerate set up one process"),
    ],
)
def test_a_silent_fallback_is_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_backend(Accelerator(cpu=True), environment)


def test_one_process_does_not_spread_the_model_over_several_gpus() -> None:
    alone = SimpleNamespace(
        state=SimpleNamespace(distributed_type="NO"), num_processes=1, device=SimpleNamespace(type="cuda")
    )
    assert check_backend(alone, {}, n_gpus=1).kind == "NO"
    with pytest.raises(ConfigError, match=r"4 GPUs.*CUDA_VISIBLE_DEVICES=0"):
        check_backend(alone, {}, n_gpus=4)
    assert check_backend(Accelerator(cpu=True), {}, n_gpus=4).kind == "NO", "the CPU trains, whatever there is"
