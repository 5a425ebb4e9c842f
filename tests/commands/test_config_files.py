"""The command line over a YAML file over the defaults; what is wrong is one sentence."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
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
from toolgrpo.commands.run_file import (
    LAUNCHED_WITH,
    asks_the_same,
    held_out_otherwise,
    keep_run_config,
    resume_command,
    run_text,
)
from toolgrpo.commands.table import flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.config import ToolGRPOConfig


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


def parse_args(kinds: tuple[type[Any], ...], argv: Sequence[str]) -> tuple[Any, ...]:
    return read_given(flags_of_classes(kinds), argv).made(kinds)


def parse(tmp_path: Path, text: str | None, *flags: str) -> Script:
    if text is not None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        flags = ("--config", str(path), *flags)
    script: Script = parse_args((Script,), flags)[0]
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


def test_another_name_of_the_completion_length(tmp_path: Path) -> None:
    for flags in (["--max_grpo_completion_length", "9"], ["--max-grpo-completion-length=9"]):
        assert parse(tmp_path, None, *flags).max_completion_length == 9
    assert parse(tmp_path, "max_grpo_completion_length: 9").max_completion_length == 9


def test_the_traps_of_yaml(tmp_path: Path) -> None:
    assert parse(tmp_path, "kind: no").kind == "no"
    assert parse(tmp_path, "rows: 1e2").rows == 100
    with pytest.raises(ConfigError, match="the key 'rows' stands twice"):
        parse(tmp_path, "rows: 1\nrows: 2")
    with pytest.raises(ConfigError, match="'rows'"):
        parse(tmp_path, "rows: 1\ndata: {rows: 2}")


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("rosw: 1", [], r"'rosw'.*'rows'"),
        (
            "reward: {generation: {rows: 1}}",
            [],
            r"'generation'.*'rew",
        ),
        ("dta: {rows: 1}", [], "unknown heading 'dta'.*nearest is 'data'"),
        ("rows: many", [], r"rows .*'many'"),
        ("rows: 1.5", [], "rows must be a whole number, got 1.5"),
        ("lively: 7", [], "lively must be true or false, got 7"),
        ("limit: some", [], r"limit .*'some'"),
        ("reward: 7", [], r"reward must be list\[str\] \| None, got 7"),
        ("kind: b", [], r"kind .*'b'"),
        ("rows: -1", [], "rows must not be negative"),
        ("rows: [", [], "YAML"),
        ("a: 1\n b: [x\n", [], "is not valid YAML: line 2: .*\n     b: "),
        ("[" * 100_000, [], "is not valid YAML: it is nested too deeply"),
        (f"rows: {'9' * 5000}", [], "is not valid YAML: line 1: no setting is an integer"),
        ("- rows", [], "`key: value`"),
        ("", [], "is empty"),
        (None, ["--rosw", "1"], r"--rosw.*--rows"),
        (None, ["--row", "1"], "unknown flag --row;"),
        (None, ["--rows", "many"], r"--rows.*'many'"),
        (None, ["--rows"], "--rows"),
        (None, ["--kind", "b"], "--kind"),
        (None, ["--reward", "x", "none"], r"--reward .*'x none'"),
        (None, ["stray"], "'stray'"),
        (None, ["--config"], "--config"),
        (None, ["--config", "a.yaml", "--config", "b.yaml"], r"--config.*2"),
        (None, ["--config", "none.yaml"], "there is no such file"),
        (None, ["--config", "."], "is a folder"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str | None, flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(tmp_path, text, *flags)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.yaml").write_bytes(b"x" * (2 << 20))
    for name, problem in [("binary.yaml", "is not text"), ("large.yaml", "Is it data")]:
        with pytest.raises(ConfigError, match=problem):
            parse_args((Script,), ["--config", str(tmp_path / name)])


def test_every_kind_of_field_that_trl_has(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": "{num_cycles: 2}",
        "save_strategy": "no",
        "report_to": "none",
        "reward_weights": "[1, 0.5]",
        "max_turns": "null",
        "bf16": "false",
    }
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()) + "model: {use_peft: true}\n")
    config, model = parse_args((ToolGRPOConfig, ModelConfig), ["--config", str(path)])
    assert (config.learning_rate, config.save_strategy, config.report_to) == (1e-5, "no", [])
    assert (config.lr_scheduler_type, config.lr_scheduler_kwargs) == ("cosine", {"num_cycles": 2})
    assert (config.reward_weights, config.max_turns, model.use_peft) == ([1.0, 0.5], None, True)


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
    said = {name: value for name, value in told.items() if name not in (*SECRETS, *PER_CALL)}
    return {
        name: value for name, value in said.items() if value is not None or flags_of("train")[name].default is not None
    }


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
    [
        *(("record_episodes", "true", 1.0), ("record_episodes", "false", 0.0), ("record_episodes", "0.1", 0.1)),
        *(("gradient_checkpointing", "auto", "auto"), ("gradient_checkpointing", "no", False)),
    ],
)
def test_a_switch_with_more_values_starts_and_resumes(flag: str, word: str, value: Any, tmp_path: Path) -> None:
    base = ["--model_name_or_path", "nano", "--dataset_id_or_path", "arithmetic", "--reward", "accuracy", "--use_cpu"]
    argv = [*base, "--output_dir", str(tmp_path), f"--{flag}", word]
    keep_run_config(run_text(read("train", argv)), tmp_path)
    for words in (argv, ["--config", str(tmp_path / "run.yaml")]):
        assert getattr(parse_arguments(words)[1], flag) == value


def test_a_run_s_file_has_the_paths_whatever_they_look_like_and_names_as_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with `auth` in it is blanked elsewhere; a folder that is called as a model is the run's own output."""
    monkeypatch.chdir(tmp_path)
    for name in ("auth_env.py", "hf_dataset_rows.jsonl", "ds.json"):
        Path(name).write_text("")
    Path("nano").mkdir()
    words = ["--environment", "auth_env.py:AuthEnv", "--dataset_id_or_path", "hf_dataset_rows.jsonl"]
    words += ["--model_name_or_path", "nano", "--output_dir", "nano", "--deepspeed", "ds.json"]
    kept = yaml.safe_load(run_text(read("train", words)))
    assert kept["environment"] == f"{tmp_path}/auth_env.py:AuthEnv" and kept["deepspeed"] == f"{tmp_path}/ds.json"
    assert kept["dataset_id_or_path"] == f"{tmp_path}/hf_dataset_rows.jsonl"
    assert (kept["model_name_or_path"], kept["output_dir"]) == ("nano", f"{tmp_path}/nano")


