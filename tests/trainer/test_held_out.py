"""Evaluations during a training: what they measure, which weights are kept by them, and when they end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerState

from tests.support.trainings import run_to_end, same_weights, signalled, step_logs, varied
from toolgrpo.testing import ByteChat, tiny_qwen3, tiny_trainer
from toolgrpo.trainer.checkpoint_files import complete_checkpoints
from toolgrpo.trainer.stopping import HeldOutWatch

pytestmark = pytest.mark.e2e

SOLVED_AFTER = {2: 1, 4: 3, 6: 2, 8: 3, 9: 2}  # of four rows, by the step
ROWS = Dataset.from_list([{"prompt": f"held out {i}", "answer": f"h{i}"} for i in range(4)])


def reward(answer: list[str], trajectories: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    solved = SOLVED_AFTER.get(trainer_state.global_step, 0)
    sums = [(of, sum(t.ids)) for of, t in zip(answer, trajectories, strict=True)]
    return [float(int(of[1:]) < solved) if of.startswith("h") else float(ids % 5) for of, ids in sums]


def trained(folder: Path, *callbacks: Any, rows: Any = ROWS, resume: str | None = None, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 9, "eval_steps": 2, "save_steps": 3, "save_total_limit": 2}
    options |= {"save_strategy": "steps", "learning_rate": 1e-2, **changes}
    parts = {"eval_dataset": rows, "callbacks": list(callbacks)}
    return run_to_end(tiny_trainer(folder, reward, varied, parts=parts, **options), resume)


def rates(trainer: Any) -> list[tuple[int, float]]:
    return [(log["step"], log["eval_success"]) for log in trainer.state.log_history if "eval_success" in log]


def test_an_evaluation_plays_every_row_in_one_rollout_and_says_success_and_rewards(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=2, num_generations_eval=3)
    log = next(log for log in trainer.state.log_history if "eval_success" in log)
    assert log["eval_success"] == log["eval_reward"] == log["eval_rewards/reward/mean"] == 0.25
    assert (log["eval_rollout/turns"], "eval_loss" in log) == (1, False)
    assert len([request for request in trainer.engine.requests if "held out" in ByteChat.text(request.ids)]) == 4 * 3


def test_what_rewards_log_is_a_metric_of_an_evaluation_too(tmp_path: Path) -> None:
    def counts(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        log_metric("shop/ordered", 0.25)
        return [1.0] * len(completions)

    parts = {"eval_dataset": ROWS}
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "shop/ordered",
        "save_strategy": "steps",
    }
    trainer = run_to_end(
        tiny_trainer(tmp_path, counts, varied, parts=parts, eval_steps=1, save_steps=1, max_steps=1, **best)
    )
    assert [log["eval_shop/ordered"] for log in trainer.state.log_history if "eval_success" in log] == [0.25]


def test_rows_that_stream_are_dealt_out_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's share of a stream fills up with rows that it has given before."""
    with tiny_trainer(tmp_path, reward, varied, num_generations_eval=2) as trainer:
        rows = Dataset.from_list([{"prompt": f"q{n}"} for n in range(3)]).to_iterable_dataset()
        loader = trainer.get_eval_dataloader(rows)
        played = []
        for process in range(2):
            monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
            monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
            played.append(sorted(row["prompt"] for row in trainer._evaluation_rows(loader)))
    assert played == [["q0", "q0", "q2", "q2"], ["q1", "q1"]]


def test_the_best_step_is_kept_though_no_checkpoint_was_due_then(tmp_path: Path) -> None:
    trainer = trained(tmp_path, keep="best")
    assert rates(trainer) == [(2, 0.25), (4, 0.75), (6, 0.5), (8, 0.75), (9, 0.5)]
    assert (trainer.best_step, trainer.state.global_step) == (4, 9)
    assert sorted(one.step for one in complete_checkpoints(tmp_path)) == [4, 9], "the best and the last"
    best = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    own = dict(trainer.model.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in best.items() if name in own)
    trainer.save_model(str(tmp_path / "model"))
    assert "4 steps" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("rule", "measured", "ends"),
    [
        ("solved", [0.5, 1.0], True),
        ("solved", [1.0, 0.9], False),
        ("plateau:2", [0.6, 0.5, 0.7], False),  # where it has not risen, runs below end
        ("plateau:1", [], False),
        ("solved", [0.5, None], False),  # nothing could be scored
    ],
)
def test_when_a_training_is_to_end(rule: str, measured: list[float | None], ends: bool) -> None:
    watch = HeldOutWatch(keeps_best=False, stop_when=rule, say=print)
    logs = [{"eval_success": one, "step": step} for step, one in enumerate(measured)]
    reason = watch.reason(TrainerState(log_history=[{"loss": 0.1}, *logs]))
    assert reason == ("held-out success is 1" if ends else None)
    several = HeldOutWatch(keeps_best=False, stop_when="plateau:1", say=print, n_datasets=2)
    partly = [
        {"step": 2, "eval_success": 1.0},
        {"step": 2, "eval_success": None},
        *[{"step": 4, "eval_success": 0.5}] * 2,
    ]
    assert several.reason(TrainerState(log_history=partly)) is None


