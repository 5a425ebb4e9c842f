"""The bar over the episodes of a rollout: on a terminal, in the main process, and only where the rollout takes a while."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from toolgrpo.ledger import Ledger
from toolgrpo.observe import progress
from toolgrpo.rollout import EpisodeDone, RolloutBegan, RolloutEnded
from toolgrpo.testing import ByteChat
from toolgrpo.trajectory import StopReason


def shown(console: Console, shown_after_s: float, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(progress, "_ROLLOUT_SHOWN_AFTER_S", shown_after_s)
    trajectory = Ledger(ByteChat().stop_ids).finish(StopReason.CONTEXT_FULL)
    shown = progress.RunProgress(console)
    began = RolloutBegan(2, step=0, mode="heldout", label="evaluation")
    shown.rollout_began(began)
    for number in range(2):
        shown.episode_done(EpisodeDone(began, number, {}, trajectory))
    shown.rollout_ended(RolloutEnded(began))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("terminal", "main_process", "shown_after_s", "seen"),
    [(True, True, 0.0, True), (False, True, 0.0, False), (True, False, 0.0, False), (True, True, 3600.0, False)],
    ids=["on a terminal", "into a file", "another process", "a short rollout"],
)
def test_the_bar(
    terminal: bool, main_process: bool, shown_after_s: float, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, quiet=not main_process, width=100)
    text = shown(console, shown_after_s, monkeypatch)
    assert ("evaluation" in text and "/2" in text) if seen else text == ""
