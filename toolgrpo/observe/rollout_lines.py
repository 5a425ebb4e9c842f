"""Lines about rollouts: for a pipe or a log where no bar can be shown, and for Python's `logging`.

A long evaluation is not silent, also while no episode ends for minutes.

The logger has the name of this module, as all loggers of the package have:
`logging.getLogger("toolgrpo").setLevel(logging.INFO)` is enough to choose.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from statistics import fmean, pstdev

from toolgrpo.episode.trajectory import Turn
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.rollout.observers import EpisodeDone, Observer, RolloutBegan, RolloutEnded

_EVERY_S = 20.0
_SHOWN_CHARS = 500  # of a turn's text, and of each result

logger = logging.getLogger(__name__)


class RolloutLog(Observer):
    """Log the rewards of each batch at INFO, and the turns of each episode at DEBUG."""

    def episode_done(self, event: EpisodeDone) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return
        trajectory, label = event.trajectory, event.rollout.label
        for number, turn in enumerate(trajectory.turns, start=1):
            logger.debug("step %d, %s %d, turn %d: %s", event.rollout.step, label, event.number, number, _turn(turn))
        ended = trajectory.failure or trajectory.stop_reason
        logger.debug("step %d, %s %d ended: %s", event.rollout.step, label, event.number, ended)

    def batch_done(self, batch: RolloutBatch) -> None:
        if not len(batch) or not logger.isEnabledFor(logging.INFO):
            return
        dropped = len(batch) - len(batch.scored)
        names = dict.fromkeys(name for episode in batch.episodes for name in episode.rewards)
        texts = [
            f"step {batch.step} ({batch.mode}): {len(batch)} episodes" + (f", {dropped} dropped" if dropped else ""),
            f"reward {_spread(batch.totals)}",
            *(f"{name} {_spread(episode.rewards.get(name) for episode in batch.episodes)}" for name in names),
        ]
        logger.info("%s", "; ".join(texts))


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not scored"
    return f"mean {fmean(known):.4g}, std {pstdev(known):.4g}, min {min(known):.4g}, max {max(known):.4g}"


def _turn(turn: Turn) -> str:
    texts = [f"{turn.end - turn.start} tokens, {turn.content[:_SHOWN_CHARS]!r}"]
    for number, attempt in enumerate(turn.attempts):
        call = f"{attempt.name}({attempt.arguments})" if attempt.name else f"call not read ({attempt.status})"
        result = f" -> {turn.results[number].content[:_SHOWN_CHARS]!r}" if number < len(turn.results) else ""
        texts.append(f"{call[:_SHOWN_CHARS]}{result}")
    return "; ".join(texts)


class RolloutLines(Observer):
    """Print the progress of a rollout every `every_s` seconds."""

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
