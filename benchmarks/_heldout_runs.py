"""One training run that is asked the held-out questions as it goes, for the parts of `learning_signal.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """When the questions are asked, and when the run ends.

    `rows` are the training rows and the held-out ones, where they are not those of the config.
    """

    done: Callable[[dict[str, Any]], bool]  # by a point of the curve; the run ends there
    due: Callable[[int, int], bool]  # by the step and the episodes so far
    budget: int | None = None  # episodes; the run ends there, too
    rows: tuple[Rows, Rows] | None = None


def run(argv: list[str], plan: Plan) -> dict[str, Any]:
    """Train as `recipes/train.py` does; return the curve of the held-out success (greedy)."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from toolgrpo import ToolGRPOTrainer
    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.parts import RunParts
    from toolgrpo.commands.terminal import Terminal

    script, config, model = parse_arguments(argv)
    terminal = Terminal.open(Path(config.output_dir) / "train.log", main_process=True)
    parts = RunParts(script, config, model, terminal)
    training, heldout = (
        (parts.training_rows(), list(parts.heldout_rows() or ()))
        if plan.rows is None
        else (Dataset.from_list(plan.rows[0]), plan.rows[1])
    )
    trainer = ToolGRPOTrainer(
        parts.model_path(str(model.model_name_or_path)),
        parts.rewards(),
        config.changed(disable_tqdm=True),
        train_dataset=training,
        tools=parts.toolbox(),
    )
    sampled = config.sampling_options()
    greedy = config.changed(temperature=0.0).sampling_options()
    curve: list[dict[str, Any]] = []

    def success(sampling: Any = greedy) -> dict[str, Any]:
        """The share of questions that were answered, and that of each length of chain."""
        right = trainer.measure(heldout, sampling, label="held out").successes
        found: dict[str, Any] = {"success": sum(right) / len(right)}
        if plan.rows is not None:
            lengths = [row["n_calls"] for row in heldout]
            found["by_calls"] = {
                n: sum(ok for ok, length in zip(right, lengths, strict=True) if length == n) / lengths.count(n)
                for n in sorted(set(lengths))
            }
        return found

    class Curve(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        """Measures where it is due, and ends the run at the target or at the budget."""

        def __init__(self) -> None:
            self.measuring_s = 0.0
            self.started = time.monotonic()

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            episodes = trainer.n_episodes
            spent = state.global_step >= state.max_steps or (plan.budget is not None and episodes >= plan.budget)
            if not plan.due(state.global_step, episodes) and not spent:
                return
            before = time.monotonic()
            point = {
                "step": state.global_step,
                "episodes": episodes,
                "seconds": before - self.started - self.measuring_s,
            }
            curve.append({**point, **success()})
            print(
                f"step {state.global_step}: {curve[-1]['success']:.3f} after {episodes} episodes, "
                f"{point['seconds']:.1f} s",
                flush=True,
            )
            self.measuring_s += time.monotonic() - before
            control.should_training_stop = control.should_training_stop or spent or plan.done(curve[-1])

    trainer.add_callback(Curve())
    try:
        before = success()
        before_sampled = success(sampled) if plan.rows is not None else None
        trainer.train()
    finally:
        trainer.close()
    logs = [log for log in trainer.state.log_history if "reward/groups_without_spread" in log]
    return {
        **(
            {"before": before["success"]} if plan.rows is None else {"before": before, "before_sampled": before_sampled}
        ),
        "curve": curve,
        "reached": next((point for point in curve if plan.done(point)), None),
        "live_rate": sum(log.get("sampling/live_rate", 1 - log["reward/groups_without_spread"]) for log in logs)
        / len(logs),
    }
