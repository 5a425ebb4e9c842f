"""In a pipe a long rollout speaks, and a short one does not."""

from __future__ import annotations

import threading

from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.observe.rollout_lines import RolloutLines
from toolgrpo.rollout import EpisodeDone, RolloutBegan, RolloutEnded
from toolgrpo.testing import ByteChat

BEGAN = RolloutBegan(16, step=0, mode="heldout", label="evaluation")


def listening() -> tuple[list[str], threading.Event, RolloutLines]:
    """What is said, whether something was, and who says it."""
    said: list[str] = []
    spoke = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        spoke.set()

    return said, spoke, RolloutLines(say, every_s=0.01)


def test_a_long_rollout_says_how_far_it_is_also_before_anything_ends() -> None:
    said, spoke, lines = listening()
    lines.rollout_began(BEGAN)
    assert spoke.wait(30) and said[0].startswith("evaluation: 0 of 16 episodes")
    trajectory = Ledger(ByteChat().stop_ids).finish(StopReason.CONTEXT_FULL)
    for number in range(2):
        lines.episode_done(EpisodeDone(BEGAN, number, {}, trajectory))
    spoke.clear()
    assert spoke.wait(30)
    spoke.clear()
    assert spoke.wait(30) and said[-1].startswith("evaluation: 2 of 16 episodes")
    lines.rollout_ended(RolloutEnded(BEGAN))


def test_a_short_one_and_one_that_is_cut_off_leave_nothing_running() -> None:
    said: list[str] = []
    lines = RolloutLines(said.append)
    before = threading.active_count()
    lines.rollout_began(BEGAN)
    lines.rollout_ended(RolloutEnded(BEGAN))
    lines.rollout_began(BEGAN)
    lines.close()
    lines.close()
    assert said == [] and threading.active_count() == before
