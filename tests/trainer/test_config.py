"""The configuration: what training and evaluation allow, and what engines are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolgrpo import ToolGRPOConfig
from toolgrpo.commands.evaluate import EvaluationConfig
from toolgrpo.errors import ConfigError


def config(folder: Path, kind: type[ToolGRPOConfig] = ToolGRPOConfig, **fields: Any) -> ToolGRPOConfig:
    return kind(str(folder), report_to="none", use_cpu=True, **fields)


def test_training_refuses_temperature_0_and_an_evaluation_takes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature must be above 0 in training, got 0.*an evaluation may use 0"):
        config(tmp_path, temperature=0.0)
    assert config(tmp_path, EvaluationConfig, temperature=0.0).sampling_options().temperature == 0.0
    with pytest.raises(ConfigError, match="temperature must be at least 0, got -1"):
        config(tmp_path, EvaluationConfig, temperature=-1.0)


def test_a_changed_copy_leaves_the_config_and_what_was_derived_from_it_as_it_was(tmp_path: Path) -> None:
    first = config(tmp_path, per_device_train_batch_size=8, num_generations=4, gradient_accumulation_steps=2)
    second = first.changed(output_dir="elsewhere", disable_tqdm=True)
    assert (first.output_dir, second.output_dir) == (str(tmp_path), "elsewhere")
    assert second.generation_batch_size == first.generation_batch_size == 16
    with pytest.raises(ConfigError, match="outputdir is no field of ToolGRPOConfig"):
        first.changed(outputdir="x")


def test_engine_options_hold_what_each_engine_is_asked(tmp_path: Path) -> None:
    options = config(
        tmp_path,
        engine="vllm_server",
        vllm_server_urls=["http://a", "http://b"],
        vllm_lora_sync="adapter",
        vllm_max_model_length=512,
        max_concurrent_episodes=7,
        seed=3,
    ).engine_options()
    assert options.engine == "vllm_server" and options.vllm_server.urls == ("http://a", "http://b")
    assert options.vllm_server.weights_folder == tmp_path / "vllm_weights"
    assert options.vllm_server.lora_sync == options.vllm_colocate.lora_sync == "adapter"
    assert (options.transformers.max_model_len, options.transformers.max_rows) == (512, 7)
    assert (options.vllm_colocate.vllm.max_num_seqs, options.vllm_colocate.vllm.seed) == (7, 3)


def test_servers_are_named_our_way_or_trls(tmp_path: Path) -> None:
    assert config(tmp_path).server_urls() == []
    asked = config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_host="h", vllm_server_port=1)
    assert asked.server_urls() == ["http://h:1"]
