"""The doctor at the side of a real tiny run: what is told, when, and what stops the run."""

from __future__ import annotations

import importlib
import io
import logging
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from tests.support.trainings import KeptBatches, call_and_answer, run_to_end
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.errors import InfrastructureError
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.records import iter_steps
from toolgrpo.observe.watch import DoctorWatch
from toolgrpo.rewards import get_reward
from toolgrpo.testing import ByteChat, ScriptedTools, tiny_trainer


def never_calls(request: SampleRequest, number: int) -> list[int]:
    return ByteChat.say('{"name": "add", "arguments": {"a": 1, "b": 2}}' if number % 2 else "4")


def spread(dead: float, **more: float) -> dict[str, Any]:
    """What is logged of a step in which nothing succeeds."""
    return {"reward": 0.0, "success": 0.0, "reward/groups_without_spread": dead, **more}


def test_the_summary_tells_what_still_holds_from_what_is_over() -> None:
    from toolgrpo.commands.train import doctor_lines, doctor_summary

    watch = DoctorWatch((said := list[str]()).append)
    for step in range(1, 9):
        log = spread(1.0 if step <= 3 else 0.0, **{"turns/void": 0.5})
        watch.on_log(None, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl(), log)
    held = {one["rule"]: one["still_holds"] for one in doctor_summary(watch)["findings"]}
    assert held == {"groups_all_failed": False, "void_turns": True}
    assert len(said) == 2 and doctor_lines(watch) == [], "what holds at the end was told five steps before"
    watch.told[-1] = replace(watch.told[-1], step=-20)
    assert len(doctor_lines(watch)) == 1


def test_a_run_that_learnt_before_it_was_resumed_has_not_learnt_nothing() -> None:
    live, dead = spread(0.5), spread(1.0)
    for before in ([live, {"loss": 0.0}], [dead]):
        watch, state = DoctorWatch(lambda said: None), TrainerState(log_history=before)
        watch.on_train_begin(None, state, TrainerControl())
        watch.on_log(None, state, TrainerControl(), dead)
        assert watch.learned_nothing == (before == [dead])


def test_a_resumed_run_is_judged_with_the_logs_before_it() -> None:
    state = TrainerState(log_history=[{**spread(1.0), "step": step} for step in (1, 2)], is_world_process_zero=True)
    watch = DoctorWatch(lambda said: None)
    watch.on_train_begin(None, state, TrainerControl())
    state.global_step = 3
    watch.on_log(None, state, TrainerControl(), spread(1.0))
    assert [(one.rule, one.step) for one in watch.told] == [("groups_all_failed", 3)]


def zero(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


TOOLS = {"tools": ScriptedTools({"add": lambda a, b: str(a + b)})}


def run(folder: Path, script: Any, parts: dict[str, Any] | None = None, **config: Any) -> tuple[Any, str]:
    """A run of the tiny trainer, and what its display shows in a pipe."""
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    parts = {**TOOLS, "progress": RunProgress(console), **(parts or {})}
    return run_to_end(tiny_trainer(folder, zero, script, parts=parts, **config)), shown.getvalue()


@pytest.fixture(scope="module")
def learns_nothing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Path]:
    folder = tmp_path_factory.mktemp("nothing")
    with mock.patch("toolgrpo.observe.watch.TOLD_EVERY", 2):
        trainer, shown = run(folder, never_calls, max_steps=5, unmarked_calls="ignore")
    return trainer, shown, folder


def test_a_run_that_learns_nothing_says_so_while_it_runs_and_records_it(
    learns_nothing: tuple[Any, str, Path],
) -> None:
    trainer, shown, folder = learns_nothing
    lines = shown.splitlines()
    (first, *later) = [number for number, line in enumerate(lines) if "so nothing is learned" in line]
    assert "3/5" in "".join(lines[:first]) and "4/5" not in "".join(lines[:first]), "as soon as three logs say so"
    assert len(later) == 1, "and again after two more steps"
    assert "no group differs in reward in steps 1 to 3" in lines[first] and "no tool is called" in lines[first]
    assert "docs/how-to/troubleshooting.md#the-model-does-not-call-tools" in lines[first]
    assert "4 turns of a rollout look like calls in another form: bare JSON (4)" in shown
    assert trainer.doctor.learned_nothing and {one.rule for one in trainer.doctor.at_end()} >= {"no_tool_calls"}
    events = [line for line in iter_steps(folder) if line["kind"] == "event" and line["what"] == "finding"]
    assert [event["rule"] for event in events] == [one.rule for one in trainer.doctor.told]
    assert {event["section"] for event in events} >= {"the-model-does-not-call-tools"}


