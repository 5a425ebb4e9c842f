"""The command line over a YAML file over the defaults; what is wrong is one sentence."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ModelConfig, get_peft_config

from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.evaluate import EvaluationConfig, EvaluationRun, evaluation_arguments
from toolgrpo.commands.flags import Flag, flags_of_classes
from toolgrpo.commands.given import read_given
from toolgrpo.commands.job import of_revision
from toolgrpo.commands.main import main, mistakes, read
from toolgrpo.commands.run_file import asks_the_same, held_out_otherwise, keep_run_config, resume_command, run_text
from toolgrpo.commands.table import flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError


@dataclass
class Script:
    """A small stand-in for a recipe's own arguments."""

    reward: list[str] | None = None
    rows: int = 3
    lively: bool = True
    limit: int | None = 5
    kind: str = field(default="a", metadata={"choices": ("a", "no")})
    max_completion_length: int = 100

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError("rows must not be negative")


def parse(tmp_path: Path, text: str | None, *flags: str) -> Script:
    if text is not None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        flags = ("--config", str(path), *flags)
    script: Script = read_given(flags_of_classes((Script,)), flags).made((Script,))[0]
    return script


def test_flags_over_yaml_over_defaults(tmp_path: Path) -> None:
    assert parse(tmp_path, None) == Script()
    text = "data:\n  rows: 7\nreward:\n  reward: [x, y]\ntools:\nlively: false\n"
    assert parse(tmp_path, text) == Script(reward=["x", "y"], rows=7, lively=False)
    assert parse(tmp_path, text, "--rows", "9", "--reward", "z", "--lively") == Script(reward=["z"], rows=9)
    assert parse(tmp_path, "reward: x") == Script(reward=["x"]), "one of what may be several"
    assert parse(tmp_path, "reward: [x]\nlimit: null") == Script(reward=["x"], limit=None)
    assert parse(tmp_path, None, "--limit", "none", "--no_lively") == Script(limit=None, lively=False)
    assert parse(tmp_path, "reward: [x]", "--reward", "none").reward is None
    for flags in (["--max_grpo_completion_length", "9"], ["--max-grpo-completion-length=9"]):
        assert parse(tmp_path, None, *flags).max_completion_length == 9, "another name"


def test_the_traps_of_yaml(tmp_path: Path) -> None:
    assert parse(tmp_path, "kind: no").kind == "no"
    assert parse(tmp_path, "rows: 1e2").rows == 100
    assert parse(tmp_path, "max_grpo_completion_length: 9").max_completion_length == 9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rows: 1.5", r"rows .*1\.5"),
        ("reward: 7", r"reward must be list\[str\] \| None, got 7"),
        ("rows: -1", "rows must not be negative"),
        ("- rows", "`key: value`"),
        ("--reward x none", r"--reward .*'x none'"),
        ("--config", "--config"),
        ("--config a.yaml --config b.yaml", "--config is given 2 times"),
        ("--config .", "is a folder"),
    ],
)
def test_what_is_wrong_with_a_file_or_a_flag_is_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    """What no file or flag of test_bad_input.py and test_cheap_checks.py tries."""
    with pytest.raises(ConfigError, match=problem):
        parse(tmp_path, None, *text.split()) if text.startswith("--") else parse(tmp_path, text)


# What a run was given, against what its run.yaml says.

SECRETS = ("hub_token", "push_to_hub_token")  # which no file keeps
PER_CALL = ("dry_run", "resume_from_checkpoint")  # of a call, not of a run
OF_OWN_KIND = {
    "record_episodes": ["true", "false", "0.1"],
    "correction_band": ["0.5;2"],
    "liger_kernel_config": ['{"rope": true}'],
}
TEXTS = ["no", "1e5", "null", "0.10", "on", "a: b # c", "{x}", "two\nlines", "ümlaut \u2028 \x07"]


def others_than_default(flag: Flag) -> list[list[str]]:
    """Words behind a flag that mean something else than its default."""
    kinds, several = flag.members, flag.takes_several or flag.takes_one_or_several
    if flag.choices is not None:
        return [[str(choice)] for choice in flag.choices if choice != flag.default]
    if flag.name in OF_OWN_KIND:
        return [words.split(";") for words in OF_OWN_KIND[flag.name]]
    if bool in kinds:
        values = [str(not flag.default).lower()]
    elif int in kinds or list[int] in kinds:
        values = [str(int(flag.default) + 3 if type(flag.default) is int else 3)]
    elif float in kinds or list[float] in kinds:
        values = ["0.25", "1e-07"]
    else:
        values = TEXTS
    found = [[value] for value in values] + ([values[:2] * 2] if several else [])
    return [*found, *([["none"]] if flag.takes_none and flag.default is not None else [])]


