"""The harder embedded tasks: arithmetic questions that need four calls, each on the result of the one
before, with the tools of the arithmetic tasks.

nano has seen chains of three at most, so before training it almost never does one of these.

Invariants: a split, a size and a seed always give the same rows, on every machine; train and
held-out rows share no problem in any wording, nor does either with the other split of the
arithmetic tasks; every answer is a non-negative integer of at most four digits.
"""

from __future__ import annotations

import json
import random
from typing import Any

from toolgrpo.data.arithmetic import SPLITS, Problem, Split, draw_problem
from toolgrpo.errors import DataError

N_CALLS = 4


def chain_rows(split: Split, n: int, seed: int = 0, n_calls: int = N_CALLS) -> list[dict[str, Any]]:
    """Return `n` different questions of `n_calls` calls each.

    Each is {"prompt": messages, "answer": text of the number, "n_calls": 4, "gold_calls": JSON}.
    """
    if split not in SPLITS:
        raise DataError(f"the chains have the splits {' and '.join(SPLITS)}, got {split!r}")
    if n < 0:
        raise DataError(f"the number of chains must be at least 0, got {n}")
    rng = random.Random(f"chains {split} {seed}" + ("" if n_calls == N_CALLS else f" of {n_calls}"))
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < n:
        problem = draw_problem(rng, n_calls)
        if problem.split == split:
            rows[problem.question] = {
                "prompt": [{"role": "user", "content": problem.question}],
                "answer": str(problem.answer),
                "n_calls": n_calls,
                "gold_calls": _calls(problem),
            }
    return list(rows.values())


def _calls(problem: Problem) -> str:
    """Return the calls that answer a problem, for the reward `gold_calls`."""
    return json.dumps(
        [{"name": step.operation, "arguments": {"a": step.left, "b": step.right}} for step in problem.steps]
    )
