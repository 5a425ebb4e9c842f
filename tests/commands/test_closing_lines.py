"""Under the closing table: what is said where held-out success did not rise."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from toolgrpo import ToolGRPOConfig
from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun, outcome_line
from toolgrpo.evaluation.measures import Share
from toolgrpo.observe.progress import training_line


def rates(**successes: float) -> dict[str, Any]:
    shares = {name: Share(value, 100) for name, value in successes.items()}
    return {name: {"rate": one.value, "interval": list(one.interval), "n": one.n} for name, one in shares.items()}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (rates(greedy=0.4, sampled=0.4), rates(greedy=0.7, sampled=0.45), None),
        (rates(greedy=0.4, sampled=0.4), rates(greedy=0.36, sampled=0.7), None),
        (rates(greedy=0.4, sampled=0.3), rates(greedy=0.45, sampled=0.3), "change (the intervals overlap): see"),
        (rates(greedy=0.4, sampled=0.3), rates(greedy=0.38, sampled=0.3), "overlap; greedy went down): see"),
        (rates(greedy=0.7, sampled=0.6), rates(greedy=0.3, sampled=0.55), "fell (greedy): see"),
        (rates(greedy=0.7), {}, None),
        ({}, {}, None),
    ],
)
def test_what_did_not_rise_is_said(before: dict[str, Any], after: dict[str, Any], said: str | None) -> None:
    line = outcome_line(before, after)
    assert (line is None) if said is None else (line is not None and said in line)


def test_it_stands_under_the_table_and_its_page_has_the_section(tmp_path: Path) -> None:
    flags = ["--model_name_or_path", "nano", "--dataset_id_or_path", "arithmetic", "--output_dir", str(tmp_path)]
    flags += ["--reward", "exact_match"]
    shown = io.StringIO()
    run = TrainingRun(*parse_arguments(flags), Terminal(None, shown, quiet=False))
    seconds = {"all": 1.0, "rollout": 0.5, "training": 0.5}
    summary = {
        "before": rates(greedy=0.4),
        "after": rates(greedy=0.4, sampled=0.35),
        "steps": 3,
        "seconds_per_step": seconds,
    }
    of_best = {"best_step": 4, "steps_in_all": 9}
    run._show({**summary, **of_best, "seconds_in_all": 9.0, "model": "m", "episodes": None, "log": "l"}, [])
    lines = shown.getvalue().splitlines()
    (number,) = (number for number, line in enumerate(lines) if "did not clearly change" in line)
    assert "┘" in lines[number - 1] and "3 steps" in lines[number + 1]
    assert "model     m (of step 4, the best of 9 by held-out success)" in lines
    assert lines[-1] == "objective eval_success 0.35"
    found = re.search(r"see (\S+)#(\S+)", lines[number])
    assert found is not None
    page = (Path(__file__).parents[2] / found[1]).read_text()
    headings = re.findall(r"^## (.*)$", page, flags=re.MULTILINE)
    assert found[2] in [heading.lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "6 steps (3 epochs of 2 rows), learning rate 1e-06 (TRL's default; LoRA recipes use 1e-5 to 1e-4)"),
        ({"num_train_epochs": 1, "learning_rate": 4e-4}, "6 steps (1 epoch of 2 rows), learning rate 0.0004"),
        ({"max_steps": 6, "learning_rate": 1e-5}, "6 steps (of 2 rows), learning rate 1e-05"),
    ],
)
def test_the_start_says_what_is_about_to_happen(tmp_path: Path, given: dict[str, float], said: str) -> None:
    assert training_line(ToolGRPOConfig(str(tmp_path), use_cpu=True, **given), 6, range(2)) == f"training  {said}"
