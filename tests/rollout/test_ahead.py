"""Rollouts on a thread of their own: what is begun is taken in its order, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.rollout import EpisodeLimits, Rollouts
from toolgrpo.rollout.ahead import RolloutsAhead
from toolgrpo.rollout.observers import EpisodeDone, Observer, Observers, RolloutBegan, RolloutEnded, TurnDone
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, ScriptedTools

PATIENCE_S = 20.0  # of a test, for what another thread is to do


class Heard(Observer):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[str] = set()

    def hear(self, what: str) -> None:
        self.events.append(what)
        self.threads.add(threading.current_thread().name)

    def rollout_began(self, event: RolloutBegan) -> None:
        self.hear("began")

    def turn_done(self, event: TurnDone) -> None:
        self.hear("turn")

    def episode_done(self, event: EpisodeDone) -> None:
        self.hear(f"episode {event.number}")

    def rollout_ended(self, event: RolloutEnded) -> None:
        self.hear("ended" if event.failure is None else "failed")


class GatedEngine(ScriptedEngine):
    """Answers a second turn when the gate is open."""

    gate = threading.Event()

    async def sample(self, request: SampleRequest) -> Sample:
        while ">tool:" in ByteChat.text(request.ids) and not self.gate.is_set():
            await asyncio.sleep(0.005)
        return await super().sample(request)


class World:
    """Questions that say `waits` call a tool, and those that say `stalled` are never answered."""

    def __init__(self, *, stalled: str = "", raises: str = "", observers: Observers | None = None, **more: Any) -> None:
        self.stalled, self.raises = stalled, raises
        self.engine = GatedEngine(self.script)
        self.gate = self.engine.gate = threading.Event()
        self.rollouts = Rollouts(
            engine=self.engine,
            chat=ByteChat(),
            limits=EpisodeLimits(max_completion_length=200),
            tokenizer=ByteChat(),
            tools=ScriptedTools({"wait": lambda: "waited"}),
            observers=observers or Observers(),
            engine_retries=0,
            **more,
        )
        self.ahead = RolloutsAhead(self.rollouts, trained=torch.nn.Linear(1, 1))

    def script(self, request: SampleRequest, number: int) -> list[int] | ScriptedReply:
        text = ByteChat.text(request.ids)
        if self.raises and self.raises in text:
            raise AssertionError("a bug of the chat")
        if self.stalled and self.stalled in text:
            return ScriptedReply(ByteChat.say("never"), stalls=True)
        if "waits" in text and ">tool:" not in text:
            return ByteChat.say("call wait {}")
        return ByteChat.say("an answer")

    def begin(self, *questions: str, step: int = 0) -> None:
        self.ahead.begin([{"prompt": one} for one in questions], SamplingOptions(), step=step)


def no_thread_is_left() -> bool:
    return not any(thread.name.startswith("toolgrpo-rollouts") for thread in threading.enumerate())


def test_batches_run_beside_each_other_and_are_taken_in_their_order() -> None:
    heard = Heard()
    world = World(observers=Observers([heard]))
    world.gate.set()
    world.begin("q0", "q1")
    world.begin("q2", step=1)
    assert len(world.ahead) == 2
    first, second = world.ahead.take(5), world.ahead.take(6)
    assert [one.row["prompt"] for one in first.episodes] == ["q0", "q1"]
    assert [one.row["prompt"] for one in second.episodes] == ["q2"]
    assert (first.step, second.step) == (5, 6) and not first.is_graded
    assert heard.events[0] == "began" and heard.events[-1] == "ended" and heard.events.count("turn") == 3
    assert heard.threads == {threading.current_thread().name}
    world.ahead.stop()
    assert no_thread_is_left() and not world.engine.is_open


def test_a_later_batch_ends_before_an_earlier_one_that_goes_on_with_newer_weights() -> None:
    world = World()
    world.ahead.hand_over(iter(()), 1)
    world.begin("waits")
    world.begin("q", step=1)
    world.ahead._begun[1].result.result(PATIENCE_S)
    assert not world.ahead._begun[0].result.done()
    world.ahead.hand_over(iter(()), 2)
    world.gate.set()
    (episode,) = world.ahead.take(1).episodes
    assert [turn.weights for turn in episode.trajectory.turns] == [(1, 1), (1, 2)]
    (other,) = world.ahead.take(1).episodes
    assert [turn.weights for turn in other.trajectory.turns] == [(1, 1)]
    assert world.engine.weight_loads == 2
    world.ahead.stop()


def test_stopping_cancels_what_runs() -> None:
    world = World(stalled="slow")
    world.begin("slow one", "slow two")
    world.begin("q")
    world.ahead._begun[1].result.result(PATIENCE_S)
    world.ahead.stop()
    world.ahead.stop()
    assert no_thread_is_left() and len(world.ahead) == 0
    assert (world.engine.open_requests, world.engine.cancelled, world.engine.is_open) == (0, 2, False)


def test_all_batches_together_keep_to_the_most_episodes_at_a_time() -> None:
    world = World(max_concurrent=2)
    for number in range(3):
        world.begin(*(f"q{number}{member}" for member in range(4)))
    assert [len(world.ahead.take(0)) for _ in range(3)] == [4, 4, 4]
    assert world.engine.most_open_requests <= 2
    world.ahead.stop()


def told_of_cores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What whoever divides the cores is told from here on."""
    told: list[str] = []

    class Cores:
        def __init__(self, loop: asyncio.AbstractEventLoop, has_work: Any, trained: Any) -> None:
            assert has_work() is False

        def __getattr__(self, name: str) -> Any:
            return lambda: told.append(name)

    monkeypatch.setattr("toolgrpo.engines.shared_cores.SharedCores", Cores)
    return told


def test_an_engine_on_the_same_cores_has_a_part_of_them_while_the_caller_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = told_of_cores(monkeypatch)
    world = World()
    world.engine.shares_cores = True  # type: ignore[attr-defined]
    world.gate.set()
    world.begin("one")
    world.begin("two")
    world.ahead.take(0)
    assert told == ["engine_alone", "both"]
    world.ahead.take(1)
    assert told[2:] == ["engine_alone", "training_alone"]
    world.begin("three")
    world.ahead.settle()
    assert told[4:] == ["engine_alone", "training_alone"]
    world.ahead.stop()
    assert told[6:] == ["give_back"]
