"""What an engine cannot do here is refused when the trainer is made, with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from toolgrpo.errors import ConfigError
from toolgrpo.testing import tiny_trainer


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"vllm_tensor_parallel_size": 2}, r"one copy per process.*vllm serve --tensor-parallel-size 2"),
        pytest.param(
            {"vllm_enable_sleep_mode": True},
            "training is on the CPU; leave it out",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can sleep"),
        ),
    ],
)
def test_what_colocated_vllm_cannot_do_here(tmp_path: Path, asked: dict[str, Any], sentence: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with pytest.raises(ConfigError, match=sentence):
        tiny_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), None, engine="vllm_colocate", **asked)
