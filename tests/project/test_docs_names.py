"""The guides name only flags, metrics and files that exist, and the table of flags is the code's own."""

from __future__ import annotations

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl.trainer.grpo_trainer
from trl import GRPOConfig, ModelConfig

from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.given import ALIASES
from toolgrpo.commands.other_names import LAUNCHER_FLAGS
from toolgrpo.commands.table import DataArguments, EvaluationArguments, InitArguments, SFTArguments
from toolgrpo.engines.base import CacheRoom
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus as Status
from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.learning.correction import weight_metrics, weights_of_rows
from toolgrpo.observe.metrics import Known, batch_metrics
from toolgrpo.rewards import get_reward
from toolgrpo.rollout import EpisodeLimits
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.trainer.config import ToolGRPOConfig

ROOT = Path(__file__).parents[2]
HOW_TO = ("troubleshooting", "multi_turn", "migration", "rewards", "data", "evaluation")
GUIDES = [
    *(f"how-to/{name}.md" for name in HOW_TO),
    "background/off_policy.md",
    "background/overlap.md",
    "reference/flags.md",
]
TRL_SOURCE = Path(trl.trainer.grpo_trainer.__file__).read_text()
KEYS = ("prompts", "completions", "completion_ids", "trajectories")
# of `vllm serve` (it is ours too), of argparse, of pip (`--no-deps`)
NOT_OURS = {*(f"--{name}" for name in LAUNCHER_FLAGS), "--dtype", "--help", "--no"}


def own_fields() -> list[dataclasses.Field[object]]:
    trls = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    ours = [f for f in dataclasses.fields(ToolGRPOConfig) if trls.get(f.name, dataclasses.MISSING) != f.default]
    return [*dataclasses.fields(ScriptArguments), *(f for f in ours if f.default is not dataclasses.MISSING)]


def flag_table() -> list[str]:
    return [
        f"| `--{field.name}` | {'' if field.default is None else f'`{field.default}`'} | {field.metadata['help']} |"
        for field in own_fields()
        if "help" in field.metadata
    ]


def episode() -> Trajectory:
    """One of everything that a metric is named after."""
    ledger = Ledger([1])
    ledger.sampled([2], [-0.5])
    results = (*(ToolResult("x", "NAME", kind) for kind in ToolErrorKind), ToolResult("x", "NAME"))
    attempts = tuple(CallAttempt(Status.OK, "raw", "NAME", {}) for _ in results)
    ledger.turn(Turn(start=0, end=1, content="", reasoning=None, attempts=attempts, results=results))
    return ledger.finish(StopReason.FINISHED)


def known_metrics() -> set[str]:
    found: set[str] = {"step_time", "success", "rewards/NAME/mean", "rewards/NAME/std", "reward_of_task/NAME"}
    batch = RolloutBatch(episodes=(Scored({"prompt": ""}, episode()),)).graded([Grade({}, 1.0)], lambda one: True)
    found |= {"signal/rows_skipped", "signal/tokens_skipped", "sampling/dropped_episodes"}
    rows = weights_of_rows(torch.zeros(4, 1), torch.ones(4, 1), torch.ones(4, 1))
    found |= set(weight_metrics(rows))
    run = Known(["NAME"], EpisodeLimits(max_completion_length=9), CacheRoom(9, 9, 9))
    found |= set(batch_metrics(batch, run)) | {"tools/error/CAUSE", "reward/groups_without_spread"}
    found |= set(re.findall(r'_metrics\[mode\]\["([^"]+)"\]', TRL_SOURCE))
    parts: dict[str, float] = {}
    get_reward("tool_use")(
        completions=[[]], prompts=[""], trajectories=[episode()], completion_ids=[[2]], log_metric=parts.__setitem__
    )
    return found | set(parts) | {"tool_use/PART"}


@pytest.mark.parametrize("guide", GUIDES)
def test_every_flag_exists(guide: str) -> None:
    text = (ROOT / "docs" / guide).read_text()
    kinds = (EvaluationArguments, SFTArguments, DataArguments, InitArguments)
    types = (ScriptArguments, ToolGRPOConfig, ModelConfig, *kinds)
    known = {f"--{field.name}" for kind in types for field in dataclasses.fields(kind)} | {"--config"} | NOT_OURS
    known |= {f"--{alias}" for alias in ALIASES}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_]*", text))
    assert named, "the guide names flags"
    assert named <= known, sorted(named - known)


def test_every_metric_exists() -> None:
    known = known_metrics()
    text = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    heads = {name.split("/")[0] for name in known if "/" in name}
    named = {n for n in re.findall(r"`([a-z_]+(?:/[A-Za-z0-9_]+)+)`", text) if n.split("/")[0] in heads}
    files = {name for name in named if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()}
    assert len(named) > 30
    assert named - files <= known, sorted(named - files - known)
    table = re.findall(r"^\| (`[^|]*) \|", text.partition("## Low rewards")[0], re.MULTILINE)
    plain = {name for cell in table for name in re.findall(r"`([a-z_/A-Z0-9]+)`", cell)}
    assert plain <= known, sorted(plain - known)


@pytest.mark.parametrize("guide", GUIDES)
def test_every_file_exists(guide: str) -> None:
    text = (ROOT / "docs" / guide).read_text()
    for name in re.findall(r"(?<![\w/])((?:recipes|rewards|tools_funcs|toolgrpo|benchmarks)/[\w./]+\.\w+)", text):
        assert (ROOT / name).exists() or "CONFIG" in name, name


def test_the_readme_leads_to_every_page() -> None:
    """In one step, or by way of another page."""
    seen: set[Path] = set()
    to_read = [ROOT / "README.md"]
    while to_read:
        page = to_read.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text())
            to_read += [(page.parent / link).resolve() for link in links]
    assert set((ROOT / "docs").rglob("*.md")) - seen == set()


def test_the_english_of_the_pages_is_linted() -> None:
    done = subprocess.run([sys.executable, str(ROOT / ".ci" / "english")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_table_of_flags_is_the_codes_own() -> None:
    """To renew it: paste what this test prints."""
    table = flag_table()
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    missing = [line for line in table if line not in text]
    assert not missing, "\n" + "\n".join(table)


def test_the_short_form_of_the_tests_names_files_that_are_there() -> None:
    named = [word for word in runpy.run_path(str(ROOT / ".ci" / "pythons"))["TESTS"] if "tests/" in word]
    assert named and [path for path in named if not (ROOT / path).exists()] == []