def test_a_checkpoint_is_read_with_the_file_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("system_prompt: Be brief.\n")
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        assert read("chat", [str(folder)]).values["system_prompt"] == "Be brief."
    assert "system_prompt" not in read("chat", [str(tmp_path / "merged")]).values


def test_groups_that_several_processes_fill_are_refused_in_none_of_them_and_measured_in_one() -> None:
    words = ["--config", "recipes/configs/nano.yaml", "--per_device_train_batch_size", "4", "--num_generations", "8"]
    given = read("train", words)
    assert ["num_generations (8)" in str(error) for error in mistakes(given)] == [True]
    assert mistakes(replace(given, launches=True)) == []
    config = EvaluationConfig(per_device_train_batch_size=4, num_generations=8, use_cpu=True, bf16=False)
    assert config.per_device_train_batch_size == 8
    with pytest.raises(ConfigError, match=r"temperature is 0\.0, but generation_kwargs says 0\.9; keep one"):
        EvaluationConfig(temperature=0.0, generation_kwargs={"temperature": 0.9}, use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("had", "refused"), [("seed: 1\neval_share: 0.5", True), ("eval_share: 0.5", False), ("", False)]
)
def test_rows_of_another_seed_are_not_taken_for_those_that_a_run_held_out(
    tmp_path: Path, had: str, refused: bool
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(n), "answer": "1"}) + "\n" for n in range(8)))
    (tmp_path / "run.yaml").write_text(f"dataset_id_or_path: {rows}\n{had}\n")
    words = ["--model_name_or_path", str(tmp_path), "--dataset_id_or_path", str(rows), "--eval_share", "0.5"]
    given = read(
        "evaluate", [*words, "--reward", "exact_match", "--use_cpu", "true", "--output_dir", str(tmp_path / "out")]
    )
    run = EvaluationRun(*evaluation_arguments(given), Terminal(None, io.StringIO(), quiet=False), given)
    if refused:
        with pytest.raises(ConfigError, match=r"trained on some of them; give what it had: --seed 1 --eval_share 0\.5"):
            run._questions()
    else:
        assert len(run._questions()) == 4


def test_an_adapter_names_the_revision_of_its_base() -> None:
    model = ModelConfig(model_name_or_path="ORG/M", model_revision="v1", use_peft=True, lora_target_modules=["q_proj"])
    assert of_revision(get_peft_config(model), model).revision == "v1" and of_revision(None, model) is None


def test_a_launched_run_is_gone_on_with_as_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setattr("toolgrpo.commands.main._run", lambda *given: 0)  # where execv would have replaced it
    monkeypatch.setenv(LAUNCHED_WITH, "")
    words = ["train", "--config", "recipes/configs/nano.yaml", "--num_processes", "2", "--output_dir", str(tmp_path)]
    main(words)
    assert started[0][-5:] == ["train", "--config", "recipes/configs/nano.yaml", "--output_dir", str(tmp_path)]
    line = shlex.split(resume_command("train", tmp_path))
    assert line[:3] == ["toolgrpo", "train", "--accelerate_config"] and Path(line[3]).name.endswith(".yaml")
    assert line[4:] == ["--num_processes", "2", "--config", f"{tmp_path}/run.yaml", "--resume_from_checkpoint", "auto"]


@pytest.mark.parametrize(("text", "refused"), [("# My shop", True), ("---\ntags: [trl]\n---\n", False)])
def test_a_readme_of_ones_own_is_not_replaced_by_a_models_card(tmp_path: Path, text: str, refused: bool) -> None:
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
