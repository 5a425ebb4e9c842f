"""Rollouts on a thread of their own: what is begun is taken in its order, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
import torch

from tests.support.rollouts import no_rollout_thread, scripted_rollouts
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.rollout.ahead import Begun, RolloutsAhead
from toolgrpo.rollout.group_queue import Admission, GroupQueue, GroupSet, unjudged
from toolgrpo.rollout.observers import EpisodeDone, Observer, Observers, RolloutBegan, RolloutEnded, TurnDone
from toolgrpo.testing import ByteChat, ScriptedEngine
from toolgrpo.testing.engine import Script

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


class World:
    def __init__(self, script: Script = lambda request, number: ByteChat.say("an answer"), **more: Any) -> None:
        self.engine = ScriptedEngine(script)
        self.rollouts = scripted_rollouts(self.engine, **more)
        self.ahead = RolloutsAhead(self.rollouts)

    def begin(self, *questions: str, step: int = 0) -> Begun:
        return self.ahead.begin([{"prompt": one} for one in questions], SamplingOptions(), step=step)


def ended(begun: Begun) -> tuple[Trajectory, ...]:
    return begun.result(PATIENCE_S).trajectories


def take(world: World, queue: GroupQueue[Any], step: int, questions: list[str], *, beyond: int) -> list[str]:
    """Take one group_set of the queue, and begin those that are missing in it."""
    sets = iter([GroupSet((place,), ({"prompt": one},)) for place, one in enumerate(questions)])
    rule = Admission.of(1, max_groups_drawn=1.0, beyond=beyond)
    began = RolloutBegan(1, step, "train", "episodes")
    drawn = queue.take(rule, SamplingOptions(), began, sets=sets, judge=unjudged)
    assert drawn.step == step
    return [str(row["prompt"]) for one in drawn.sets for row in one.group_set.rows]


def test_pieces_run_beside_each_other_are_taken_in_their_order_and_told_when_they_are() -> None:
    heard = Heard()
    world = World(observers=Observers([heard]))
    queue: GroupQueue[Any] = GroupQueue(world.rollouts, ahead=world.ahead)
    assert take(world, queue, 5, ["q0", "q1"], beyond=1) == ["q0"]
    assert heard.events == ["began", "turn", "episode 0", "ended"] and len(queue) == 1
    assert take(world, queue, 6, [], beyond=0) == ["q1"]
    assert heard.events[4:] == heard.events[:4] and heard.threads == {threading.current_thread().name}
    queue.stop()
    assert no_rollout_thread() and not world.engine.is_open


def test_all_rollouts_together_keep_to_the_most_episodes_at_a_time() -> None:
    world = World(max_concurrent=2)
    begun = [world.begin(*(f"q{number}{member}" for member in range(4))) for number in range(3)]
    assert [len(ended(one)) for one in begun] == [4, 4, 4]
    assert world.engine.most_open_requests <= 2
    world.ahead.stop()


def test_the_thread_computes_on_the_device_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: devices.append((threading.current_thread().name, device))
    )
    world = World()
    ended(world.begin("q"))
    assert devices == [("toolgrpo-rollouts-ahead", 3)]
    monkeypatch.undo()
    world.ahead.stop()


def test_code_on_the_thread_that_exits_does_not_end_it() -> None:
    def answer(request: SampleRequest, number: int) -> list[int]:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        return ByteChat.say("an answer")

    world = World(answer)
    assert [len(ended(world.begin("q"))) for _ in range(2)] == [1, 1]
    world.ahead.stop()
    assert no_rollout_thread()