def given_by(*argv: str) -> dict[str, Any]:
    given = read_given(flags_of("train"), argv)
    assert given.right() is given.values
    return dict(given.values)


def expected_of(told: dict[str, Any]) -> dict[str, Any]:
    """What a file says of it: no secret, nothing of one call, and no None that is the default."""
    flags, left_out = flags_of("train"), (*SECRETS, *PER_CALL)
    said = {name: value for name, value in told.items() if name not in left_out}
    return {name: value for name, value in said.items() if value is not None or flags[name].default is not None}


@pytest.mark.parametrize("number", range(10))
def test_every_flag_stands_in_run_yaml_as_it_was_given(number: int, tmp_path: Path) -> None:
    """Each flag of ours and of TRL's has its next value, on the command line and in a file."""
    mine, kept, argv = tmp_path / "mine.yaml", tmp_path / "run.yaml", list[str]()
    for name, flag in flags_of("train").items():
        words = others_than_default(flag)
        argv += [f"--{name}", *words[number % len(words)]]
    told = given_by(*argv)
    assert told.keys() == flags_of("train").keys()
    mine.write_text(json.dumps(told))  # which is YAML
    for source in (argv, ["--config", str(mine)]):
        keep_run_config(run_text(read("train", source)), tmp_path, "of-a-run")
        assert given_by("--config", str(kept)) == expected_of(told)
        keep_run_config(run_text(read("train", ["--config", str(kept)])), tmp_path)
        assert given_by("--config", str(kept)) == expected_of(told)


@pytest.mark.parametrize(
    ("flag", "word", "value"),
    [("record_episodes", "false", 0.0), ("record_episodes", "0.1", 0.1), ("gradient_checkpointing", "auto", "auto")],
)
def test_a_switch_with_more_values_starts_and_resumes(flag: str, word: str, value: Any, tmp_path: Path) -> None:
    base = ["--model_name_or_path", "nano", "--dataset_id_or_path", "arithmetic", "--reward", "accuracy", "--use_cpu"]
    argv = [*base, "--output_dir", str(tmp_path), f"--{flag}", word]
    keep_run_config(run_text(read("train", argv)), tmp_path)
    for words in (argv, ["--config", str(tmp_path / "run.yaml")]):
        assert getattr(parse_arguments(words)[1], flag) == value


def test_an_embedded_task_stays_what_it_is_beside_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arithmetic").mkdir()
    kept = yaml.safe_load(
        run_text(read("train", ["--model_name_or_path", "nano", "--dataset_id_or_path", "arithmetic"]))
    )
    assert kept["dataset_id_or_path"] == "arithmetic"


def test_a_run_s_file_has_whole_paths_and_names_as_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with `auth` in it is blanked elsewhere; a folder that is called as a model is the run's own output."""
    monkeypatch.chdir(tmp_path)
    for name in ("auth_env.py", "hf_dataset_rows.jsonl", "ds.json"):
        Path(name).write_text("")
    Path("nano").mkdir()
    words = ["--environment", "auth_env.py:AuthEnv", "--dataset_id_or_path", "hf_dataset_rows.jsonl"]
    words += ["--model_name_or_path", "nano", "--output_dir", "nano", "--deepspeed", "ds.json"]
    assert yaml.safe_load(run_text(read("train", words))) == {
        "environment": f"{tmp_path}/auth_env.py:AuthEnv",
        "dataset_id_or_path": f"{tmp_path}/hf_dataset_rows.jsonl",
        "model_name_or_path": "nano",
        "output_dir": f"{tmp_path}/nano",
        "deepspeed": f"{tmp_path}/ds.json",
    }
    rows = read("train", ["--dataset_id_or_path", "gsm8k:hf_dataset_rows.jsonl"])
    assert yaml.safe_load(run_text(rows)) == {"dataset_id_or_path": f"gsm8k:{tmp_path}/hf_dataset_rows.jsonl"}


def test_a_checkpoint_is_read_with_the_file_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("system_prompt: Be brief.\n")
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        assert read("chat", [str(folder)]).values["system_prompt"] == "Be brief."
    assert "system_prompt" not in read("chat", [str(tmp_path / "merged")]).values


