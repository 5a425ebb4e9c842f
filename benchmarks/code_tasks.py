"""Code tasks: their own answers, and a program that does nothing, graded by `code_exec`. Ten rows of the recipes, a second.

    python benchmarks/code_tasks.py
    python benchmarks/code_tasks.py --mbpp sanitized-mbpp.jsonl mbpp.jsonl --humaneval HumanEval.jsonl   # a minute

The files are those that the authors of MBPP and HumanEval published, a JSON object a line. An answer should score 1.0, the
program `pass` 0.0. Rows that are refused count as neither.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _machine import ROOT
from _reporting import benchmark, parser_of, progress
from _rows import Figure, Row

from toolgrpo.data import load_tasks
from toolgrpo.rewards import get_reward, refused_rows

OF_THE_RECIPES = ROOT / "recipes" / "data" / "mbpp_10.jsonl"
COLUMNS = ("tests", "test_imports", "test_setup_code", "entry_point", "answer")


def humaneval_rows(path: Path) -> list[dict[str, Any]]:
    """Return HumanEval's tasks as rows of `code_exec`."""
    tasks = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [
        {"tests": one["test"], "entry_point": one["entry_point"], "answer": one["prompt"] + one["canonical_solution"]}
        for one in tasks
    ]


def scores(rows: Sequence[Mapping[str, Any]], programs: Iterable[str]) -> list[Any]:
    completions = [[{"role": "assistant", "content": f"```python\n{program}\n```"}] for program in programs]
    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    return get_reward("code_exec")(completions=completions, **columns)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    files = options.mbpp or ([] if options.humaneval else [OF_THE_RECIPES])
    sets: dict[str, list[Any]] = {f"MBPP, {path.name}": list(load_tasks(f"mbpp:{path}")) for path in files}
    if options.humaneval:
        sets[f"HumanEval, {options.humaneval.name}"] = humaneval_rows(options.humaneval)
    found = {}
    for name, rows in sets.items():
        progress(name)
        refused = refused_rows(rows, get_reward("code_exec"))
        good = [row for number, row in enumerate(rows) if number not in refused]
        answers, nothing = scores(good, [row["answer"] for row in good]), scores(good, ["pass"] * len(good))
        found[name] = {
            "rows": len(rows),
            "refused": len(refused),
            "answers_that_score_1": answers.count(1.0),
            "pass_that_scores_0": nothing.count(0.0),
        }
    return {"sets": found}


def rows(results: dict[str, Any]) -> list[Row]:
    return [
        Row(
            what=f"{name}: {of['rows']} rows, {of['refused']} refused; {what.replace('_', ' ')}",
            unit="",
            ours=Figure(of[what]),
            more_is_better=True,
            target=f"{of['rows']}",
        )
        for name, of in results["sets"].items()
        for what in ("answers_that_score_1", "pass_that_scores_0")
    ]


def main() -> None:
    parser = parser_of(__doc__, "the ten rows of the recipes")
    parser.add_argument("--mbpp", type=Path, nargs="*", help="files of MBPP, full or sanitized")
    parser.add_argument("--humaneval", type=Path, help="the file of HumanEval")
    benchmark("code_tasks", parser, measure, rows)


if __name__ == "__main__":
    main()
