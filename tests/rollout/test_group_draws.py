"""Groups that are drawn as a rollout goes: which, by the rule alone, and when, on a clock of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.test_group_queue import Worth
from tests.support.rollouts import scripted_rollouts
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.rollout.group_queue import Admission, Decision, GroupQueue, GroupSet, TakenGroups
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.scheduler import timers_held
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedReply, ScriptedTools

SIZE = 2


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

    async def judge(self, group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Worth:
        assert len(trajectories) == SIZE
        group = int(group_set.rows[0]["prompt"][1:])
        await asyncio.sleep(self.judge_s(group))
        self.judged[group] = self.clock()
        return Worth(self.live(group))

    def take(self, target: int, judge: Any = None) -> TakenGroups[Worth]:
        began = RolloutBegan(0, 0, "train", "")
        queue: GroupQueue[Worth] = GroupQueue(self.rollouts)
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


def test_at_the_bound_it_goes_on_with_what_is_there() -> None:
    drawn = World(live=lambda group: group == 5).take(2)
    assert drawn.admitted == (0, 5) and len(drawn.sets) == 8


def test_judges_of_several_groups_wait_side_by_side() -> None:
    world = World(judge_s=lambda group: 10.0)
    world.take(4)
    assert set(world.judged.values()) == {11.0}


@pytest.mark.parametrize("error", [RewardError("no score"), KeyError("a bug")])
def test_a_failing_judge_ends_it_as_it_is_and_leaves_nothing_behind(error: Exception) -> None:
    async def judge(group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Worth:
        raise error

    world = World(seconds=lambda group: 1.0 if group == 0 else 100.0)
    with pytest.raises(type(error), match=r"no score|a bug"):
        world.take(3, judge=judge)
    assert not world.engine.is_open and world.clock() == 1.0 and world.tools.open_sessions == 0


def test_no_deadline_counts_what_a_reward_takes() -> None:
    """A reward holds the loop for as long as an episode beside it may last."""
    rollouts = World(seconds=lambda group: 0.0 if group == 0 else 0.2, deadline_s=2.0).rollouts

    async def judge(group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Worth:
        if group_set.places == (0,):
            with timers_held():
                time.sleep(2.0)
        return Worth(True)

    queue: GroupQueue[Worth] = GroupQueue(rollouts)
    rule = Admission.of(2, max_groups_drawn=1.0)
    drawn = queue.take(rule, SamplingOptions(), RolloutBegan(0, 0, "train", ""), sets=sets(), judge=judge)
    assert {t.stop_reason for one in drawn.sets for t in one.trajectories} == {"finished"}


PLAIN = Admission.of(3, max_groups_drawn=4.0)


AT_BOUND = Admission.of(2, max_groups_drawn=2.0)
IN_LINE = Admission.of(3, max_groups_drawn=4.0, beyond=3)


def test_a_step_begins_with_its_groups_and_replaces_each_dead_one() -> None:
    assert PLAIN.decide([]) == Decision(begin=3)
    assert PLAIN.decide([None, None, None]) == Decision()
    assert PLAIN.decide([None, False, None]) == Decision(begin=1)
    assert PLAIN.decide([None, False, True, None]) == Decision()
    assert PLAIN.decide([True, False, True, True]) == Decision(admitted=(0, 2, 3))


def test_at_the_bound_the_earliest_dead_groups_fill_the_step() -> None:
    assert AT_BOUND.decide([False, False, False, None]) == Decision()
    assert AT_BOUND.decide([False, False, True, False]) == Decision(admitted=(0, 2))
    assert AT_BOUND.decide([False] * 4) == Decision(admitted=(0, 1))


def test_in_a_line_a_group_is_waited_for_however_early_later_ones_ended_and_a_dead_one_replaced_at_once() -> None:
    assert IN_LINE.decide([None, True, True, True, True, True]) == Decision()
    assert IN_LINE.decide([False, True, True, True, True, True, None]) == Decision(admitted=(1, 2, 3))
    assert IN_LINE.decide([None, False, None, None, None, None]) == Decision(begin=1)


@pytest.mark.property
@given(
    live=st.lists(st.booleans(), min_size=32, max_size=32),
    target=st.integers(1, 8),
    factor=st.floats(2.0, 4.0),
    order=st.randoms(use_true_random=False),
)
def test_what_is_admitted_does_not_depend_on_who_ends_first(
    live: list[bool], target: int, factor: float, order: Random
) -> None:
    rule = Admission.of(target, max_groups_drawn=factor)

    def play(pick: Callable[[list[int]], int]) -> tuple[Decision, int]:
        known: list[bool | None] = []
        while (decision := rule.decide(known)).admitted is None:
            known += [None] * decision.begin
            if not decision.begin:
                waiting = [number for number, alive in enumerate(known) if alive is None]
                assert waiting, "it never waits for nothing"
                number = pick(waiting)
                known[number] = live[number]
        return decision, len(known)

    decision, drawn = play(order.choice)
    assert decision == play(lambda waiting: waiting[0])[0] == play(lambda waiting: waiting[-1])[0]
    assert decision.admitted is not None and len(decision.admitted) == target
    assert list(decision.admitted) == sorted(set(decision.admitted))
    assert drawn <= rule.most == max(target, int(target * factor))
    chosen = [live[number] for number in decision.admitted]
    assert all(chosen) or drawn == rule.most
    assert sum(chosen) == min(target, sum(live[:drawn])), "no live group is left out for a dead one"


@pytest.mark.property
@given(
    target=st.integers(1, 5),
    staleness=st.integers(0, 2),
    dead=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    backfill=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_in_a_line_nobody_is_overtaken_and_nobody_is_lost(
    target: int, staleness: int, dead: float, backfill: bool, random: Random
) -> None:
    """A whole run, whose groups end in any order."""
    steps, most = 12, 3.0 if backfill else 1.0
    line: list[tuple[int, int]] = []  # the number of a group, and the step that it began in
    live: dict[int, bool | None] = {}
    taken: list[int] = []
    for step in range(steps):
        rule = Admission.of(target, max_groups_drawn=most, beyond=min(staleness, steps - 1 - step) * target)
        while (decision := rule.decide([live[n] for n, _ in line])).admitted is None:
            for _ in range(decision.begin):
                line.append((len(live), step))
                live[len(live)] = None
            if not decision.begin:
                number = random.choice([n for n, _ in line if live[n] is None])
                live[number] = not backfill or random.random() >= dead
        admitted = [line[place] for place in decision.admitted]
        assert len(admitted) == target and all(step - began <= staleness for _, began in admitted)
        taken += [n for n, _ in admitted]
        assert [n for n in taken if live[n]] == sorted(n for n in taken if live[n])
        line = [(n, began) for n, began in line if live[n] is not False and n not in taken]
    assert len(set(taken)) == len(taken) == steps * target
    assert set(taken) | {n for n in live if live[n] is False} == set(live), "every group was trained on, or is dead"
