"""A run that is stopped and resumed, against one that is not: same losses, same weights, same log of episodes.

In one process each, with the scripted engine or the transformers engine, so that both runs draw the same tokens.
"""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOTrainer

from tests.support.trainings import (
    CREDIT_BY_TURN,
    call_and_vary,
    recorded,
    run_to_end,
    same_weights,
    signalled,
    step_logs,
)
from toolgrpo import ToolGRPOTrainer
from toolgrpo.errors import ConfigError
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.observe.records import read_episodes
from toolgrpo.testing import ScriptedTools, tiny_trainer
from toolgrpo.trainer import checkpoint_files
from toolgrpo.trainer.checkpoint_files import complete_checkpoints
from toolgrpo.trainer.checkpointing import tied_head_expected

pytestmark = pytest.mark.e2e

STEPS = 6  # of 2 prompts each: 8 rows are an epoch of 4 steps


def reward(completions: list[Any], trajectories: list[Any], **_: Any) -> list[float]:
    return [float((sum(t.ids) * 31 + len(t.ids)) % 5) for t in trajectories]


class Run:
    """One process's share of a run: what a user starts, and perhaps starts again."""

    def __init__(self, out: Path, **changes: Any) -> None:
        self.out, self.changes = out, changes

    def trainer(self, *callbacks: TrainerCallback, **changes: Any) -> Any:
        options = {
            **{"learning_rate": 1e-2, "max_turn_tokens": 30, "max_turns": 2, "max_steps": STEPS},
            **{"save_strategy": "steps", "save_steps": 2, **self.changes, **changes},
        }
        tools = ScriptedTools({"add": lambda a, b: str(a + b)})
        return tiny_trainer(
            self.out,
            reward,
            None if options.get("engine") else call_and_vary,
            rows=[{"prompt": f"{'x' * 40} question {i}"} for i in range(8)],
            parts={"tools": tools, "callbacks": list(callbacks), "eval_dataset": options.pop("eval_dataset", None)},
            **options,
        )

    def train(self, *callbacks: TrainerCallback, resume: str | None = None, **changes: Any) -> Any:
        return run_to_end(self.trainer(*callbacks, **changes), resume)

    def episodes(self) -> list[Any]:
        return recorded(self.out, "mask", "logprobs", *(["turn_advantages"] if "stage_fn" in self.changes else []))


def assert_same(resumed: ToolGRPOTrainer, whole: ToolGRPOTrainer) -> None:
    def logged(trainer: ToolGRPOTrainer) -> list[dict[str, Any]]:
        timed = re.compile("time|seconds|per_second|idle|latency")
        return [{key: log[key] for key in log if not timed.search(key)} for log in step_logs(trainer)]

    assert logged(resumed) == logged(whole) and same_weights(resumed, whole)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="scripted"),
        pytest.param({"engine": "transformers", "temperature": 1.0}, id="drawn"),
        pytest.param(
            {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, **CREDIT_BY_TURN},
            id="each batch twice, with credit by turn",
        ),
        pytest.param(
            {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2},
            id="four steps of a batch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                **{"rollout_correction": "bypass", "vllm_importance_sampling_mode": "sequence_mask"},
                **{"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4},
            },
            id="two steps of a batch, with the engine as the old policy",
        ),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Stopped twice: in the first epoch, and in the second, inside a batch of episodes where one lasts several steps."""
    whole = Run(tmp_path / "whole", **changes)
    stopped = Run(tmp_path / "stopped", **changes)
    never_stopped = whole.train()
    assert stopped.train(signalled(3)).state.global_step == 3
    again = stopped.train(signalled(5), resume="auto")
    assert again.state.global_step == 5 and again.stopped_by == "SIGTERM"
    resumed = stopped.train(resume="auto")
    assert max(log["grad_norm"] for log in resumed.state.log_history if "grad_norm" in log) > 0
    assert_same(resumed, never_stopped)
    assert stopped.episodes() == whole.episodes()
    assert resumed.rollout_batches.n_episodes == never_stopped.rollout_batches.n_episodes == len(whole.episodes())


def test_the_first_signal_finishes_the_step_saves_and_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM ends the runs of the tests above, and of `test_run_life.py`."""
    before = signal.getsignal(signal.SIGINT)
    trainer = Run(tmp_path, save_strategy="no", max_steps=3).train(signalled(2, signal.SIGINT))
    assert trainer.stopped_by == "SIGINT" and trainer.state.global_step == 2
    assert [c.step for c in complete_checkpoints(tmp_path)] == [2], "saved although nothing else is"
    shown = " ".join(capsys.readouterr().err.split())
    assert "SIGINT: the current step is finished and saved first" in shown
    assert "stopped by SIGINT after step 2" in shown and "--resume_from_checkpoint auto" in shown
    assert signal.getsignal(signal.SIGINT) == before, "outside of training the signal does what it did"


@pytest.mark.parametrize(("saves", "saved"), [("no", []), ("epoch", [2])])
def test_a_signal_in_the_last_step_is_remembered_saves_what_is_due_and_asks_for_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saves: str, saved: list[int]
) -> None:
    trainer = Run(tmp_path, save_strategy=saves, max_steps=2).train(signalled(2))
    assert trainer.stopped_by == "SIGTERM" and trainer.state.global_step == 2
    assert [c.step for c in complete_checkpoints(tmp_path)] == saved
    assert "resume with --resume_from_checkpoint" not in capsys.readouterr().err


