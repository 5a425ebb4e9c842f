"""Tell the recorder what the training pass saw of a few episodes' tokens.

Of each rollout `n` episodes are chosen, in turn the one with the most positive and the one with the
most negative advantage. Their numbers travel with TRL's batch through its shuffling and splitting
(`trl_batch.add_numbers`), and are met again in the pass that makes the loss. Nothing is drawn at
random, and nothing that is trained on changes.

Not covered: liger's fused loss, which shows no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.trainer.trl import batch as trl_batch


class TokenTap:
    """Link between the chosen episodes of a rollout and the passes that train on them."""

    def __init__(self, recorder: EpisodeRecorder, n: int) -> None:
        self._recorder = recorder
        self._n = n if recorder.path is not None else 0
        self._chosen: dict[int, Scored] = {}
        self._step = 0
        self._inputs: Mapping[str, Any] | None = None

    def mark(self, output: dict[str, Any], numbers: Sequence[int]) -> None:
        """Mark TRL's rows with the numbers of their episodes."""
        if self._n:
            trl_batch.add_numbers(output, numbers)

    def choose(self, batch: RolloutBatch) -> None:
        """Choose among the episodes of a rollout."""
        if self._n == 0:
            return
        self._step = batch.step
        recorded = [
            one
            for place, one in enumerate(batch.episodes)
            if one.trajectory.ids and self._recorder.records(batch, place)
        ]
        chosen = chosen_episodes(recorded, self._n)
        self._chosen = {one.trajectory.metadata["episode"]: one for one in chosen}

    @contextmanager
    def reading(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Listen while a loss is computed from these inputs."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = None

    def hear(self, scored: Sequence[torch.Tensor | None]) -> None:
        """Record, once, what a pass gave for the chosen episodes: (log-probabilities, entropies, ...)."""
        if self._inputs is None or not self._chosen:
            return
        logps, entropies = scored[0], scored[1]
        if logps is None:
            return
        for row, number in enumerate(trl_batch.numbers_of(self._inputs)):
            episode = self._chosen.pop(number, None)
            if episode is not None:
                seen = trl_batch.tokens_of_row(self._inputs, row, logps, entropies, episode.trajectory.mask)
                line = {"step": self._step, "episode": number, **seen}
                self._recorder.tokens_seen(line, list(episode.trajectory.ids))


def chosen_episodes(episodes: Sequence[Scored], n: int) -> list[Scored]:
    """Return up to `n` episodes, in turn the most positive and the most negative advantage."""
    ordered = sorted((one for one in episodes if one.advantage), key=lambda one: one.advantage or 0.0)
    last = len(ordered) - 1
    return [ordered[last - place // 2 if place % 2 == 0 else place // 2] for place in range(min(n, len(ordered)))]
