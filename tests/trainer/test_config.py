"""The configuration: what training and evaluation allow, and what engines are made of."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from toolgrpo import ToolGRPOConfig
from toolgrpo.commands.evaluate import EvaluationConfig
from toolgrpo.engines.base import CHAT_API
from toolgrpo.engines.build import ENGINES
from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import ESTIMATORS
from toolgrpo.options import THEMES, EpisodeOptions
from toolgrpo.shared_pass.scoring import MODES
from toolgrpo.tools.base import TOOL_TIMEOUT_S


def config(folder: Path, kind: type[ToolGRPOConfig] = ToolGRPOConfig, **fields: Any) -> ToolGRPOConfig:
    return kind(str(folder), report_to="none", use_cpu=True, **fields)


# What no flag of tests/commands/test_bad_input.py tries.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine_timeout": float("nan")}, "engine_timeout must be a positive number of seconds, got nan"),
    # combinations: a row of the table each
    ({"vllm_server_base_url": "http://a", "vllm_server_urls": ["http://b"]}, "both name servers"),
    ({"advantage": "loo", "multi_objective_aggregation": "normalize_then_sum"}, "advantage loo works on the sum"),
    ({"advantage": "loo", "scale_rewards": "batch"}, "scale_rewards batch would do nothing"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_cannot_work_is_one_sentence(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        config(tmp_path, **fields)
    assert "{" not in str(caught.value).replace("{'", "").replace('{"', ""), "every place of a sentence is filled"


def test_the_choices_are_the_names_of_the_registries() -> None:
    choices = {one.name: one.metadata.get("choices") for theme in THEMES for one in dataclasses.fields(theme)}
    assert choices["advantage"] == tuple(ESTIMATORS)
    assert choices["engine"] == ("auto", *ENGINES, CHAT_API)
    assert choices["prefix_sharing"] == MODES
    assert EpisodeOptions().tool_timeout == TOOL_TIMEOUT_S


def test_training_refuses_temperature_0_and_an_evaluation_takes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature .*0.*evaluation"):
        config(tmp_path, temperature=0.0)
    assert config(tmp_path, EvaluationConfig, temperature=0.0).sampling_options().temperature == 0.0
    with pytest.raises(ConfigError, match=r"temperature .*0.*-1"):
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
    assert options.lora_sync == "adapter"
    assert (options.max_model_len, options.max_rows, options.seed) == (512, 7, 3)
