"""The configuration: what a training allows, and what engines are made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from toolgrpo import ToolGRPOConfig
from toolgrpo.engines.base import CHAT_API
from toolgrpo.engines.build import ENGINES
from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import ESTIMATORS
from toolgrpo.options import THEMES, EpisodeOptions
from toolgrpo.shared_pass.scoring import MODES
from toolgrpo.tools.base import TOOL_TIMEOUT_S


def config(folder: Path, **fields: Any) -> ToolGRPOConfig:
    return ToolGRPOConfig(str(folder), report_to="none", use_cpu=True, **fields)


# What no flag of tests/commands/test_bad_input.py tries.
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine_timeout": float("nan")}, "engine_timeout .*got nan"),
        # combinations: a row of the table each
        ({"vllm_server_base_url": "http://a", "vllm_server_urls": ["http://b"]}, "both name servers"),
        ({"advantage": "loo", "multi_objective_aggregation": "normalize_then_sum"}, "advantage loo works on the sum"),
        ({"keep": "best", "eval_steps": 5, "metric_for_best_model": "eval_reward"}, "held-out success"),
        ({"advantage": "loo", "scale_rewards": "batch"}, "scale_rewards batch would do nothing"),
        # what cannot be measured
        ({"stop_when": "plateau"}, "stop_when"),
        ({"stop_when": "solved"}, r"stop_when.*eval_steps"),
        ({"keep": "best"}, "keep uses held-out success"),
        ({"eval_steps": 2, "metric_for_best_model": "loss"}, "eval_success"),
        ({"num_iterations": 0}, "num_iterations must be at least 1"),
        ({"ref_model_sync_steps": 0}, "ref_model_sync_steps must be at least 1"),
        ({"scale_rewards": "groups"}, r"no scale_rewards 'groups'.*'group'.*there are group, batch, none"),
        ({"importance_sampling_level": "sentence"}, "no importance_sampling_level 'sentence'"),
        ({"multi_objective_aggregation": "mean"}, "no multi_objective_aggregation 'mean'"),
        ({"vllm_importance_sampling_mode": "sequence"}, "no vllm_importance_sampling_mode 'sequence'"),
        ({"rollout_correction": "trl", "vllm_importance_sampling_correction": False}, "leave one of the two out"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_sentence(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config(tmp_path, **fields)
    assert "{" not in str(caught.value).replace("{'", "").replace('{"', ""), "every place of a sentence is filled"


def test_the_choices_are_the_names_of_the_registries() -> None:
    choices = {one.name: one.metadata.get("choices") for theme in THEMES for one in dataclasses.fields(theme)}
    assert choices["advantage"] == tuple(ESTIMATORS)
    assert choices["engine"] == ("auto", *ENGINES, CHAT_API)
    assert choices["prefix_sharing"] == MODES
    assert EpisodeOptions().tool_timeout == TOOL_TIMEOUT_S


def test_a_changed_copy_leaves_the_config_and_what_was_derived_from_it_as_it_was(tmp_path: Path) -> None:
    first = config(tmp_path, per_device_train_batch_size=8, num_generations=4, gradient_accumulation_steps=2)
    second = first.changed(output_dir="elsewhere", disable_tqdm=True)
    assert (first.output_dir, second.output_dir) == (str(tmp_path), "elsewhere")
    assert second.generation_batch_size == first.generation_batch_size == 16
    with pytest.raises(ConfigError, match="outputdir"):
        first.changed(outputdir="x")


def test_sampling_of_a_config_of_trl_is_ours_where_its_loss_knows_it(tmp_path: Path) -> None:
    def sampled(**kwargs: Any) -> Any:
        args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, generation_kwargs=kwargs)
        return ToolGRPOConfig.of_trl(args).sampling_options()

    assert sampled(top_k=7).top_k == 7
    with pytest.raises(ConfigError, match=r"divides by .*, 1; set"):
        sampled(temperature=0.5)


def test_engine_options_hold_what_each_engine_is_asked(tmp_path: Path) -> None:
    urls = ["http://a", "http://b"]
    asked: dict[str, Any] = {"vllm_max_model_length": 512, "max_concurrent_episodes": 7, "seed": 3}
    asked |= {"engine": "vllm_server", "vllm_server_urls": urls, "vllm_lora_sync": "adapter"}
    options = config(tmp_path, **asked).engine_options()
    assert options.engine == "vllm_server" and options.vllm_server.urls == tuple(urls)
    assert options.vllm_server.weights_folder == tmp_path / "vllm_weights"
    assert (options.lora_sync, options.max_model_len, options.max_rows, options.seed) == ("adapter", 512, 7, 3)
