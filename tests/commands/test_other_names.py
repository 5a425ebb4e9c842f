"""Commands and YAML files of other GRPO recipes: taken, or answered with ours."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from toolgrpo.commands.arguments import ScriptArguments, parse_arguments
from toolgrpo.commands.main import mistakes, read
from toolgrpo.commands.other_names import ANSWERS, MEANS, PASSED_OVER, UNDER_HEADING
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.config import ToolGRPOConfig

RECIPES = Path(__file__).parents[1] / "fixtures/other_recipes"
OLDER = (RECIPES / "three_headings.yaml").read_text() + "reward: {name: gsm8k}\n"
KINDS = (ScriptArguments, ToolGRPOConfig, ModelConfig)
FIELDS = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
Parsed = tuple[ScriptArguments, ToolGRPOConfig, ModelConfig]


def parse(folder: Path, text: str, *flags: str) -> Parsed:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return parse_arguments(["--config", str(file), "--output_dir", str(folder / "out"), "--use_cpu", *flags])


def parse_flags(folder: Path, *flags: str) -> Parsed:
    file = "model_name_or_path: nano\ndataset_id_or_path: arithmetic\n"
    reward = () if {"--reward_function_name", "--environment"} & {*flags} else ("--reward", "gsm8k")
    return parse(folder, file, *flags, *reward)


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_file_in_other_words(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its comments have values that it has here, and the keys that are not read, each with one sentence, all at once."""
    expected = yaml.safe_load("".join(line[2:] for line in file.read_text().splitlines(True) if line[0] == "#"))
    for name in expected.get("variables", ()):
        monkeypatch.setenv(name, "before")
    given = read("train", ["--config", str(file)])
    wanted = {name: str(file) if value == "FILE" else value for name, value in expected["values"].items()}
    assert {name: given.values.get(name) for name in wanted} == wanted
    assert given.launcher == expected.get("launcher", {})
    assert expected.get("variables", {}).items() <= os.environ.items()
    told = [re.match(r"(?:.*?, line \d+: )?(?:unknown key ')?(\w+)", one) for one in given.complaints]
    assert sorted(one[1] for one in told if one) == sorted(expected.get("refused", ()))


def test_flags_stand_over_how_a_published_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has as many tasks, whatever the groups, the passes and the processes are."""
    config = parse(tmp_path, OLDER, "--num_generations", "8", "--gradient_accumulation_steps", "2")[1]
    assert (config.per_device_train_batch_size, config.generation_batch_size) == (16, 32)
    flags = ("--max_steps", "2", "--per_device_train_batch_size", "8", "--num_iterations", "3")
    config = parse(tmp_path, OLDER, *flags)[1]
    assert (config.max_steps, config.per_device_train_batch_size, config.num_iterations) == (2, 8, 3)
    argv = ["--config", str(tmp_path / "recipe.yaml")]
    assert {"batch_size 4: 4 tasks per step, 4 episodes each"} < {*read("train", argv).said}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read("train", argv).values["per_device_train_batch_size"] == 8
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"batch_size 4.*4.*3"):
        read("train", argv).right()


@pytest.mark.parametrize("keys", ["lora_alpha: 32", "lora_r: 8, lora_dropout: 0.1"])
def test_lora_of_a_model_is_lora(tmp_path: Path, keys: str) -> None:
    text = f"model: {{name: nano, {keys}}}\ndata: {{dataset: arithmetic}}\nreward: gsm8k\n"
    model = parse(tmp_path, text)[2]
    assert model.use_peft and model.lora_dropout == (0.1 if "dropout" in keys else 0.0)  # TRL's is 0.05
    assert read("train", ["--config", str(tmp_path / "recipe.yaml")]).values["use_peft"]
    assert not parse(tmp_path, text, "--use_peft", "false")[2].use_peft, "a flag wins"
    assert not parse(tmp_path, text.replace(keys, f"{keys}, use_peft: false"))[2].use_peft
    with pytest.raises(ConfigError, match="use_peft"):
        parse(tmp_path, text.replace("model: {name: nano, ", "model_name_or_path: nano\ntraining: {"))


@pytest.mark.parametrize("flag", ["--lora-alpha=32", "--use_rslora"])
def test_lora_is_never_left_out_in_silence(tmp_path: Path, flag: str) -> None:
    """Also where a number is TRL's default."""
    with pytest.raises(ConfigError, match="use_peft"):
        parse_flags(tmp_path, flag)
    for use_peft in ("true", "false"):
        assert parse_flags(tmp_path, flag, "--use_peft", use_peft)[2].use_peft == (use_peft == "true")


