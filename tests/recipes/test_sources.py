"""The recipe of three systems whose quality nobody wrote down."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolgrpo.support.plugin_files import import_file

RECIPE = Path(__file__).parents[2] / "recipes" / "sources"
tools, reward = import_file(RECIPE / "source_tools.py"), import_file(RECIPE / "source_reward.py")


def is_told(way: Any, field: str) -> list[bool]:
    return [way(name, field) == tools.right(name, field) for name in tools.ARTICLES]


@pytest.mark.parametrize(("changed", "cut", "stale"), [("0", "beacon", "atlas"), ("1", "atlas", "beacon")])
def test_each_field_has_one_cheapest_system_that_tells_it_and_the_worked_ones_have_all(
    changed: str, cut: str, stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCES_CHANGED", changed)
    ways = runpy.run_path(str(RECIPE / "source_tools.py"))["WAYS"]  # import_file would give what it has
    assert all(is_told(ways[cut], "price")) and sum(is_told(ways[stale], "price")) < 4
    assert all(is_told(ways[stale], "supplier")) and not any(is_told(ways[cut], "supplier"))
    assert sum(is_told(ways[stale], "contact")) < 4 and not any(is_told(ways[cut], "contact"))
    for field in ("material", "origin", "year"):
        assert all(is_told(ways[stale], field)) and all(is_told(ways[cut], field))


def test_rows_have_no_call_and_no_article_is_in_both_splits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(RECIPE / "source_rows.py"), str(tmp_path)], check=True, timeout=60)
    asked: dict[str, set[str]] = {}
    for split, n in (("train", 400), ("heldout", 240)):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert len(rows) == n and {tuple(row) for row in rows} == {("prompt", "answer", "task")}
        questions = {row["prompt"] for row in rows}
        assert len(questions) == n
        asked[split] = {name for name in tools.ARTICLES for question in questions if name in question}
    assert not asked["train"] & asked["heldout"]


@pytest.mark.parametrize(
    ("called", "final", "earned"),
    [
        (["cedar"], "It costs 80.31 a piece.", 0.2),
        (["beacon"], "It costs 80.31 a piece.", 1.0),
        (["atlas"], "It costs 52.28 a piece.", 0.0),
        (["atlas", "beacon"], "It costs 52.28 or 80.31.", 0.0),
        (["cedar", "cedar"], "It costs $80.31 a piece.", 0.0),
        ([], "It costs 80.31 a piece.", 0.0),
        (["beacon"], "80.31", 0.0),
        (["beacon"], "It costs <tool_response>80.31</tool_response>.", 0.0),
    ],
)
def test_only_a_right_sentence_is_paid_and_a_billed_look_up_costs(
    called: list[str], final: str, earned: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [SimpleNamespace(name=name, ok=True, result=tools.ask(name, "amber bench", "price")) for name in called]
    monkeypatch.setattr(reward, "calls", lambda trajectory: made)
    completions = [[{"role": "assistant", "content": final}]]
    assert reward.reward_func(completions, ["80.31"], [None]) == [pytest.approx(earned)]
