"""Every field of TRL's config has one place: read here, read by TRL's code that runs, or refused with a sentence."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trl.trainer.callbacks
import trl.trainer.grpo_trainer
from transformers import TrainingArguments
from trl import GRPOConfig
from trl.trainer import grpo_config

import toolgrpo
from toolgrpo import ToolGRPOConfig
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.trl.fields import DONE_HERE, READ_BY_TRL, READ_HERE, WITHOUT_EFFECT

pytestmark = pytest.mark.contract

SOURCE = "\n".join(path.read_text() for path in Path(toolgrpo.__file__).parent.rglob("*.py"))
TRLS_SOURCE = "\n".join(
    inspect.getsource(module) for module in (trl.trainer.grpo_trainer, grpo_config, trl.trainer.callbacks)
)
OTHER_VALUE: dict[str, Any] = {
    "max_tool_calling_iterations": 3,
    "num_completions_to_print": 3,
    "vllm_model_impl": "transformers",
    "cache_implementation": "static",
    "vllm_structured_outputs_regex": "x",
    "log_completions_hub_repo": "someone/table",
}


def trls_own() -> set[str]:
    inherited = {field.name for field in fields(TrainingArguments)}
    deprecated = {field.name for field in fields(GRPOConfig) if field.metadata.get("help", "").startswith("Deprecated")}
    return {field.name for field in fields(GRPOConfig)} - inherited - deprecated


def test_every_field_of_trl_stands_in_one_table() -> None:
    tables = (READ_HERE, READ_BY_TRL, frozenset(WITHOUT_EFFECT))
    new = trls_own() - frozenset().union(*tables)
    gone = frozenset().union(*tables) - trls_own()
    assert not new, "TRL has new fields. See where TRL reads each, and enter it in trainer/trl/fields.py"
    assert not gone, "TRL has no such fields any more. Remove them from trainer/trl/fields.py"
    assert sum(map(len, tables)) == len(frozenset().union(*tables)), "a field stands in two tables"


def test_every_field_is_read_where_its_table_says() -> None:
    of = r"(?<=\bself\.)|(?<=\bargs\.)"
    read_here = re.findall(rf"""(?:{of}|(?<=\bconfig\.)|(?<=\bfields\["))\w+""", SOURCE)
    assert not READ_HERE - set(read_here), "nothing in toolgrpo reads these"
    assert not READ_BY_TRL - set(re.findall(rf"(?:{of})\w+", TRLS_SOURCE)), "TRL's trainer does not read these"


@pytest.mark.parametrize("name", sorted({**WITHOUT_EFFECT, **DONE_HERE}))
def test_a_field_without_effect_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    default = {field.name: field.default for field in fields(GRPOConfig)}[name]
    other = OTHER_VALUE.get(name, not default if isinstance(default, bool) else {"a": 1})
    with pytest.raises(ConfigError, match=rf"^{name}"):
        ToolGRPOConfig(str(tmp_path), **{name: other})


def test_what_trl_deprecates_is_read_by_its_new_name(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        config = ToolGRPOConfig(str(tmp_path), report_to="none", use_cpu=True, vllm_importance_sampling_cap=2.0)
    assert config.vllm_importance_sampling_clip_max == 2.0 and config.rollout_correction == "auto"
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="use_transformers_continuous_batching"):
        ToolGRPOConfig(str(tmp_path), report_to="none", use_cpu=True, use_transformers_paged=True)
