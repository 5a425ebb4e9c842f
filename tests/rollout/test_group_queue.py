"""Groups in queue, and rollouts on a thread of their own: who is taken and who goes on, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from process_tree import wait_for

from tests.rollout.test_rollouts import Listener
from tests.support.rollouts import no_rollout_thread, scripted_rollouts
from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.rollout.ahead import Begun, RolloutsAhead
from toolgrpo.rollout.group_queue import Admission, GroupQueue, GroupSet, TakenGroups, unjudged
from toolgrpo.rollout.observers import Observers, RolloutBegan
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, ScriptedTools

GROUP = 2
PATIENCE_S = 20.0  # of a test, for what another thread is to do


class TurnstileEngine(ScriptedEngine):
    """Answers a question once it was let through."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.open_to: set[str] = set()
        self.asked: list[str] = []

    async def sample(self, request: SampleRequest) -> Sample:
        self.asked.append(ByteChat.text(request.ids))
        while not any(name in ByteChat.text(request.ids) for name in self.open_to):
            await asyncio.sleep(0.002)
        return await super().sample(request)


@dataclass(frozen=True)
class Worth:
    live: bool


class World:
    """A step takes two groups of the queue, and rows are called a, b, c, ..."""

    def __init__(
        self, *, target: int = 2, beyond: int = 1, dead: str = "", stalls: str = "", fails: str = "", **more: Any
    ) -> None:
        self.stalls, self.dead, self.fails = stalls, dead, fails
        self.engine = TurnstileEngine(more.pop("script", self.script))
        rollouts = scripted_rollouts(self.engine, ScriptedTools({"wait": lambda: "waited"}), **more)
        self.ahead = RolloutsAhead(rollouts)
        self.queue: GroupQueue[Any] = GroupQueue(rollouts, ahead=self.ahead)
        self.rule = Admission.of(target, max_groups_drawn=3.0 if dead else 1.0, beyond=beyond)
        self.begun = 0
        self.judged: list[str] = []

    def script(self, request: SampleRequest, number: int) -> list[int] | ScriptedReply:
        text = ByteChat.text(request.ids)
        if self.fails and self.fails in text:
            self.let("ab")  # which could not end before
            raise AssertionError("a bug")
        if self.stalls and self.stalls in text:
            return ScriptedReply(ByteChat.say("never"), stalls=True)
        return ByteChat.say("call wait {}" if ">tool:" not in text else "an answer")

    def rows(self) -> Any:
        while True:
            place = self.begun
            self.begun += 1
            yield GroupSet((place,), ({"prompt": f"<{chr(ord('a') + place)}>"},) * GROUP)

    def begin(self, name: str, n: int = 1) -> Begun:
        """Begin episodes of a row that may end, outside of the queue."""
        self.let(name)
        return self.ahead.begin([{"prompt": f"<{name}>"}] * n, SamplingOptions(), step=0)

    def let(self, names: str) -> None:
        """Let the groups of these rows end."""
        self.engine.open_to = self.engine.open_to | {f"<{name}>" for name in names}

    async def judge(self, group_set: GroupSet, trajectories: Any) -> Worth:
        name = group_set.rows[0]["prompt"][1]
        self.judged.append(name)
        return Worth(name not in self.dead)

    def take(self, step: int, names: str = "") -> TakenGroups[Any]:
        self.let(names)
        self.ahead.hand_over(iter(()), step)
        began = RolloutBegan(self.rule.target * GROUP, step, "train", "episodes")
        judge: Any = self.judge if self.dead else unjudged
        return self.queue.take(self.rule, SamplingOptions(), began, sets=self.rows(), judge=judge)


def named(drawn: TakenGroups[Any]) -> str:
    return "".join(drawn.sets[number].group_set.rows[0]["prompt"][1] for number in drawn.admitted)


def test_a_group_ahead_goes_on_and_is_the_next_steps_with_the_weights_that_came_meanwhile() -> None:
    world = World()
    first = world.take(0, "ab")
    assert (named(first), first.staleness) == ("ab", (0, 0))
    assert world.queue.places == (2,), "only the group ahead stays in the queue"
    wait_for(lambda: sum("<c>" in text for text in world.engine.asked) == GROUP)  # begun with the first weights
    second = world.take(1, "cde")
    assert named(second) == "cd" and second.staleness == (1, 0)
    ahead, _ = second.sets
    assert [turn.weights for turn in ahead.trajectories[0].turns] == [(0, 1), (1, 1)]
    assert len(ahead.trajectories) == GROUP
    world.queue.stop()
    assert no_rollout_thread() and not world.engine.is_open


