"""Supervised training says now and then how far it is, also where its steps are slow."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from toolgrpo.sft.carded_trainer import StepProgress


@pytest.mark.parametrize(
    ("seconds_per_step", "told"),
    [(0.1, [20, 40, 60, 80, 100]), (10.0, list(range(2, 101, 2))), (1.06, [19, 38, 57, 76, 95, 100])],
)
def test_a_slow_training_is_not_silent(seconds_per_step: float, told: list[int]) -> None:
    now = 0.0
    shown = io.StringIO()
    with StepProgress(Console(file=shown, width=100), "nano", 100, clock=lambda: now) as progress:
        for step in range(100):
            now += seconds_per_step
            progress.step(step, 1.0)
    assert [int(line.split()[2]) for line in shown.getvalue().splitlines()] == told
