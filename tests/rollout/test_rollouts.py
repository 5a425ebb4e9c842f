"""Rows in, a batch out in its groups, and who hears of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.rollouts import scripted_rollouts
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.errors import ConfigError, EngineError, PluginError
from toolgrpo.rollout import EpisodeDone, Observer, RolloutBatch, RolloutBegan, RolloutEnded, Rollouts, TurnDone
from toolgrpo.rollout.batch import Grade, Scored
from toolgrpo.rollout.observers import Observers
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools

CALL = 'call add {"a": 1, "b": 2}'
ROWS: list[dict[str, Any]] = [{"prompt": "q0"}, {"prompt": [{"role": "user", "content": "q1"}]}]


def two_turns(request: SampleRequest, _: int) -> list[int]:
    return ByteChat.say("end" if ">tool:" in ByteChat.text(request.ids) else CALL)


def rollouts(*observers: Observer, engine: ScriptedEngine | None = None) -> Rollouts:
    tools = ScriptedTools({"add": lambda a, b: str(a + b)})
    return scripted_rollouts(engine or ScriptedEngine(two_turns), tools, observers=Observers(observers))


class Listener(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.threads: set[str] = set()

    def hear(self, what: str) -> None:
        self.heard.append(what)
        self.threads.add(threading.current_thread().name)

    def rollout_began(self, event: RolloutBegan) -> None:
        self.hear(f"began {event.n_episodes} {event.step} {event.mode} {event.label}")

    def turn_done(self, event: TurnDone) -> None:
        self.hear(f"turn {event.number} {event.row['prompt']} {len(event.turn.results)}")

    def episode_done(self, event: EpisodeDone) -> None:
        self.hear(f"episode {event.number} {event.trajectory.stop_reason}")

    def rollout_ended(self, event: RolloutEnded) -> None:
        self.hear(f"ended {event.failure}")

    def batch_done(self, batch: RolloutBatch) -> None:
        self.hear(f"batch {len(batch)}")

    def close(self) -> None:
        self.hear("closed")


def test_rows_become_episodes_in_their_order_and_observers_hear_of_each_turn() -> None:
    listener = Listener()
    shared = rollouts(listener)
    batch = shared.run([{"prompt": "q0"}, {"prompt": "q1"}], SamplingOptions(), step=3, mode="eval", label="questions")
    shared.close()
    assert [ByteChat.text(t.prompt_ids).count(f"user:q{i}|") for i, t in enumerate(batch.trajectories)] == [1, 1]
    assert (batch.step, batch.mode, batch.is_graded) == (3, "eval", False)
    assert listener.heard[0] == "began 2 3 eval questions" and listener.heard[-2:] == ["ended None", "closed"]
    assert sorted(listener.heard[1:-2]) == [
        *("episode 0 finished", "episode 1 finished"),
        *("turn 0 q0 0", "turn 0 q0 1", "turn 1 q1 0", "turn 1 q1 1"),
    ]
    assert shared.engine.is_shut_down  # type: ignore[attr-defined]


def test_a_rollout_that_fails_is_ended_for_its_observers() -> None:
    listener = Listener()
    engine = ScriptedEngine(lambda r, _: EngineError("the server is gone"))
    with pytest.raises(EngineError, match="the server is gone"):
        rollouts(listener, engine=engine).run(ROWS, SamplingOptions())
    assert listener.heard[-1].startswith("ended EngineError: 2 of 2 episodes could not be completed")


@pytest.mark.parametrize("event", ["rollout_began", "turn_done", "episode_done", "rollout_ended"])
def test_an_observer_that_raises_is_named(event: str) -> None:
    def broken(self: Any, _: Any) -> None:
        raise KeyError("typo")

    kind = type("MyView", (Observer,), {event: broken, "__module__": "my_view"})
    engine = ScriptedEngine(two_turns)
    with pytest.raises(PluginError, match=rf"my_view\.MyView raised in {event}: KeyError: 'typo'"):
        rollouts(kind(), engine=engine).run(ROWS, SamplingOptions())
    assert engine.open_requests == 0 and not engine.is_open


def test_an_observer_that_fails_after_a_failure_does_not_hide_it() -> None:
    class Broken(Observer):
        def rollout_ended(self, event: RolloutEnded) -> None:
            raise ValueError("second")

    listener = Listener()
    engine = ScriptedEngine(lambda r, _: EngineError("first"))
    with pytest.raises(EngineError, match="first"):
        rollouts(Broken(), listener, engine=engine).run(ROWS, SamplingOptions())
    assert listener.heard[-1].startswith("ended"), "the next one hears of it all the same"


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"subclass of toolgrpo\.rollout\.Observer"):
        Observers([print])  # type: ignore[list-item]


def batch_of(n: int, **more: Any) -> RolloutBatch:
    done = Ledger([1]).finish(StopReason.FINISHED)
    return RolloutBatch(episodes=tuple(Scored({"i": i}, done) for i in range(n)), **more)


@pytest.mark.parametrize(
    ("n", "group_size", "offset", "groups"),
    [
        (6, 3, 0, [[0, 1, 2], [3, 4, 5]]),
        (4, 1, 0, [[0], [1], [2], [3]]),
        (4, 3, 4, [[0, 1], [2, 3]]),  # a second process of two with four episodes each
        (2, 4, 2, [[0, 1]]),  # half of a group
        (2, 4, 1, [[0, 1]]),
        (0, 4, 0, []),
    ],
)
def test_groups_are_those_of_the_whole_batch(n: int, group_size: int, offset: int, groups: list[list[int]]) -> None:
    found = batch_of(n, group_size=group_size, offset=offset).groups()
    assert [[one.row["i"] for one in group] for group in found] == groups


def test_what_is_not_graded_has_no_totals_and_numbers_stand_in_the_metadata() -> None:
    """What grades become: `learning/test_dropped.py`."""
    with pytest.raises(ValueError, match="not graded yet"):
        _ = batch_of(2).totals
    with pytest.raises(ValueError, match="argument"):  # one grade for two
        batch_of(2).graded([Grade({}, 1.0)], lambda one: True)
    assert [t.metadata["episode"] for t in batch_of(3).numbered(40).trajectories] == [40, 41, 42]
