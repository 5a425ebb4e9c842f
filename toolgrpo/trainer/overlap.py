"""Batches whose rollouts run while earlier ones are trained on (`max_staleness`).

At the call for batch b the pass of batch b-1 has ended. Then, in this order:

    hand over   the engine gets the weights of that pass, between two of its steps
    begin       rollouts until k + 1 batches are in flight: those of batch b+k begin now
    take        batch b, when its episodes have ended; the others go on during its pass

Invariants: rows are those of TRL's order, and a checkpoint knows those that were trained on: what
was in flight is drawn anew, with the same rows, so none is lost and none trained on twice; every
process begins, takes and hands over alike, and nothing collective happens in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object

from toolgrpo.engines.base import Engine, SamplingOptions
from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.rollout.ahead import RolloutsAhead
from toolgrpo.rollout.batch import RolloutBatch, Row
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.signal.row_order import RowOrder

__all__ = ["HANDOVERS", "BatchesAhead", "OverlapOptions", "check_engine"]

HANDOVERS = ("keep", "drain")


@dataclass
class OverlapOptions:
    """Fields of a config that let training and rollouts overlap."""

    max_staleness: int = field(
        default=0,
        metadata={
            "help": "How many steps the weights may be behind that a batch began to be drawn from: its rollouts run "
            "while so many earlier batches are trained on. 0: one after the other."
        },
    )
    weights_handover: str = field(
        default="keep",
        metadata={
            "help": "With max_staleness: new weights reach the engine between two of its steps, and episodes in flight "
            "keep going (keep), or when those have ended (drain).",
            "choices": HANDOVERS,
        },
    )

    def check_overlap(self) -> None:
        """Refuse values and combinations that cannot work."""
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be at least 0, got {self.max_staleness}")
        if self.weights_handover not in HANDOVERS:
            raise ConfigError(f"weights_handover must be one of {', '.join(HANDOVERS)}; got {self.weights_handover!r}")
        if self.max_staleness and getattr(self, "draws_groups", False):
            raise ConfigError(
                "max_staleness begins batches before the last one is judged, and dynamic_sampling, curriculum and "
                "row_weights choose rows by that; leave one of the two out"
            )
        if self.max_staleness and getattr(self, "vllm_enable_sleep_mode", False):
            raise ConfigError(
                "vllm_enable_sleep_mode gives the engine's memory to the training pass, but with max_staleness both run "
                "at the same time; leave one of the two out"
            )


def check_engine(engine: Engine, handover: str) -> None:
    """Raise ConfigError if an engine cannot draw while its policy is trained."""
    if engine.same_numbers_as_trainer:
        raise ConfigError(
            f"max_staleness needs an engine with weights of its own, but {engine.name} decodes with the trainer's, which "
            f"change while it draws; leave `engine` to the config, or max_staleness at 0"
        )
    if handover == "keep" and not getattr(engine, "takes_weights_while_open", False):
        raise ConfigError(
            f"weights_handover keep gives an engine new weights between two of its steps, which {engine.name} does not "
            f"take as it is set up here; set weights_handover drain (vllm_server takes whole weights, no adapters)"
        )


class BatchesAhead:
    """The batches of one run, in one process.

    `weights` walks the policy's; `step` is that of the training; `left` says how many batches are to
    come, this one included; `save` writes a checkpoint.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        order: RowOrder,
        *,
        row_of: Callable[[int], Row],
        staleness: int,
        handover: str,
        sampling: SamplingOptions,
        group_size: int,
        process: int,
        n_processes: int,
        weights: Callable[[], Iterable[tuple[str, Any]]],
        step: Callable[[], int],
        left: Callable[[], int],
        save: Callable[[], None],
        log: Callable[[Mapping[str, float]], None],
    ) -> None:
        self.order = order
        self._ahead = RolloutsAhead(rollouts)
        self._row_of = row_of
        self._most = staleness + 1
        self._drains = handover == "drain"
        self._sampling = sampling
        self._group_size = group_size
        self._process, self._n_processes = process, n_processes
        self._weights, self._step, self._left, self._save, self._log = weights, step, left, save, log
        self._began_at: list[int] = []  # the steps of the weights, of the batches in flight

    def take(self, n_rows: int) -> RolloutBatch:
        """Return this process's `n_rows` episodes of the next batch; every process must ask for as many."""
        step = self._step()
        if self._drains:
            self._ahead.settle()
        self._ahead.hand_over(self._weights(), step)
        n_groups = n_rows * self._n_processes // self._group_size
        planned = self.order.plan(n_groups * self._most)
        for place in range(len(self._ahead), min(self._most, max(1, self._left()))):
            self._begin(planned[place * n_groups : (place + 1) * n_groups], n_rows, step)
        began = time.monotonic()
        batch = self._taken(step)
        self.order.used(range(n_groups))
        self._log(
            {
                "overlap/staleness": float(step - self._began_at.pop(0)),
                "overlap/waited": time.monotonic() - began,
                "overlap/batches_in_flight": float(len(self._ahead)),
            }
        )
        return batch

    def settle(self) -> None:
        """Wait until the engine is free for somebody else; what has ended is kept."""
        self._ahead.settle()

    def stop(self) -> None:
        """Cancel what is in flight."""
        self._ahead.stop()
        self._began_at = []

    def _begin(self, row_numbers: list[int], n_rows: int, step: int) -> None:
        rows = [self._row_of(number) for number in row_numbers for _ in range(self._group_size)]
        first = self._process * n_rows
        self._ahead.begin(
            rows[first : first + n_rows], self._sampling, step=step, group_size=self._group_size, offset=first
        )
        self._began_at.append(step)

    def _taken(self, step: int) -> RolloutBatch:
        """Take the batch; where a process cannot, all save what was trained so far, and stop."""
        failure: Exception | None = None
        batch: RolloutBatch | None = None
        try:
            batch = self._ahead.take(step)
        except Exception as error:  # whatever ended it; it is raised below, when all know of it
            failure = error
        told = gather_object([None if failure is None else f"{type(failure).__name__}: {failure}"])
        failed = next(((number, text) for number, text in enumerate(told) if text is not None), None)
        if failed is None:
            assert batch is not None
            return batch
        self.stop()
        if step:
            self._save()
        if failure is not None:
            raise failure
        raise PeerError(f"process {failed[0]} failed first, so this one cannot go on: {failed[1]}")
