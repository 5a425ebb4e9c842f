"""Groups that are drawn as a rollout goes, on a clock of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.support.rollouts import scripted_rollouts
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.rollout.group_queue import Admission, GroupQueue, GroupSet, TakenGroups
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.scheduler import timers_held
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedReply, ScriptedTools

SIZE = 2


@dataclass(frozen=True)
class Said:
    live: bool


def sets() -> Iterator[GroupSet]:
    for number in count():
        yield GroupSet((number,), ({"prompt": f"q{number}"},) * SIZE)


def group_of(request: SampleRequest) -> int:
    return int(ByteChat.text(request.ids).split("user:q")[1].split("|")[0])


class World:
    """Groups 0, 1, 2, ...: how long their episodes take, how long their judge, and which are live."""

    def __init__(
        self,
        seconds: Callable[[int], float] = lambda group: 1.0,
        live: Callable[[int], bool] = lambda group: True,
        judge_s: Callable[[int], float] = lambda group: 0.0,
        **limits: Any,
    ) -> None:
        self.clock = FakeClock()
        self.engine = ScriptedEngine(self.script)
        self.tools = ScriptedTools({})
        self.began: dict[int, float] = {}
        self.judged: dict[int, float] = {}
        self.seconds, self.live, self.judge_s = seconds, live, judge_s
        self.rollouts = scripted_rollouts(self.engine, self.tools, limits=limits, clock=self.clock)

    def script(self, request: SampleRequest, number: int) -> ScriptedReply | Exception:
        group = group_of(request)
        self.began.setdefault(group, self.clock())
        return ScriptedReply(ByteChat.say("a"), delay_s=self.seconds(group))

    async def judge(self, group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Said:
        assert len(trajectories) == SIZE
        group = int(group_set.rows[0]["prompt"][1:])
        await asyncio.sleep(self.judge_s(group))
        self.judged[group] = self.clock()
        return Said(self.live(group))

    def take(self, target: int, judge: Any = None) -> TakenGroups[Said]:
        began = RolloutBegan(0, 0, "train", "")
        queue: GroupQueue[Said] = GroupQueue(self.rollouts)
        rule = Admission.of(target, max_groups_drawn=4.0)
        drawn = self.clock.run(queue._take(rule, SamplingOptions(), began, sets(), judge or self.judge))
        assert len(queue) == 0
        assert not self.engine.is_open and not self.engine.open_requests
        assert self.tools.open_sessions == 0 and self.tools.closed_sessions > 0
        return drawn


def test_a_replacement_begins_when_a_group_is_dead_and_waits_for_no_other() -> None:
    world = World(seconds=lambda group: {0: 100.0}.get(group, 1.0), live=lambda group: group not in (1, 2))
    drawn = world.take(2)
    assert drawn.admitted == (0, 3)
    assert world.began == {0: 0.0, 1: 0.0, 2: 1.0, 3: 2.0}, "while the first group still runs"
    assert [one.group_set.rows[0]["prompt"] for one in drawn.sets] == ["q0", "q1", "q2", "q3"]
    assert drawn.times.duration_s == 100.0


def test_judges_of_several_groups_wait_side_by_side() -> None:
    world = World(judge_s=lambda group: 10.0)
    world.take(4)
    assert set(world.judged.values()) == {11.0}


def test_at_the_bound_it_goes_on_with_what_is_there() -> None:
    drawn = World(live=lambda group: group == 5).take(2)
    assert drawn.admitted == (0, 5) and len(drawn.sets) == 8


@pytest.mark.parametrize("error", [RewardError("no score"), KeyError("a bug")])
def test_a_failing_judge_ends_it_as_it_is_and_leaves_nothing_behind(error: Exception) -> None:
    async def judge(group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Said:
        raise error

    world = World(seconds=lambda group: 1.0 if group == 0 else 100.0)
    with pytest.raises(type(error), match=r"no score|a bug"):
        world.take(3, judge=judge)
    assert not world.engine.is_open and world.clock() == 1.0 and world.tools.open_sessions == 0


def test_no_deadline_counts_what_a_reward_takes() -> None:
    """A reward holds the loop for longer than an episode beside it may last."""
    rollouts = World(seconds=lambda group: 0.0 if group == 0 else 0.3, deadline_s=3.0).rollouts

    async def judge(group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Said:
        if group_set.places == (0,):
            with timers_held():
                time.sleep(3.0)
        return Said(True)

    queue: GroupQueue[Said] = GroupQueue(rollouts)
    rule = Admission.of(2, max_groups_drawn=1.0)
    drawn = queue.take(rule, SamplingOptions(), RolloutBegan(0, 0, "train", ""), sets=sets(), judge=judge)
    assert {t.stop_reason for one in drawn.sets for t in one.trajectories} == {"finished"}