def test_a_training_ends_as_its_evaluations_say_stopped_and_resumed_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"stop_when": "plateau:2", "keep": "best"}
    whole = trained(tmp_path / "whole", **changes)
    assert (whole.state.global_step, whole.best_step, whole.stopped_by) == (8, 4, None)
    assert "has not risen for 2 evaluations (best: 0.750)" in " ".join(capsys.readouterr().err.split())
    trained(tmp_path / "parts", signalled(5), **changes)
    for again in ("goes on", "has nothing left to do"):
        resumed = trained(tmp_path / "parts", resume="auto", **changes)
        assert (resumed.state.global_step, resumed.best_step, rates(resumed)) == (8, 4, rates(whole)), again
        assert same_weights(resumed, whole), again


def test_a_step_that_a_signal_stops_is_saved_though_another_was_better(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"keep": "best", "save_strategy": "best", "save_total_limit": None, "eval_on_start": True}
    trained(tmp_path, signalled(6), **changes)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [2, 4, 6]
    elsewhere = (tmp_path / "checkpoint-6" / "trainer_state.json").read_text()
    moved = tmp_path / "moved"
    moved.mkdir()
    for folder in (*tmp_path.glob("checkpoint-*"), *tmp_path.glob("run*"), *tmp_path.glob("*.jsonl")):
        folder.rename(moved / folder.name)
    assert str(tmp_path / "checkpoint-4") in elsewhere
    resumed = trained(moved, resume="auto", **changes)
    assert (resumed.best_step, resumed.state.best_model_checkpoint) == (4, str(moved / "checkpoint-4"))
    assert [step for step, _ in rates(resumed)] == [0, 2, 4, 6, 8, 9], "the start is measured once"


def test_several_data_sets_count_by_their_mean(tmp_path: Path) -> None:
    always = Dataset.from_list([{"prompt": "solved", "answer": "h0"}])
    changes = {"keep": "best", "stop_when": "plateau:2", "save_strategy": "no"}
    trainer = trained(tmp_path, rows={"own": ROWS, "easy": always}, **changes)
    logs = trainer.state.log_history
    assert [one["eval_easy_success"] for one in logs if "eval_easy_success" in one] == [1.0] * 4, "never rises"
    assert (trainer.state.global_step, trainer.best_step, trainer.state.best_metric) == (8, 4, 0.875)


def test_an_evaluation_that_could_score_nothing_is_no_best_one_and_no_plateau(tmp_path: Path) -> None:
    def scores(answer: list[str], trajectories: list[Any], trainer_state: Any, **_: Any) -> list[float | None]:
        lost = trainer_state.global_step == 2 and answer[0].startswith("h")
        return [None] * len(answer) if lost else list(reward(answer, trajectories, trainer_state))

    options: dict[str, Any] = {"max_steps": 5, "eval_steps": 2, "save_steps": 9, "save_strategy": "steps"}
    options |= {"keep": "best", "max_dropped_share": 1.0}
    trainer = run_to_end(tiny_trainer(tmp_path, scores, varied, parts={"eval_dataset": ROWS}, **options))
    assert rates(trainer) == [(2, None), (4, 0.75), (5, 0.0)] and trainer.best_step == 4


def test_the_last_steps_are_logged_before_the_evaluation_behind_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 3, "logging_steps": 2, "eval_steps": 3}
    trainer = run_to_end(tiny_trainer(tmp_path, reward, varied, parts={"eval_dataset": ROWS}, **options))
    assert [log["step"] for log in step_logs(trainer)] == [2, 3]


class Averaging(torch.optim.SGD):
    """As a schedule-free optimizer: other weights while it does not train."""

    told: ClassVar[list[str]] = []

    def train(self) -> None:
        self.told.append("train")

    def eval(self) -> None:
        self.told.append("eval")


def test_an_optimizer_with_weights_for_evaluations_is_told_of_them(tmp_path: Path) -> None:
    model = tiny_qwen3()
    parts = {"eval_dataset": ROWS, "optimizers": (Averaging(model.parameters(), lr=0.01), None)}
    trainer = run_to_end(tiny_trainer(tmp_path, reward, varied, model=model, parts=parts, max_steps=2, eval_steps=2))
    assert Averaging.told == ["train", "train", "eval"] and trainer.engine.weight_loads == 3


def test_a_solved_task_is_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solved = Dataset.from_list([{"prompt": "solved", "answer": "h-1"}])
    options: dict[str, Any] = {"stop_when": "solved", "eval_on_start": True, "eval_steps": 2, "max_steps": 3}
    with tiny_trainer(tmp_path, reward, varied, parts={"eval_dataset": solved}, **options) as trainer:
        trainer.train()
        assert trainer.state.global_step == 0 and not step_logs(trainer)
        assert trainer.evaluate()["eval_success"] == 1
    assert "held-out success is 1 before the first step" in " ".join(capsys.readouterr().err.split())


def test_a_training_after_another_begins_at_the_first_row(tmp_path: Path) -> None:
    asked = []
    with tiny_trainer(tmp_path, reward, varied, max_steps=3, max_staleness=1, steps_per_generation=2) as trainer:
        for _ in range(2):
            trainer.train()
            asked.append([request.ids for request in trainer.engine.requests])
            trainer.engine.requests.clear()
        metrics = trainer.evaluate({"a": ROWS, "b": ROWS}, metric_key_prefix="test")
    assert asked[0] == asked[1]
    assert metrics["test_success"] == metrics["test_a_success"]
