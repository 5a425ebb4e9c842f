"""The command line over a YAML file over the defaults; what is wrong is one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from trl import ModelConfig

from toolgrpo.commands.given import parse_args
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


def parse(tmp_path: Path, text: str | None, *flags: str) -> Script:
    if text is not None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        flags = ("--config", str(path), *flags)
    return parse_args((Script,), flags)[0]


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
    with pytest.raises(ConfigError, match="'rows' is given twice"):
        parse(tmp_path, "rows: 1\ndata: {rows: 2}")


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("rosw: 1", [], "unknown key 'rosw'; the nearest known key is 'rows'"),
        (
            "reward: {generation: {rows: 1}}",
            [],
            "'generation'; it is a heading, and stands one level too deep, under 'rew",
        ),
        ("dta: {rows: 1}", [], "unknown heading 'dta'.*nearest is 'data'"),
        ("rows: many", [], "rows must be a whole number, got 'many'"),
        ("rows: 1.5", [], "rows must be a whole number, got 1.5"),
        ("lively: 7", [], "lively must be true or false, got 7"),
        ("limit: some", [], "limit must be a whole number, got 'some'"),
        ("reward: 7", [], r"reward must be list\[str\] \| None, got 7"),
        ("kind: b", [], "kind must be one of a, no; got 'b'"),
        ("rows: -1", [], "rows must not be negative"),
        ("rows: [", [], "is not valid YAML"),
        ("a: 1\n b: [x\n", [], "is not valid YAML: line 2: .*\n     b: "),
        ("[" * 100_000, [], "is not valid YAML: it is nested too deeply"),
        (f"rows: {'9' * 5000}", [], "is not valid YAML: line 1: no setting is an integer"),
        ("- rows", [], "must hold `key: value` lines"),
        ("", [], "is empty"),
        (None, ["--rosw", "1"], "unknown flag --rosw; the nearest known flag is --rows"),
        (None, ["--row", "1"], "unknown flag --row;"),
        (None, ["--rows", "many"], "--rows must be a whole number, got 'many'"),
        (None, ["--rows"], "--rows needs a value after it"),
        (None, ["--kind", "b"], "--kind must be one of"),
        (None, ["--reward", "x", "none"], "--reward takes none alone, got 'x none'"),
        (None, ["stray"], "'stray' belongs to no flag"),
        (None, ["--config"], "--config needs a file"),
        (None, ["--config", "a.yaml", "--config", "b.yaml"], "--config is given 2 times"),
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
