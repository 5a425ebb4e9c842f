"""The log of steps: what each was like, before anything is known of the run, and after a resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.observe.records import iter_steps
from toolgrpo.observe.steps import StepLog, size_warning
from toolgrpo.rollout import RolloutBegan, RolloutEnded
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.testing import tiny_config


def graded(mode: Any, step: int, rewards: list[float | None]) -> RolloutBatch:
    one = Trajectory((1,), (2,), (1,), (-0.5,), (), (), StopReason.FINISHED)
    batch = RolloutBatch(episodes=tuple(Scored({}, one) for _ in rewards), step=step, mode=mode)
    lost = Drop(DropCause.TOOL, "no network")
    grades = [Grade({}, one, lost if one is None else None) for one in rewards]
    return batch.graded(grades, lambda episode: episode.total == 1.0)


class Training:
    """Calls the log as a trainer would, on a clock of its own."""

    def __init__(self, folder: Path, *, done: int = 0, **options: Any) -> None:
        self.now, self.said = 0.0, list[str]()
        facts = {"model": "tiny", "tools": ["add"]}
        say = self.said.append
        self.log = StepLog(folder / "steps.jsonl", facts=facts, clock=lambda: self.now, say=say, **options)
        self.args, self.control = tiny_config(folder), TrainerControl()
        self.state = TrainerState(global_step=done, max_steps=4)

    def begin(self) -> None:
        self.log.on_train_begin(self.args, self.state, self.control)

    def step(self, **phases: float) -> None:
        self.log.on_step_begin(self.args, self.state, self.control)
        step = self.state.global_step
        began = RolloutBegan(2, step, "train", "episodes")
        self.now += phases.get("before_rollout", 0.0)
        self.log.rollout_began(began)
        self.now += phases.get("rollout", 0.0)
        self.log.rollout_ended(RolloutEnded(began))
        self.now += phases.get("scoring", 0.0)
        self.log.batch_done(graded("train", step, [0.0, 1.0]))
        self.now += phases.get("training", 0.0)
        self.state.global_step += 1
        self.log.on_step_end(self.args, self.state, self.control)
        self.now += 100.0  # between steps nothing is counted
        logs: dict[str, Any] = {"reward": 0.5, "odd": float("nan"), "text": "x"}
        self.log.on_log(self.args, self.state, self.control, logs)


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(iter_steps(folder))


def test_a_step_has_its_metrics_and_where_its_time_went(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.log.rollout_began(RolloutBegan(2, 0, "heldout", "before (greedy)"))
    training.log.batch_done(graded("heldout", 0, [1.0, 0.0, None]))
    assert lines(tmp_path) == [], "whether this is a new run is not known yet"
    training.begin()
    phases = {"before_rollout": 0.5, "rollout": 2.0, "scoring": 0.25, "training": 1.0}
    training.step(**phases)
    logging.getLogger("toolgrpo.engines").warning("the server is slow")
    logging.getLogger("confined_python.remote").warning("so is the sandbox")
    training.log.on_save(training.args, training.state, training.control)
    training.log.on_train_end(training.args, training.state, training.control)
    training.log.close()
    logging.getLogger("toolgrpo.engines").warning("nobody listens any more")
    run, measured, step, warning, of_the_sandbox, saved, ended = lines(tmp_path)
    assert (run["kind"], run["tools"], run["resumed"], run["max_steps"]) == ("run", ["add"], None, 4)
    assert run["config"]["num_generations"] == 4 and "toolgrpo" in run["versions"]
    assert (measured["label"], measured["n"], measured["successes"]) == ("before (greedy)", 2, 1)
    assert measured["questions"] == 2 and measured["reward"] == 0.5, "one could not be scored"
    assert (step["step"], step["phases"], step["metrics"]) == (0, phases, {"reward": 0.5, "odd": None})
    assert (warning["what"], warning["text"], warning["step"]) == ("warning", "the server is slow", 0)
    assert of_the_sandbox["text"] == "so is the sandbox"
    assert (saved["what"], saved["text"]) == ("checkpoint", "checkpoint-1")
    assert (ended["what"], ended["text"]) == ("stopped", "after 1 of 4 steps")


def test_a_resumed_run_goes_on_and_a_new_one_begins_anew_and_writes_no_secret(tmp_path: Path) -> None:
    for done in (0, 2):
        training = Training(tmp_path, done=done)
        training.begin()
        training.step()
        training.log.close()
    found = [(line["kind"], line.get("resumed"), line.get("step")) for line in lines(tmp_path)]
    assert found == [("run", None, None), ("step", None, 0), ("run", 2, None), ("step", None, 2)]
    training = Training(tmp_path)
    training.args.hub_token = "hf_verysecret"
    training.begin()
    training.step()
    training.state.global_step = 0
    training.begin()  # a second training of one session is another run too
    training.log.close()
    assert len(lines(tmp_path)) == 1 and (tmp_path / "steps.jsonl.previous").exists()
    assert "verysecret" not in (tmp_path / "steps.jsonl").read_text()


def test_gigabytes_are_announced_before_they_come(tmp_path: Path) -> None:
    written = [0]
    training = Training(tmp_path, recorded_bytes=lambda: written[0])
    training.begin()
    for _ in range(4):
        written[0] += 2_000_000_000
        training.step(rollout=50.0)
    training.log.close()
    (said,) = training.said
    assert "GB a day" in said and "8.0 GB in all 4 steps" in said and "record_episodes 0.1" in said
    assert size_warning(200_000, seconds=10, steps=3, all_steps=110) is None
    assert size_warning(10**9, seconds=86400, steps=1, all_steps=2) is not None