def test_a_group_is_not_overtaken_by_later_ones() -> None:
    world = World(beyond=2)
    world.let("bcd")
    late = threading.Timer(0.3, world.let, ["a"])
    late.start()
    assert named(world.take(0)) == "ab"
    late.join()
    world.queue.stop()


def test_a_dead_group_is_judged_once_replaced_at_once_and_given_back() -> None:
    world = World(dead="ab")
    drawn = world.take(0, "abcde")
    assert named(drawn) == "cd"
    assert [one.group_set.rows[0]["prompt"][1] for one in drawn.sets] == ["a", "b", "c", "d"]
    places = tuple(place for one in drawn.sets for place in one.group_set.places)
    assert places == (0, 1, 2, 3)
    world.queue.renumber(places)
    assert world.queue.places == (0,) and sorted(world.judged)[:4] == ["a", "b", "c", "d"]
    world.queue.stop()


def test_a_group_that_fails_ahead_fails_when_it_is_due() -> None:
    world = World(fails="<c>")
    assert named(world.take(0, "c")) == "ab"
    with pytest.raises(AssertionError, match="a bug"):
        world.take(1, "de")
    world.queue.stop()
    assert no_rollout_thread() and not world.engine.is_open


def test_stopping_cancels_what_is_in_the_queue() -> None:
    world = World(stalls="<c>")
    assert named(world.take(0, "abc")) == "ab"
    world.queue.stop()
    world.queue.stop()
    assert (world.engine.open_requests, world.engine.cancelled, world.engine.is_open) == (0, GROUP, False)
    assert no_rollout_thread() and world.queue.places == ()


def test_once_settled_the_engine_is_free_and_what_ended_is_kept() -> None:
    world = World()
    assert named(world.take(0, "ab")) == "ab"
    world.let("c")
    world.queue.settle()
    assert named(world.take(1, "de")) == "cd"
    world.queue.stop()


def test_groups_run_beside_each_other_and_are_told_of_when_they_are_taken() -> None:
    listener = Listener()
    world = World(target=1, observers=Observers([listener]))
    assert named(world.take(5, "ab")) == "a" and world.queue.places == (1,)
    heard = listener.heard.copy()
    assert heard[0] == "began 2 5 train episodes" and heard[-1] == "ended None"
    turns = [f"turn {number} <a> {results}" for number in range(GROUP) for results in (0, 1)]
    assert sorted(heard[1:-1]) == [*(f"episode {number} finished" for number in range(GROUP)), *turns]
    assert named(world.take(6)) == "b"
    assert sorted(listener.heard[len(heard) :]) == sorted(one.replace("5", "6").replace("<a>", "<b>") for one in heard)
    assert listener.threads == {threading.current_thread().name}
    world.queue.stop()
    assert no_rollout_thread() and not world.engine.is_open


def test_all_rollouts_together_keep_to_the_most_episodes_at_a_time() -> None:
    world = World(max_concurrent=2)
    begun = [world.begin(name, 4) for name in "abc"]
    assert [len(one.result(PATIENCE_S)) for one in begun] == [4, 4, 4]
    assert world.engine.most_open_requests <= 2
    world.ahead.stop()


def test_the_thread_computes_on_the_device_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    devices: list[tuple[str, int]] = []
    on_thread = threading.current_thread
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((on_thread().name, device)))
    world = World()
    world.begin("a").result(PATIENCE_S)
    assert devices == [("toolgrpo-rollouts-ahead", 3)]
    monkeypatch.undo()
    world.ahead.stop()


def test_code_on_the_thread_that_exits_does_not_end_it() -> None:
    def answer(request: SampleRequest, number: int) -> list[int]:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        return ByteChat.say("an answer")

    world = World(script=answer)
    assert [len(world.begin("a").result(PATIENCE_S)) for _ in range(2)] == [1, 1]
    world.ahead.stop()
    assert no_rollout_thread()
