"""A line every so often while a rollout runs, where no bar can be shown: into a pipe or a log.

A long evaluation is not silent, also while no episode ends for minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from toolgrpo.rollout.observers import EpisodeDone, Observer, RolloutBegan, RolloutEnded

__all__ = ["RolloutLines"]

_EVERY_S = 20.0


class RolloutLines(Observer):
    """Says how far the rollout is, every `every_s` seconds of it; a shorter one is not spoken of."""

    def __init__(self, say: Callable[[str], None], every_s: float = _EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._done = 0
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def rollout_began(self, event: RolloutBegan) -> None:
        self._stop()
        self._done, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._speak, args=(event, self._ended), daemon=True)
        self._thread.start()

    def episode_done(self, event: EpisodeDone) -> None:
        self._done += 1

    def rollout_ended(self, event: RolloutEnded) -> None:
        self._stop()

    def close(self) -> None:
        self._stop()

    def _speak(self, event: RolloutBegan, ended: threading.Event) -> None:
        began = time.monotonic()
        label = "" if event.label == "episodes" else f"{event.label}: "
        while not ended.wait(self._every_s):
            seconds = time.monotonic() - began
            self._say(f"{label}{self._done} of {event.n_episodes} episodes, {seconds:.0f} s")

    def _stop(self) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
        self._ended = self._thread = None