def test_a_key_that_means_nothing_where_it_stands_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, OLDER + "max_new_tokens: 256\nenv: x\nname: nano\n")
    assert all(f"'{name}'" in str(caught.value) for name in ("max_new_tokens", "env", "name"))


def test_the_tables_lead_to_fields_and_hide_none() -> None:
    assert {*MEANS.values(), *UNDER_HEADING.values()} <= FIELDS
    assert not {*MEANS, *ANSWERS, *PASSED_OVER} & FIELDS
    assert not MEANS.keys() & ANSWERS.keys() and not PASSED_OVER.keys() & {*MEANS, *ANSWERS}


def test_a_function_name_without_a_file_is_a_built_in_reward_and_an_environment_is_one(tmp_path: Path) -> None:
    script = parse_flags(tmp_path, "--reward_function_name", "gsm8k")[0]
    assert (script.reward, script.reward_is_default) == (["gsm8k"], False)
    script = parse_flags(tmp_path, "--reward_function_name", "score", "--reward_fn", "mine.py")[0]
    assert (script.reward, script.reward_function_name) == (None, "score")
    with pytest.raises(ConfigError, match="--reward_fn"):
        parse_flags(tmp_path, "--reward_function_name", "score", "--reward", "gsm8k")
    assert parse_flags(tmp_path, "--environment", "counter.py:Counter")[0].reward == ["environment"]
    with pytest.raises(ConfigError, match="--reward exact"):
        parse(tmp_path, "model_name_or_path: nano\ndataset_id_or_path: arithmetic\n")


def test_data_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test split is read where something is measured on it, and a configuration of a folder is a folder in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/main").mkdir(parents=True)
    (tmp_path / "data/main/train.jsonl").write_text('{"prompt": "1+1?", "solution": "2"}\n')
    text = "dataset_name: data\ndataset_config: main\nreward_funcs: accuracy_reward\ndataset_test_split: test\n"
    script = parse(tmp_path, "model_name_or_path: nano\n" + text)[0]
    assert (script.dataset_id_or_path, script.eval_split) == ("data/main", None)
    assert parse(tmp_path, text, "--model", "nano", "--eval_questions", "2")[0].eval_split == "test"
    job = ["--config", "recipe.yaml", "--model", "nano", "--num_generations", "8", "--dry_run"]
    assert not mistakes(read("train", job))
    (evaluated,) = mistakes(read("train", [*job, "--eval_strategy", "steps", "--eval_steps", "5"]))
    assert "eval_questions N" in str(evaluated)
    (tmp_path / "data/main/train.jsonl").write_text('{"prompt": "1+1?", "gold": "2"}\n')
    (columns,) = mistakes(read("train", job))
    assert "asks for 'solution'" in str(columns)


def test_a_run_s_file_sets_no_variables_and_launches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come with a recording from elsewhere."""
    monkeypatch.setenv("OF_THE_FILE", "before")
    for name in ("run.yaml", "config.yaml"):
        (tmp_path / name).write_text('env: {OF_THE_FILE: 3, "": 1}\nnum_processes: 4\n')
    for command, *more in (("replay", "1", "--config", str(tmp_path / "run.yaml")), ("chat",)):
        given = read(command, [str(tmp_path), *more])
        assert os.environ["OF_THE_FILE"] == "before" and not given.launcher and "'env'" in "".join(given.complaints)
    given = read("train", ["--config", str(tmp_path / "config.yaml")])
    assert os.environ["OF_THE_FILE"] == "3" and given.launcher == {"num_processes": 4}
    assert "cannot set the variable ''" in "".join(given.complaints)
