"""`--profile`: each part's own time, what an engine's thread did, and functions that are left as they were."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from toolgrpo.testing.trainers import tiny_trainer
from toolgrpo.trainer.profile import PLACES, REST, Place, StepProfile

HERE = __name__


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Stands in for a trainer's parts: each call takes the seconds it is told on the clock."""

    clock = Clock()

    def outer(self, own_s: float, *inner: Callable[[], None]) -> None:
        Work.clock.now += own_s
        for one in inner:
            one()

    def inner(self, own_s: float) -> None:
        Work.clock.now += own_s

    def engine(self, own_s: float) -> None:
        Work.clock.now += own_s

    def wait(self, what: Callable[[], None]) -> None:
        what()


def profiled(step: Callable[[], None], tmp_path: Path, n: int = 1) -> dict[str, float]:
    told: list[dict[str, float]] = []
    places = (
        Place("the outer", HERE, "Work", "outer"),
        Place("the inner", HERE, "Work", "inner"),
        Place("engine", HERE, "Work", "engine"),
        Place("waiting for tools and servers", HERE, "Work", "wait"),
    )
    before = {place.method: Work.__dict__[place.method] for place in places}
    profile = StepProfile(lambda lines, means: told.append(means), places=places, clock=Work.clock)
    told_by: Any = (TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(), TrainerControl())
    profile.on_train_begin(*told_by)
    for _ in range(n):
        profile.on_step_begin(*told_by)
        step()
        profile.on_step_end(*told_by)
    profile.on_train_end(*told_by)
    assert {place.method: Work.__dict__[place.method] for place in places} == before
    return told[0]


def test_a_part_counts_its_own_time_only(tmp_path: Path) -> None:
    work = Work()

    def step() -> None:
        Work.clock.now += 0.5
        work.outer(1.0, lambda: work.inner(2.0), lambda: work.outer(0.25, lambda: work.inner(4.0)))

    means = profiled(step, tmp_path)
    assert means == {"the inner": 6.0, "the outer": 1.25, REST: 0.5}
    assert list(means) == ["the inner", "the outer", REST]


def test_an_engine_on_a_thread_of_its_own_is_what_is_waited_for(tmp_path: Path) -> None:
    work = Work()

    def engine_on_a_thread() -> None:
        thread = threading.Thread(target=work.engine, args=(3.0,))
        thread.start()
        thread.join()
        Work.clock.now += 1.0  # and a tool that goes on

    means = profiled(lambda: work.outer(0.0, lambda: work.wait(engine_on_a_thread)), tmp_path)
    assert means == {"engine": 3.0, "waiting for tools and servers": 1.0, "the outer": 0.0, REST: 0.0}


def test_the_first_steps_are_left_out_where_there_are_others(tmp_path: Path) -> None:
    work, seconds = Work(), iter([50.0, 10.0, 1.0, 3.0])
    assert profiled(lambda: work.inner(next(seconds)), tmp_path, n=4)["the inner"] == 2.0


@pytest.mark.contract
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.owner}.{place.method}")
def test_each_place_is_there(place: Place) -> None:
    assert callable(getattr(import_module(place.module), place.owner).__dict__[place.method])


def test_a_run_tells_where_its_time_went(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def slow(completions: list[Any], **_: Any) -> list[float]:
        time.sleep(0.2)
        return [float(number % 2) for number in range(len(completions))]

    trainer = tiny_trainer(tmp_path, slow, None, engine="transformers", profile=True, max_steps=3)
    trainer.train()
    trainer.close()
    lines = capfd.readouterr().err.splitlines()
    assert any("where the time of a step went" in line for line in lines)
    told = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    (parts,) = [line["parts"] for line in told if line.get("what") == "profile"]
    assert parts["rewards and the batch"] >= 0.2
    assert {"engine", "training pass: forward", "training pass: backward", "optimizer"} <= parts.keys()
    for place in PLACES:
        assert getattr(import_module(place.module), place.owner).__dict__[place.method].__name__ == place.method
