"""What several test files share: a tiny model, one real vLLM server for the whole session, and how hypothesis draws.

It draws the same examples each time and has no deadline for one of them: neither chance nor a busy machine decides what
passes. `--hypothesis-profile=default` draws others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Any:
    """Makes a random Qwen3 of 0.1M parameters from a seed; its vocabulary of 320 holds no meaning."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(seed: int = 0) -> Qwen3ForCausalLM:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.3,  # far from uniform, so that a wrong token or weight shows
            bos_token_id=None,
            eos_token_id=316,  # greedy decoding says it often, and only a request may say that it ends a turn
            pad_token_id=None,
        )
        return Qwen3ForCausalLM(config).float()

    return make


@pytest.fixture(scope="session")
def vllm_server(tiny_qwen3: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `vllm serve` of `tiny_qwen3(0)` on the CPU, in a process of its own."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from toolgrpo.testing.vllm_process import VLLMServerProcess

    folder: Path = tmp_path_factory.mktemp("tiny-qwen3")
    tiny_qwen3(0).save_pretrained(folder)
    with VLLMServerProcess(folder, max_model_len=512, ready_timeout_s=900) as server:
        yield server
