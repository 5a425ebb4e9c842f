"""Does nano read its tools? The same held-out questions with the job's own tools, in another order, and under other names.

    python benchmarks/reading.py                       # the base
    python benchmarks/reading.py --model outputs/nano  # after `make train`

The other names are sets that no demonstration has shown. `right tool` is the share of first calls that name the tool which
does what the question asks; `success` is the whole task: calls, results, and the last message. Greedy, real tools, the
same episode loop as training. Writes benchmarks/results/reading.json.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch

from _machine import stamp_of
from _reporting import STAMP, result_file, save
from _rows import Figure, Row

from recipes.nano.toolsets import CANONICAL, ToolSpec, renamed, reordered
from toolgrpo.data.arithmetic import Problem, draw_problem, success
from toolgrpo.evaluation.measures import Share
from toolgrpo.trajectory import Trajectory

KINDS: dict[str, Callable[[random.Random], tuple[ToolSpec, ...]]] = {
    "own": lambda rng: CANONICAL,
    "another order": reordered,
    "other names": lambda rng: renamed(rng, held_out=True),
}
OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "//"}


def questions(n: int, rng: random.Random) -> list[Problem]:
    """Problems that were never demonstrated, of one to three calls."""
    problems: list[Problem] = []
    while len(problems) < n:
        problem = draw_problem(rng, rng.choice((1, 1, 2, 2, 3)))
        if problem.split == "heldout":
            problems.append(problem)
    return problems


def write_tools(tools: Sequence[ToolSpec], path: Path) -> Path:
    """A plugin file with these tools; their schemas are given as they are."""
    lines = ["from toolgrpo.tools import tool", ""]
    for spec in tools:
        (left, _), (right, _) = spec.parameters
        lines += [
            f"@tool(schema={spec.schema!r})",
            f"def {spec.name}({left}: int, {right}: int) -> int:",
            f'    """{spec.description}"""',
            f"    return {left} {OPERATORS[spec.operation]} {right}",
            "",
        ]
    path.write_text("\n".join([*lines, f"TOOL_FUNCTIONS = [{', '.join(spec.name for spec in tools)}]", ""]))
    return path


def answer(model: str, tools: Sequence[ToolSpec], problems: Sequence[Problem], folder: Path) -> list[Trajectory]:
    from datasets import Dataset

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.observe.options import RecordedShare

    config = ToolGRPOConfig(
        str(folder), per_device_train_batch_size=8, num_generations=8, max_completion_length=224, max_turn_tokens=64,
        engine="transformers", report_to="none", use_cpu=True, record_episodes=RecordedShare(False),
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": problem.question}]} for problem in problems]
    trainer = ToolGRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_list(rows),
        tools=write_tools(tools, folder / "tools.py"),
    )
    try:
        return list(trainer.rollout(rows, replace(config.sampling_options(), temperature=0.0)).trajectories)
    finally:
        trainer.close()


def measure(model: str, kind: str, n: int, n_toolsets: int) -> dict[str, object]:
    rng = random.Random(f"reading {kind}")
    done: list[bool] = []
    right: list[bool] = []  # of the questions where a tool was called
    for _ in range(n_toolsets):
        tools = KINDS[kind](rng)
        problems = questions(n // n_toolsets, rng)
        with tempfile.TemporaryDirectory() as folder:
            trajectories = answer(model, tools, problems, Path(folder))
        names = {spec.operation: spec.name for spec in tools}
        for problem, trajectory in zip(problems, trajectories, strict=True):
            done.append(success(trajectory.messages, str(problem.answer)))
            right += [attempt.name == names[problem.steps[0].operation] for attempt in trajectory.attempts[:1]]
    succeeded, read = Share.of(done), Share.of(right)
    print(f"{kind:>14} {succeeded!s:>24} {read!s:>24} of {read.n}", flush=True)
    return {
        "tools": kind,
        "questions": len(done),
        "success": succeeded.value,
        "called": read.n,
        "right_tool": read.value,
    }


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for model, kinds in results.items():
        for kind in kinds if model != STAMP else ():
            for measure, what, n in (
                ("success", "held-out success", "questions"),
                ("right_tool", "right tool", "called"),
            ):
                made.append(
                    Row(
                        benchmark="reading",
                        what=f"{what}, {model}, tools: {kind['tools']}",
                        unit="",
                        ours=Figure(kind[measure], n=kind[n]),
                        more_is_better=True,
                    )
                )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="nano, or the folder of a trained one")
    parser.add_argument("--quick", action="store_true", help="a tenth of the questions")
    options = parser.parse_args()

    from toolgrpo.models import folder_of

    model = str(folder_of(options.model))
    n, n_toolsets = (24, 4) if options.quick else (240, 8)
    print(f"{options.model}\n{'tools':>14} {'success':>24} {'right tool':>24}")
    measured = [measure(model, kind, n, 1 if kind == "own" else n_toolsets) for kind in KINDS]
    save(
        "reading", {**_other_models(options.quick), options.model: measured}, quick=options.quick, number_type="float32"
    )


def _other_models(quick: bool) -> dict[str, Any]:
    """Models measured before, if it was on this machine and of this commit: else they would be shown as of these."""
    kept = result_file("reading")
    found = json.loads(kept.read_text()) if kept.exists() else {}
    stamp, now = found.pop(STAMP, None), stamp_of(quick=quick).as_json()
    alike = stamp is not None and all(stamp[what] == now[what] for what in ("machine", "commit", "quick"))
    return dict(found) if alike else {}


if __name__ == "__main__":
    main()