def test_another_number_of_processes_goes_on_with_the_recording_and_the_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, max_steps=4)
    whole = run.train()
    (tmp_path / "episodes.rank1.jsonl").write_bytes((tmp_path / "episodes.jsonl").read_bytes())
    place = torch.load(tmp_path / "checkpoint-2" / "toolgrpo_place_0.pt", weights_only=True)
    torch.save(place, tmp_path / "checkpoint-2" / "toolgrpo_place_1.pt")
    checkpoint_files.seal(tmp_path / "checkpoint-2", step=2, n_processes=2, run=checkpoint_files._run_in(tmp_path))
    resumed = run.train(resume=str(tmp_path / "checkpoint-2"))
    assert "was saved by 2 processes and is resumed by 1" in " ".join(capsys.readouterr().err.split())
    numbers = [one["metadata"]["episode"] for one in read_episodes(tmp_path / "episodes.jsonl")]
    assert sorted(numbers) == list(range(whole.rollout_batches.n_episodes)), "none stands there twice"
    assert resumed.rollout_batches.n_episodes == whole.rollout_batches.n_episodes
    left = read_episodes(tmp_path / "episodes.rank1.jsonl")
    assert {one["step"] for one in left} == {0, 1}, "of a process that is no more"
    recorder = EpisodeRecorder(tmp_path / "episodes.jsonl")
    assert recorder.cut(recorder.bytes_before(3)) is None  # as of a process that came later
    assert {one["step"] for one in read_episodes(tmp_path / "episodes.jsonl")} == {0, 1, 2}


def test_a_signal_in_the_middle_of_an_epoch_is_no_end_of_it(tmp_path: Path) -> None:
    """Transformers takes it for one: it would evaluate, delete what was just saved, and save once more."""
    epochs: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 6}
    held_out = Dataset.from_list([{"prompt": f"held out {i}", "answer": "1"} for i in range(2)])
    saves: list[int] = []

    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saves.append(state.global_step)

    run = Run(tmp_path, **epochs)
    trainer = run.train(Saves(), signalled(2), eval_dataset=held_out)
    assert (trainer.state.global_step, saves) == (2, [2])
    assert not any("eval_success" in log for log in trainer.state.log_history)
    resumed = run.train(resume="auto", eval_dataset=held_out)
    assert [log["step"] for log in resumed.state.log_history if "eval_success" in log] == [4, 6]


def test_weights_alone_are_no_run_to_go_on_with(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=2, save_only_model=True)
    run.train()
    assert run.train(resume="auto").state.global_step == 2, "nothing is left to train"
    with pytest.raises(ConfigError, match=r"checkpoint-2 holds only weights .*--model_name_or_path"):
        run.train(resume="auto", max_steps=3)


def test_a_checkpoint_is_pushed_when_it_is_whole_and_what_fails_after_that_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A push, and the deletion of an old one."""
    whole: list[bool] = []

    def push(trainer: Any, folder: str) -> None:
        whole.append(checkpoint_files.why_incomplete(Path(folder)) is None)
        raise OSError(28, "No space left on device")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    trainer = Run(tmp_path, max_steps=4, save_total_limit=1).trainer()
    monkeypatch.setattr(GRPOTrainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    monkeypatch.setattr(checkpoint_files, "rotate", refuse)
    run_to_end(trainer)
    assert whole == [True, True] and [c.step for c in complete_checkpoints(tmp_path)] == [2, 4]
    shown = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-4 could not be pushed" in shown and "could not be deleted, and stays" in shown


def test_a_run_whose_reference_model_moves_is_not_resumed_with_another_one(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=1)
    run.train()
    again = run.trainer(max_steps=2)
    again.args.sync_ref_model = True  # its reference model would be loaded from a hub
    with pytest.raises(ConfigError, match=r"no checkpoint holds, so .*checkpoint-1 cannot be resumed"):
        run_to_end(again, "auto")


def test_a_run_that_is_complete_trains_no_more(tmp_path: Path) -> None:
    """A scheduler may start it again and again; Transformers alone would train one more step each time."""
    run = Run(tmp_path, max_steps=3)
    first = run.train()
    log = (tmp_path / "episodes.jsonl").read_bytes()
    for _ in range(2):
        again = run.train(resume="auto")
        assert again.state.global_step == 3
        assert_same(again, first)
    assert (tmp_path / "episodes.jsonl").read_bytes() == log
    assert run.train(resume="auto", max_steps=4).state.global_step == 4


def test_transformers_deletes_no_folder_at_the_end(tmp_path: Path) -> None:
    """With a best checkpoint and a limit of 1 it would delete all other folders `checkpoint-1...`, the last one too."""

    class Best(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.best_model_checkpoint = str(tmp_path / "checkpoint-1")

    (tmp_path / "checkpoint-1-good").mkdir()
    trainer = Run(tmp_path, save_total_limit=1, save_steps=1, max_steps=3).train(Best())
    assert [c.step for c in complete_checkpoints(tmp_path)] == [1, 3]
    assert (tmp_path / "checkpoint-1-good").is_dir()
    assert trainer.args.save_total_limit == 1


def test_a_run_resumed_with_other_batches_begins_at_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after running out of memory: in the middle of a generation batch, then half the rows in twice the passes."""
    run = Run(tmp_path, num_iterations=2, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    run.train(signalled(3))
    changed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert run.train(resume="auto", **changed).state.global_step == STEPS
    assert "its generation batch is left" in "".join(capsys.readouterr())


@pytest.mark.parametrize("tied", [True, False])
def test_a_missing_head_is_reported_unless_it_is_the_embeddings(tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, tie_word_embeddings=tied, **sizes))
    loads = logging.getLogger("transformers.trainer")
    said = "There were missing keys in the checkpoint model loaded: ['lm_head.weight']."
    with caplog.at_level(logging.WARNING, loads.name), tied_head_expected(model):
        loads.handle(loads.makeRecord(loads.name, logging.WARNING, "", 0, said, (), None))
    assert not loads.filters
    assert (said in caplog.messages) is not tied