def test_the_lines_in_a_pipe_stand_alone(learns_nothing: tuple[Any, str, Path]) -> None:
    _, shown, _ = learns_nothing
    lines = shown.splitlines()
    assert [line.split(" ")[0] for line in lines[:6]] == ["memory", "model", "data", "tools", "reward", "engine"]
    assert "add(" in lines[3] and lines[4] == f"reward    zero: {__file__}:{zero.__code__.co_firstlineno}"
    assert lines[6].startswith("off-policy correction: ")
    assert lines[7].startswith("training  5 steps ")
    assert lines[8].split()[:2] == ["step", "reward"] and "success" in lines[8].split()
    assert [line.split()[0] for line in lines if line.strip()[:1].isdigit()] == [f"{n}/5" for n in range(1, 6)]
    assert "{'" not in shown and "\x1b" not in shown


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_logging_shows_the_run(level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def by_number(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if number % 4 == 3 else float(number) for number in range(len(completions))]

    kept = KeptBatches()
    rewards: Any = [get_reward("tool_use"), by_number]
    with caplog.at_level(level, logger="toolgrpo"):
        parts = {**TOOLS, "observers": [kept]}
        run_to_end(tiny_trainer(tmp_path, rewards, call_and_answer, parts=parts, max_steps=2, quiet=True))
    records = [record for record in caplog.records if record.levelno < logging.WARNING]
    texts = {number: [one.getMessage() for one in records if one.levelno == number] for number in (10, 20)}
    assert all(importlib.import_module(record.name) for record in records), "loggers have the names of modules"
    turns = [turn for batch in kept.batches for trajectory in batch.trajectories for turn in trajectory.turns]
    shown = [text for text in texts[logging.DEBUG] if ", turn " in text]
    assert len(shown) == (len(turns) if level == logging.DEBUG else 0)
    called = [text for text in shown if "add({" in text]
    assert bool(called) == (level == logging.DEBUG) and all("-> '3'" in text for text in called)
    start, lines = texts[logging.INFO], [text for text in texts[logging.INFO] if text.startswith("step ")]
    assert any(line.startswith("tools     add(") for line in start)
    assert any(line.endswith(f"by_number: {__file__}:{by_number.__code__.co_firstlineno}") for line in start)
    assert any("tool_use: built in, " in line and "rewards/tool_use.py:" in line for line in start)
    assert len(lines) == len(kept.batches) == 2
    for line, batch in zip(lines, kept.batches, strict=True):
        for name in ("reward", "by_number", "tool_use"):
            given = batch.totals if name == "reward" else [one.rewards[name] for one in batch.episodes]
            values = [value for value in given if value is not None]
            middle = f"; {name} mean {fmean(values):.4g}, std {pstdev(values):.4g}, "
            assert f"{middle}min {min(values):.4g}, max {max(values):.4g}" in line


def test_failures_of_the_world_stop_the_run_before_it_trains_on_the_rest(tmp_path: Path) -> None:
    lost = ToolResult("the server is gone", "add", ToolErrorKind.DIED)
    parts = {"tools": ScriptedTools({"add": lambda a, b: lost})}
    with pytest.raises(InfrastructureError, match=r"100 % of the episodes.*8 tool calls lost their process.*now 0\.5"):
        run(tmp_path, call_and_answer, parts)
    trainer, _ = run(tmp_path / "on", call_and_answer, parts, max_infrastructure_failures=None)
    assert trainer.state.global_step == 2


def test_a_quiet_run_shows_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_to_end(tiny_trainer(tmp_path, zero, never_calls, parts=TOOLS, quiet=True, disable_tqdm=False))
    shown = capfd.readouterr()
    assert shown.out == "" and "doctor" not in shown.err and "/2" not in shown.err and "tools" not in shown.err


def test_every_other_process_is_silent() -> None:
    said: list[str] = []
    watch = DoctorWatch(said.append)
    state = TrainerState(global_step=3, is_world_process_zero=False)
    for _ in range(4):
        watch.on_log(None, state, TrainerControl(), spread(1.0))
    assert said == [] and watch.learned_nothing
