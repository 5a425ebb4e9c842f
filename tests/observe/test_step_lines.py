"""The lines of a training: aligned under their titles, as wide as the terminal allows."""

from __future__ import annotations

import pytest

from toolgrpo.observe.progress import StepLines, StepTimes

LOG = {
    "reward": 0.4125,
    "success": 0.328,
    "reward/groups_without_spread": 0.125,
    "rollout/turns": 2.41,
    "tools/call_frequency": 1.8,
    "tools/failure_frequency": 0.12,
    "completions/mean_length": 53.6,
    "entropy": 0.71,
    "sampling/sampling_logp_difference/mean": 1.24e-4,
}


def test_a_line_has_every_number_under_its_title() -> None:
    lines = StepLines(110)
    titles, line = lines.titles(), lines.line(7, LOG, StepTimes(1.824, 0.61))
    assert line.split() == [
        *("7/110", "0.41", "0.33", "88%", "2.4", "1.8", "12%", "54", "0.71", "1.2e-04", "1.82", "0.61", "1.21")
    ]
    assert len(titles.split()) == len(line.split()) and len(titles) == len(line) < 100
    ends = [end for end in range(len(titles)) if titles[end] != " " and titles[end + 1 : end + 2] in ("", " ")]
    assert all(line[end] != " " and line[end + 1 : end + 2] in ("", " ") for end in ends)


def test_what_was_not_measured_is_a_dash() -> None:
    line = StepLines(3).line(1, {"reward": -2.0}, StepTimes(120.0, 0.0))
    assert line.split() == ["1/3", "-2.00", *["-"] * 8, "120", "0.00", "120"]


@pytest.mark.parametrize("width", [100, 80, 60, 20])
def test_on_a_narrow_terminal_the_least_is_left_out(width: int) -> None:
    lines = StepLines(110, width)
    titles = lines.titles().split()
    assert titles[:4] == ["step", "reward", "success", "live"] and "failed" in titles
    if width > 60:
        assert len(lines.titles()) < width and "s/step" in titles
    if width == 100:
        assert titles[-3:] == ["s/step", "rollout", "training"] and "engine+-" in titles
