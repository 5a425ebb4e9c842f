"""Commands and YAML files of other GRPO recipes: taken, or answered with ours."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from trl import ModelConfig

from toolgrpo.commands.arguments import ScriptArguments, parse_arguments
from toolgrpo.commands.main import read
from toolgrpo.commands.other_names import ANSWERS, MEANS, UNDER_HEADING
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.config import ToolGRPOConfig

OLDER = """
model:
  name: nano
  dtype: float32
data:
  dataset: arithmetic
  max_samples: 64
reward:
  name: gsm8k
training:
  lr: 2e-5
  group_size: 4
  kl_coef: 0.04
"""
KINDS = (ScriptArguments, ToolGRPOConfig, ModelConfig)
FIELDS = {field.name for kind in KINDS for field in dataclasses.fields(kind)}


def parse(folder: Path, text: str, *flags: str) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return parse_arguments(["--config", str(file), "--output_dir", str(folder / "out"), "--use_cpu", *flags])


def parse_flags(folder: Path, *flags: str) -> tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]:
    file = "model_name_or_path: nano\ndataset_id_or_path: arithmetic\n"
    reward = () if {"--reward_function_name", "--environment"} & {*flags} else ("--reward", "gsm8k")
    return parse(folder, file, *flags, *reward)


def test_an_older_file_is_understood(tmp_path: Path) -> None:
    script, config, model = parse(tmp_path, OLDER)
    assert (model.model_name_or_path, model.dtype) == ("nano", "float32")
    assert (script.dataset_id_or_path, script.max_rows) == ("arithmetic", 64)
    assert (config.learning_rate, config.num_generations, config.beta) == (2e-5, 4, 0.04)


@pytest.mark.parametrize(
    "keys", ["lora_r: 8", "lora_alpha: 32", "lora_r: 8, lora_alpha: 32", "lora_r: 8, lora_dropout: 0.1"]
)
def test_lora_of_a_model_is_lora(tmp_path: Path, keys: str) -> None:
    text = f"model: {{name: nano, {keys}}}\ndata: {{dataset: arithmetic}}\nreward: gsm8k\n"
    model = parse(tmp_path, text)[2]
    assert model.use_peft and model.lora_dropout == (0.1 if "dropout" in keys else 0.0)  # TRL's is 0.05
    assert read("train", ["--config", str(tmp_path / "recipe.yaml")]).values["use_peft"]
    assert not parse(tmp_path, text, "--use_peft", "false")[2].use_peft, "a flag wins"
    assert not parse(tmp_path, text.replace(keys, f"{keys}, use_peft: false"))[2].use_peft
    with pytest.raises(ConfigError, match="but not use_peft"):
        parse(tmp_path, text.replace("model: {name: nano, ", "model_name_or_path: nano\ntraining: {"))


def test_every_key_that_is_not_understood_is_answered_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, OLDER + "  batch_size: 4\n  max_new_tokens: 256\n  wombat: 1\npenalty: {turns: 0.1}\n")
    said = str(caught.value)
    for words in ("'batch_size'; write per_device_train_batch_size", "'max_new_tokens'; write max_completion_length"):
        assert words in said
    assert "'wombat'; the nearest known key is" in said and "recipes/stages/length_penalty.py" in said


def test_a_key_and_its_other_name_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'learning_rate' is given twice"):
        parse(tmp_path, OLDER + "  learning_rate: 1.0e-5\n")


def test_a_name_means_something_only_under_its_heading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'name'"):
        parse(tmp_path, "name: nano\n")


def test_a_flag_of_another_recipe_is_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown flag --lr; it is learning_rate here"):
        parse_flags(tmp_path, "--lr", "1e-5")


def test_many_iterations_are_questioned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write max_steps 100"):
        parse(tmp_path, OLDER + "  num_iterations: 100\n")
    assert parse(tmp_path, OLDER + "  num_iterations: 8\n")[1].num_iterations == 8


def test_the_tables_lead_to_fields_and_hide_none() -> None:
    assert {*MEANS.values(), *UNDER_HEADING.values()} <= FIELDS
    assert not {*MEANS, *ANSWERS} & FIELDS
    assert not MEANS.keys() & ANSWERS.keys()


def test_a_function_name_without_a_file_is_a_built_in_reward(tmp_path: Path) -> None:
    script, _, _ = parse_flags(tmp_path, "--reward_function_name", "gsm8k")
    assert (script.reward, script.reward_is_default) == (["gsm8k"], False)
    script, _, _ = parse_flags(tmp_path, "--reward_function_name", "score", "--reward_fn", "mine.py")
    assert (script.reward, script.reward_function_name) == (None, "score")
    with pytest.raises(ConfigError, match="names a function of --reward_fn"):
        parse_flags(tmp_path, "--reward_function_name", "score", "--reward", "gsm8k")


OF_TRL = """
model_name_or_path: nano
dataset_name: trl-lib/DeepMath-103K
dataset_train_split: train[:100]
dataset_test_split: test
reward_funcs: [think_format_reward, my.rewards.custom]
use_vllm: true
env:
  OF_THE_FILE: 3
"""


def test_a_file_of_trls_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OF_THE_FILE", raising=False)
    script, config, _ = parse(tmp_path, OF_TRL)
    assert (script.dataset_id_or_path, script.dataset_split) == ("trl-lib/DeepMath-103K", "train[:100]")
    assert (script.eval_split, script.reward) == ("test", ["think_format_reward", "my.rewards.custom"])
    assert config.use_vllm and os.environ["OF_THE_FILE"] == "3"
    odd = "datasets: [{path: a/b}]\ndataset_config: main\nreward_model_name_or_path: a/b\n"
    with pytest.raises(ConfigError, match=r"(?s)mixture file.*OWNER/NAME:CONFIG.*in Python"):
        parse(tmp_path, OF_TRL + odd)


def test_a_training_without_a_reward_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="no reward is given, and it decides what the model learns: --reward exact_match"
    ):
        parse(tmp_path, "model_name_or_path: nano\ndataset_id_or_path: arithmetic\n")
    assert parse_flags(tmp_path, "--environment", "counter.py:Counter")[0].reward == ["environment"]


@pytest.mark.parametrize("flags", [("--lora_r", "16", "--lora_alpha", "32"), ("--lora-alpha=32",), ("--use_rslora",)])
def test_lora_is_never_left_out_in_silence(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Also where the numbers are TRL's defaults."""
    with pytest.raises(ConfigError, match="is given, but not use_peft, so all weights would be trained"):
        parse_flags(tmp_path, *flags)
    assert parse_flags(tmp_path, *flags, "--use_peft")[2].use_peft
    assert not parse_flags(tmp_path, *flags, "--use_peft", "false")[2].use_peft


def test_lora_in_a_file_is_seen_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_r is given, but not use_peft"):
        parse(tmp_path, OLDER + "  lora_r: 16\n")
