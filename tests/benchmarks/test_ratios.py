"""Ours beside what it is compared with, small and now: ratios of interleaved medians above floors that are far below what
benchmarks/ measures. Times are never compared with a number.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rollouts
import torch
import training_pass


@pytest.mark.slow
def test_a_pass_with_much_to_share() -> None:
    """Measured: 5.9 to 6.3 times on a quiet machine, 1.9 on a busy one; in this process both have the same memory settings and output head. Processor time."""
    case = training_pass.Case(prompt=150, completion=15, group=8, lengths="full", hidden=128, layers=2)
    model, ids, mask = training_pass.build(case)
    seconds: dict[str, list[float]] = {"trl": [], "shared": []}
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would be what is measured
    for _ in range(4):
        for way, taken in seconds.items():
            model.zero_grad()
            started = time.process_time()
            training_pass.score(way, case, model, ids, mask).backward()
            taken.append(time.process_time() - started)
    torch.set_num_threads(n_threads)
    median = {way: statistics.median(taken[1:]) for way, taken in seconds.items()}  # the first one warms up
    assert median["trl"] >= 1.3 * median["shared"], seconds


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_rollouts_with_tools_of_a_tenth_of_a_second(tmp_path: Path) -> None:
    """Measured: 11.6 times quicker on two quiet cores, 4.9 on half of a busy one."""
    answer = tmp_path / "rows.jsonl"
    command = [sys.executable, rollouts.__file__, "--rows-of", "nano", "--latencies", "0.1", "--quick"]
    subprocess.run([*command, "--json", str(answer)], check=True, timeout=600)
    row = json.loads(answer.read_text())
    assert row["number_type"] == "float32", "TRL's vLLM computes in what training uses on a CPU"
    assert statistics.median(row["all_s"]["TRL"]) >= 2 * statistics.median(row["all_s"]["ours"]), row
