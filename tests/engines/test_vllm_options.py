"""What vLLM is asked for when it starts in this process: arithmetic on options, no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolgrpo.engines.vllm_options import CPU_BLOCK_SIZE, VLLMOptions


def asked(*, shares_group: bool = False, has_weights: bool = False, **options: object) -> dict[str, object]:
    return VLLMOptions(**options).engine_arguments(  # type: ignore[arg-type]
        Path("model"), has_weights=has_weights, shares_group=shares_group
    )


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(64, 4096), (8192, 8192)])
def test_a_step_on_an_accelerator_has_room_for_a_prompt_with_many_tools(max_num_seqs: int, tokens: int) -> None:
    arguments = asked(on_cpu=False, max_num_seqs=max_num_seqs)
    assert arguments["max_num_batched_tokens"] == tokens
    assert arguments["block_size"] is None and arguments["enforce_eager"] is False


def test_a_cpu_has_small_blocks_and_vllms_own_steps() -> None:
    arguments = asked(on_cpu=True, dtype=torch.bfloat16)
    assert arguments["max_num_batched_tokens"] is None and arguments["block_size"] == CPU_BLOCK_SIZE
    assert arguments["enforce_eager"] is True and arguments["dtype"] == "bfloat16"


@pytest.mark.parametrize(("rank", "served"), [(8, 8), (12, 16), (300, 320)])
def test_an_adapter_gets_the_smallest_rank_that_vllm_serves(rank: int, served: int) -> None:
    arguments = asked(on_cpu=False, lora_rank=rank, has_weights=True)
    assert (
        arguments["enable_lora"] and arguments["max_lora_rank"] == served and arguments["load_format"] == "safetensors"
    )
    assert "max_lora_rank" not in asked(on_cpu=False)


def test_the_trainers_group_of_processes_is_shared_where_there_is_one() -> None:
    assert asked(on_cpu=True, shares_group=True)["distributed_executor_backend"] == "external_launcher"
    assert asked(on_cpu=True)["distributed_executor_backend"] is None
