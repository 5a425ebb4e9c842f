"""Metrics of several processes as one."""

from __future__ import annotations

import pytest

from toolgrpo.observe.reduction import merged, of_all_processes


def test_counts_are_added_bounds_are_the_extremes_and_shares_are_averaged() -> None:
    one = {
        "rollout/turns": 2.0,
        "rollout/sampled_tokens": 100.0,
        "rollout/seconds": 3.0,
        "completions/min_length": 4.0,
        "completions/max_length": 9.0,
        "tools/add/calls": 5.0,
    }
    two = {
        "rollout/turns": 3.0,
        "rollout/sampled_tokens": 50.0,
        "rollout/seconds": 7.0,
        "completions/min_length": 2.0,
        "completions/max_length": 6.0,
        "tools/add/calls": 1.0,
        "tools/add/failures": 1.0,
        "tools/error/timeout": 1.0,
        "tools/latency_p50": 0.25,
    }
    assert merged([one, two]) == {
        "rollout/turns": 2.5,
        "rollout/sampled_tokens": 150.0,
        "rollout/seconds": 7.0,
        "completions/min_length": 2.0,
        "completions/max_length": 9.0,
        "tools/add/calls": 6.0,
        "tools/add/failures": 1.0,
        "tools/error/timeout": 1.0,
        "tools/latency_p50": 0.25,
    }


def test_one_process_logs_its_own() -> None:
    assert of_all_processes({"rollout/turns": 2.0}) == {"rollout/turns": pytest.approx(2.0)}
