"""One training run that is asked the held-out questions as it goes, or afterwards with the weights of then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Point = dict[str, Any]  # of a curve: step, episodes, seconds of training, success
Kept = list[tuple[Point, dict[str, Any]]]  # points that were not asked yet, with the weights of then


@dataclass(frozen=True)
class Plan:
    """When the questions are asked, and when the run ends.

    `rows` are the training rows and the held-out ones, where they are not those of the config. With `afterwards` the
    weights are kept where a measurement is due, and asked when the training has ended: a training whose rollouts go on
    meanwhile would else gain by every measurement. `before_asking` is called then.
    """

    done: Callable[[Point], bool]  # by a point of the curve; the run ends there
    due: Callable[[int, int], bool]  # by the step and the episodes so far
    budget: int | None = None  # episodes; the run ends there, too
    rows: tuple[Rows, Rows] | None = None
    afterwards: bool = False
    before_asking: Callable[[], object] = lambda: None


def run(argv: list[str], plan: Plan) -> dict[str, Any]:
    """Train as `recipes/train.py` does; return the curve of the held-out success (greedy)."""
    opened = _Opened(argv, plan)
    trainer, success = opened.trainer, opened.success
    curve: list[Point] = []
    kept: Kept = []

    def add(point: Point) -> None:
        curve.append(opened.asked(point))

    trainer.add_callback(
        following(plan, lambda: int(trainer.n_episodes), kept=kept, curve=None if plan.afterwards else curve, add=add)
    )
    try:
        before = {} if plan.afterwards else success()
        before_sampled = success(opened.sampled) if plan.rows is not None else None
        trainer.train()
        if plan.afterwards:
            plan.before_asking()
            before, *curve = opened.asked_with(kept)
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


def ask(argv: list[str], plan: Plan, kept: Kept) -> dict[str, Any]:
    """Ask the weights that another trainer's run has kept, as `run` asks its own; the first are those it began with."""
    opened = _Opened(argv, plan)
    try:
        before, *curve = opened.asked_with(kept)
    finally:
        opened.trainer.close()
    reached = next((point for point in curve if plan.done(point)), None)
    return {"before": before["success"], "curve": curve, "reached": reached}


def following(
    plan: Plan,
    n_episodes: Callable[[], int],
    *,
    kept: Kept,
    curve: list[Point] | None = None,
    add: Callable[[Point], None] = lambda point: None,
) -> Any:
    """A callback that measures where it is due, by `add` to the curve, or keeps the weights if there is none yet."""
    from transformers import TrainerCallback

    def keep(point: Point, model: Any) -> None:
        kept.append((point, {name: of.clone() for name, of in model.state_dict().items()}))

    class Curve(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        """Ends the run at the target or at the budget."""

        def __init__(self) -> None:
            self.measuring_s = 0.0
            self.started = time.monotonic()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.monotonic()
            if curve is None:
                keep({"step": 0, "episodes": 0, "seconds": 0.0}, kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            episodes = n_episodes()
            spent = state.global_step >= state.max_steps or (plan.budget is not None and episodes >= plan.budget)
            if not plan.due(state.global_step, episodes) and not spent:
                return
            before = time.monotonic()
            seconds = before - self.started - self.measuring_s
            point = {"step": state.global_step, "episodes": episodes, "seconds": seconds}
            if curve is None:
                keep(point, kwargs["model"])
            else:
                add(point)
            self.measuring_s += time.monotonic() - before
            done = curve is not None and plan.done(curve[-1])
            control.should_training_stop = control.should_training_stop or spent or done

    return Curve()


class _Opened:
    """The trainer of a command line, and the held-out questions."""

    def __init__(self, argv: list[str], plan: Plan) -> None:
        from datasets import Dataset

        from toolgrpo import ToolGRPOTrainer
        from toolgrpo.commands.arguments import parse_arguments
        from toolgrpo.commands.parts import RunParts
        from toolgrpo.commands.terminal import Terminal

        script, config, model = parse_arguments(argv)
        terminal = Terminal.open(Path(config.output_dir) / "train.log", main_process=True)
        parts = RunParts(script, config, model, terminal)
        training = parts.training_rows() if plan.rows is None else Dataset.from_list(plan.rows[0])
        self.heldout: Rows = list(parts.heldout_rows() or ()) if plan.rows is None else plan.rows[1]
        self.trainer = ToolGRPOTrainer(
            parts.model_path(str(model.model_name_or_path)),
            parts.rewards(),
            config.changed(disable_tqdm=True),
            train_dataset=training,
            tools=parts.toolbox(),
        )
        self.sampled = config.sampling_options()
        self._greedy = config.changed(temperature=0.0).sampling_options()
        self._has_lengths = plan.rows is not None

    def success(self, sampling: Any = None) -> dict[str, Any]:
        """The share of questions that were answered, and that of each length of chain; greedy unless told otherwise."""
        right = self.trainer.measure(self.heldout, sampling or self._greedy, label="held out").successes
        found: dict[str, Any] = {"success": sum(right) / len(right)}
        if self._has_lengths:
            lengths = [row["n_calls"] for row in self.heldout]
            found["by_calls"] = {
                n: sum(ok for ok, length in zip(right, lengths, strict=True) if length == n) / lengths.count(n)
                for n in sorted(set(lengths))
            }
        return found

    def asked(self, point: Point) -> Point:
        """The point with the success of the weights of now."""
        whole = {**point, **self.success()}
        print(
            f"step {whole['step']}: {whole['success']:.3f} after {whole['episodes']} episodes, {whole['seconds']:.1f} s",
            flush=True,
        )
        return whole

    def asked_with(self, kept: Kept) -> list[Point]:
        curve = []
        for point, weights in kept:
            self.trainer.model.load_state_dict(weights)
            self.trainer.state.global_step = point["step"]  # weights of another step are given to the engine
            curve.append(self.asked(point))
        return curve