def test_groups_that_several_processes_fill_are_refused_in_none_and_measured_in_one() -> None:
    words = ["--config", "recipes/configs/nano.yaml", "--per_device_train_batch_size", "4", "--num_generations", "8"]
    given = read("train", words)
    assert ["num_generations (8)" in str(error) for error in mistakes(given)] == [True]
    assert mistakes(replace(given, launches=True)) == []
    config = EvaluationConfig(per_device_train_batch_size=4, num_generations=8, use_cpu=True, bf16=False)
    assert config.per_device_train_batch_size == 8
    with pytest.raises(ConfigError, match=r"temperature is 0\.0, but generation_kwargs says 0\.9; keep one"):
        EvaluationConfig(temperature=0.0, generation_kwargs={"temperature": 0.9}, use_cpu=True, bf16=False)


def test_rows_of_another_seed_are_not_those_that_a_run_held_out(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", str(tmp_path / "out")
    rows.write_text("".join(json.dumps({"prompt": str(n), "answer": "1"}) + "\n" for n in range(8)))
    words = ["--model_name_or_path", str(tmp_path), "--dataset_id_or_path", str(rows), "--eval_share", "0.5"]
    given = read("evaluate", [*words, "--reward", "exact_match", "--use_cpu", "true", "--output_dir", out])
    run = EvaluationRun(*evaluation_arguments(given), Terminal(None, io.StringIO(), quiet=False), given)
    for had in ("eval_share: 0.5", ""):
        (tmp_path / "run.yaml").write_text(f"dataset_id_or_path: {rows}\n{had}\n")
        assert len(run._questions()) == 4
    (tmp_path / "run.yaml").write_text(f"dataset_id_or_path: {rows}\nseed: 1\neval_share: 0.5\n")
    with pytest.raises(ConfigError, match=r"--seed 1 --eval_share 0\.5"):
        run._questions()


def test_an_adapter_names_the_revision_of_its_base() -> None:
    model = ModelConfig(model_name_or_path="ORG/M", model_revision="v1", use_peft=True, lora_target_modules=["q_proj"])
    assert of_revision(get_peft_config(model), model).revision == "v1" and of_revision(None, model) is None


def test_a_launched_run_is_gone_on_with_as_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setattr("toolgrpo.commands.main._run", lambda *given: 0)  # where execv would have replaced it
    monkeypatch.setenv("TOOLGRPO_LAUNCHED_WITH", "")
    words = ["train", "--config", "recipes/configs/nano.yaml", "--num_processes", "2", "--output_dir", str(tmp_path)]
    main(words)
    assert started[0][-5:] == ["train", "--config", "recipes/configs/nano.yaml", "--output_dir", str(tmp_path)]
    line = shlex.split(resume_command("train", tmp_path))
    assert line[:3] == ["toolgrpo", "train", "--accelerate_config"] and Path(line[3]).name.endswith(".yaml")
    assert line[4:] == ["--num_processes", "2", "--config", f"{tmp_path}/run.yaml", "--resume_from_checkpoint", "auto"]


def test_a_command_of_one_process_is_not_launched_in_several(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("show", "check"):
        assert main([name, "--num_processes", "2"]) == 2
        assert f"toolgrpo {name} runs in one process; leave out --accelerate_config" in capsys.readouterr().err


def test_a_readme_of_ones_own_is_not_replaced_by_a_models_card(tmp_path: Path) -> None:
    for text, refused in (("# My shop", True), ("---\ntags: [trl]\n---\n", False)):
        (tmp_path / "README.md").write_text(text)
        given = read("train", ["--config", "recipes/configs/nano.yaml", "--output_dir", str(tmp_path)])
        assert ["README.md" in str(error) for error in mistakes(given)] == [True] * refused


def test_evaluations_are_left_out_where_that_is_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{Path('recipes/configs/nano.yaml').read_text()}  eval_steps: 20\n")
    words = ["--config", str(tmp_path / "mine.yaml")]
    assert parse_arguments(words)[1].eval_strategy == "steps"
    assert parse_arguments([*words, "--eval_strategy", "no"])[1].eval_strategy == "no"


@pytest.mark.parametrize(
    ("now", "had"),
    [
        ({}, None),
        ({"eval_share": 0.1}, None),
        ({"eval_share": 0.2}, "--seed 42 --eval_share 0.1 --max_rows none"),
        ({"eval_share": 0.1, "seed": 7}, "--seed 42 --eval_share 0.1 --max_rows none"),
        ({"eval_share": 0.1, "seed": 7, "dataset_id_or_path": "other"}, None),
    ],
)
def test_a_run_that_goes_on_holds_out_the_rows_that_it_held_out(now: dict[str, Any], had: str | None) -> None:
    data = {"dataset_id_or_path": "rows"}
    assert held_out_otherwise({**data, "eval_share": 0.1}, {**data, **now}) == had
    assert asks_the_same({**data, "eval_share": 0.1}, {**data, **now}) == (now == {"eval_share": 0.1})
