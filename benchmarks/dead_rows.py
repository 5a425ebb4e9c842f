"""Dead rows: the training pass of the nano run with and without the rows that have no advantage.

    python benchmarks/dead_rows.py                       # --seeds 42 1 2
    python benchmarks/dead_rows.py --quick               # a few small steps, one seed

Each seed is a run of the shipped recipe in a process of its own. In the last third of its steps every pass over a batch is
made both ways, in turn first the one and first the other, on the same weights: the old policy's, and forward and backward of
the loss. What is trained on is the pass without dead rows, so a run is the run that a user has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from toolgrpo.support.process_setup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

from _machine import ROOT
from _reporting import benchmark, parser_of, save
from _rows import Figure, Row

TIME_LIMIT_S = 3600
WAYS = ("whole", "live")
QUICK = ("--max_steps", "6", "--per_device_train_batch_size", "16")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"runs": []}
    for seed in options.seeds[: 1 if options.quick else None]:
        results["runs"].append({"seed": seed, "steps": _steps(seed, QUICK if options.quick else ())})
        save("dead_rows", results, quick=options.quick)
    return results


def _steps(seed: int, size: tuple[str, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--config", "recipes/configs/nano.yaml", "--seed", str(seed), *size]
        subprocess.run([*command, "--output_dir", folder], check=True, cwd=ROOT, timeout=TIME_LIMIT_S)
        return json.loads((Path(folder) / "passes.json").read_text())


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    what, totals, made = "a training pass of the last third of the nano run", [], []
    for run in results["runs"]:
        whole, live = ([sum(step[way].values()) for step in run["steps"]] for way in WAYS)
        totals.append((sum(whole), sum(live)))
        skipped = sum(step["rows_skipped"] for step in run["steps"]) / len(run["steps"])
        seed = f"seed {run['seed']}, {skipped:.0%} of the rows left out"
        other = Figure.of_steps(whole)
        made.append(Row(f"{what}, {seed}", Figure.of_steps(live), other=other, other_name="with dead rows"))
    made.append(Row(f"{what}, all seeds", ratio=Figure.of_ratios(totals), other_name="with dead rows"))
    for name, of in (("largest difference of two gradients", "gradient_gap"), ("largest gradient", "gradient")):
        made.append(Row(name, Figure(max(step[of] for run in results["runs"] for step in run["steps"])), ""))
    return made


# --- in the process of one seed --------------------------------------------------------------------------------------


def trainer_of_both_ways() -> type:
    import torch

    from toolgrpo import ToolGRPOTrainer

    class BothWays(ToolGRPOTrainer):
        """In the last third of the steps, makes every pass over all rows too, and keeps the seconds of both."""

        args: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.passes: list[dict[str, Any]] = []
            self._pass: dict[str, Any] = {}

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self._pass = {way: {} for way in WAYS}
            return super()._generate_and_score_completions(inputs)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            score = super()._get_per_token_logps_and_entropies
            choice = self._made.choice
            if torch.is_grad_enabled() or choice is None or not self._is_late():
                return score(*args, **kwargs)
            scored = {}
            for way in self._in_turn():
                self._made.choice = choice if way == "live" else None
                started = time.perf_counter()
                scored[way] = score(*args, **kwargs)
                self._pass[way]["old_policy_s"] = time.perf_counter() - started
            self._made.choice = choice
            return scored["live"]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            compute = super().compute_loss
            if not self._is_late():
                return compute(model, inputs, *args, **kwargs)
            asked = self.args
            gradients = {}
            for way in self._in_turn():
                self.args = asked.changed(skip_dead_rows="auto" if way == "live" else "off")
                started = time.perf_counter()
                loss = compute(model, inputs, *args, **kwargs)
                parts = torch.autograd.grad(loss, list(model.parameters()))
                self._pass[way]["loss_s"] = time.perf_counter() - started
                gradients[way] = torch.cat([part.flatten() for part in parts])
            self.args = asked
            self._pass["gradient"] = gradients["whole"].abs().max().item()
            self._pass["gradient_gap"] = (gradients["whole"] - gradients["live"]).abs().max().item()
            self._pass["rows_skipped"] = self._metrics["train"]["signal/rows_skipped"][-1]
            self._pass["step"] = self.state.global_step
            self.passes.append(self._pass)
            return compute(model, inputs, *args, **kwargs)

        def _is_late(self) -> bool:
            return bool(3 * self.state.global_step >= 2 * self.args.max_steps)

        def _in_turn(self) -> tuple[str, ...]:
            return WAYS if self.state.global_step % 2 else WAYS[::-1]

    return BothWays


def train(argv: list[str]) -> None:
    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.job import Job
    from toolgrpo.commands.terminal import Terminal

    script, config, model = parse_arguments(argv)
    terminal = Terminal.open(Path(config.output_dir) / "train.log", main_process=True)
    parts = Job(script, config, model, terminal)
    trainer = trainer_of_both_ways()(
        parts.model_path(str(model.model_name_or_path)),
        parts.rewards(),
        config.changed(disable_tqdm=True),
        train_dataset=parts.training_rows(),
        tools=parts.toolbox(),
    )
    try:
        trainer.train()
    finally:
        trainer.close()
    (Path(config.output_dir) / "passes.json").write_text(json.dumps(trainer.passes))


def main() -> None:
    if "--config" in sys.argv:
        train(sys.argv[1:])
        return
    parser = parser_of(__doc__, "a few small steps, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    benchmark("dead_rows", parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
