"""What vLLM is asked for when it starts in this process, and one folder for one config: no engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from toolgrpo.engines.vllm_options import CPU_BLOCK_SIZE, VLLMOptions, config_folder, served_config
from toolgrpo.engines.vllm_seam import _prepare_environment


def asked(model_type: str = "qwen3", *, shares_group: bool = False, has_weights: bool = False, **options: Any) -> Any:
    start = VLLMOptions(**options)
    return start.engine_arguments(Path("model"), model_type, has_weights=has_weights, shares_group=shares_group)


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(64, 4096), (8192, 8192)])
def test_a_step_on_an_accelerator_has_room_for_a_prompt_with_many_tools(max_num_seqs: int, tokens: int) -> None:
    arguments = asked(on_cpu=False, max_num_seqs=max_num_seqs)
    assert arguments["max_num_batched_tokens"] == tokens
    assert arguments["block_size"] is None and arguments["enforce_eager"] is False
    assert arguments["max_cudagraph_capture_size"] == (8192 if max_num_seqs > 512 else None)
    assert asked(on_cpu=False, max_num_seqs=600, enforce_eager=True)["max_cudagraph_capture_size"] is None
    here = asked(on_cpu=True, dtype=torch.bfloat16)
    assert here["max_num_batched_tokens"] is None, "its own on a CPU"
    assert (here["dtype"], here["enforce_eager"], here["block_size"]) == ("bfloat16", True, CPU_BLOCK_SIZE)
    backends = [asked(on_cpu=True, shares_group=shared)["distributed_executor_backend"] for shared in (True, False)]
    assert backends == ["external_launcher", None], "where there is a group of the trainer's"


def test_prefixes_are_cached_but_of_mamba2_on_a_cpu() -> None:
    kinds = [(kind, on_cpu) for kind in ("qwen3", "nemotron_h", "granitemoehybrid") for on_cpu in (True, False)]
    cached = [asked(kind, on_cpu=on_cpu)["enable_prefix_caching"] for kind, on_cpu in kinds]
    assert cached == [True, True, False, True, False, True]


def test_an_adapter_gets_the_smallest_rank_that_vllm_serves() -> None:
    for rank, served in ((8, 8), (12, 16), (300, 320)):
        arguments = asked(on_cpu=False, lora_rank=rank, has_weights=True)
        assert arguments["max_lora_rank"] == served and arguments["load_format"] == "safetensors"
    assert "max_lora_rank" not in asked(on_cpu=False)
    assert asked(on_cpu=False, packed=True, has_weights=True)["load_format"] == "bitsandbytes"


def test_an_unpacked_checkpoint_is_not_served_as_a_packed_one(tiny_qwen3: Any, tmp_path: Path) -> None:
    model = tiny_qwen3(0)
    model.config.quantization_config = {"quant_method": "mxfp4"}
    served_config(model).save_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in read and read["architectures"] == ["Qwen3ForCausalLM"]
    assert model.config.quantization_config, "the trainer's own stays as it is"


# The folder


def folder_of(cache: Path, **values: Any) -> Path:
    with config_folder(Qwen3Config(num_hidden_layers=2, **values), cache=cache) as folder:
        assert Qwen3Config.from_pretrained(folder).num_hidden_layers == 2
        return folder


def test_one_config_has_one_folder_wherever_it_was_loaded_from(tmp_path: Path) -> None:
    first = folder_of(tmp_path)
    assert folder_of(tmp_path, name_or_path="/somewhere/else") == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name], "nothing half made is left"
    assert folder_of(tmp_path, hidden_size=64) != first


def test_weights_get_a_folder_that_is_gone_afterwards_as_where_a_file_is_in_the_way_of_the_cache(
    tmp_path: Path,
) -> None:
    config = Qwen3Config(num_hidden_layers=2)
    with config_folder(config, {"a": torch.zeros(2, 2).T}, cache=tmp_path) as folder:
        assert (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    assert not folder.exists() and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert not folder_of(tmp_path / "file").exists()


def test_on_a_gpu_fp32_is_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, exact in ((torch.float32, "ieee"), (torch.bfloat16, None)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "environ", {})
            _prepare_environment(VLLMOptions(dtype=dtype, on_cpu=False))
            assert os.environ.get("TRITON_F32_DEFAULT") == exact
            assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
