"""The guides name only flags and metrics that exist, and the table of flags is the code's own."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import trl.trainer.grpo_trainer
from trl import GRPOConfig, ModelConfig

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.given import ALIASES
from toolgrpo.commands.other_names import LAUNCHER_FLAGS
from toolgrpo.commands.table import DataArguments, EvaluationArguments, InitArguments, SFTArguments
from toolgrpo.trainer.config import ToolGRPOConfig

ROOT = Path(__file__).parents[2]
HOW_TO = ("troubleshooting", "multi_turn", "migration", "rewards", "data", "evaluation")
GUIDES = (*(f"how-to/{name}.md" for name in HOW_TO), "background/off_policy.md", "background/overlap.md")
TRL_SOURCE = Path(trl.trainer.grpo_trainer.__file__).read_text()
# of `vllm serve` (it is ours too), of argparse, of pip (`--no-deps`)
NOT_OURS = {*LAUNCHER_FLAGS, "dtype", "help", "no"}


@pytest.mark.parametrize("guide", [*GUIDES, "reference/flags.md"])
def test_every_flag_exists(guide: str) -> None:
    of_commands = (EvaluationArguments, SFTArguments, DataArguments, InitArguments)
    types = (ScriptArguments, ToolGRPOConfig, ModelConfig, *of_commands)
    known = {*(field.name for kind in types for field in dataclasses.fields(kind)), *ALIASES, "config"}
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]*)", (ROOT / "docs" / guide).read_text()))
    assert named and named - known - NOT_OURS == set()


def test_the_short_form_of_the_tests_names_files_that_are_there() -> None:
    named = [word for word in runpy.run_path(str(ROOT / ".ci" / "pythons"))["TESTS"] if "tests/" in word]
    assert named and [path for path in named if not (ROOT / path).exists()] == []


def test_every_metric_exists() -> None:
    """Its name stands in the code, or what a longer one is put together from."""
    code = TRL_SOURCE + "".join(path.read_text() for path in (ROOT / "toolgrpo").rglob("*.py"))
    text = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    named = {name for name in re.findall(r"`([a-z_]+(?:/[A-Za-z0-9_]+)+)`", text) if not (ROOT / name).exists()}
    table = re.findall(r"^\| (`[^|]*) \|", text.partition("## Low rewards")[0], re.MULTILINE)
    named |= {name for cell in table for name in re.findall(r"`([a-z_/A-Z0-9]+)`", cell)}
    assert len(named) > 30
    for name in named:
        stem, head, last = re.split(r"[A-Z\d]", name)[0], name.partition("/")[0], name.rpartition("/")[2]
        put_together = f'"{head}/{{' in code and re.search(rf"\b{last}\b", code)
        assert f'"{name}"' in code or (stem != name and stem in code) or put_together, name


def test_the_table_of_flags_is_the_codes_own() -> None:
    """To renew it: paste what this test prints."""
    trls = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    ours = [f for f in dataclasses.fields(ToolGRPOConfig) if trls.get(f.name, dataclasses.MISSING) != f.default]
    own = [*dataclasses.fields(ScriptArguments), *(f for f in ours if f.default is not dataclasses.MISSING)]
    table = [
        f"| `--{field.name}` | {'' if field.default is None else f'`{field.default}`'} | {field.metadata['help']} |"
        for field in own
        if "help" in field.metadata
    ]
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    assert [line for line in table if line not in text] == [], "\n" + "\n".join(table)
