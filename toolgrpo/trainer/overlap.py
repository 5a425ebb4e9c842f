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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from accelerate.utils import gather_object

from toolgrpo.engines.base import Engine, SamplingOptions
from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.rollout.ahead import RolloutsAhead
from toolgrpo.rollout.batch import RolloutBatch, Row
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.signal.row_order import RowOrder

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


def check_engine(engine: Engine, handover: str) -> None:
    """Raise ConfigError if an engine cannot draw while its policy is trained."""
    if engine.same_numbers_as_trainer:
        raise ConfigError(
            f"max_staleness and carry_over need an engine with weights of their own, but {engine.name} decodes with the "
            f"trainer's, which change while it draws; leave `engine` to the config, or these at 0"
        )
    if handover == "keep" and not getattr(engine, "takes_weights_while_open", False):
        raise ConfigError(
            f"weights_handover keep gives an engine new weights between two of its steps, which {engine.name} does not "
            f"take as it is set up here; set weights_handover drain, and carry_over 0 (vLLM takes whole weights so, no "
            f"adapters)"
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What processes tell each other when they take episodes; `save` writes a checkpoint."""

    step: Callable[[], int]
    save: Callable[[], None]
    gather: Callable[[list[Any]], list[Any]] = gather_object

    def all_or_none(self, take: Callable[[], T], stop: Callable[[], None]) -> T:
        """Take something in every process; where one cannot, all save what was trained so far, and stop."""
        failure: Exception | None = None
        taken: list[T] = []
        try:
            taken.append(take())
        except Exception as error:  # whatever ended it; it is raised below, when all know of it
            failure = error
        told = self.gather([None if failure is None else f"{type(failure).__name__}: {failure}"])
        failed = next(((number, text) for number, text in enumerate(told) if text is not None), None)
        if failed is None:
            return taken[0]
        stop()
        if self.step():
            self.save()
        if failure is not None:
            raise failure
        raise PeerError(f"process {failed[0]} failed first, so this one cannot go on: {failed[1]}")


@dataclass(frozen=True, slots=True)
class RunAhead:
    """What whatever runs ahead of a training knows of it, in one process.

    `weights` walks those of `trained`; `step` is that of the training; `left` says how many batches are to
    come, this one included.
    """

    rollouts: Rollouts
    order: RowOrder
    row_of: Callable[[int], Row]
    handover: str
    sampling: SamplingOptions
    group_size: int
    process: int
    n_processes: int
    trained: torch.nn.Module
    weights: Callable[[], Iterable[tuple[str, Any]]]
    step: Callable[[], int]
    left: Callable[[], int]
    exchange: Exchange
    log: Callable[[Mapping[str, float]], None]

    def hand_over(self, ahead: TakesWeights) -> int:
        """Give the engine the weights of now, as `weights_handover` wants it; return their step."""
        step = self.step()
        if self.handover == "drain":
            ahead.settle()
        ahead.hand_over(self.weights(), step)
        return step


class TakesWeights(Protocol):
    """Rollouts under way whose engine gets new weights."""

    def settle(self) -> None: ...

    def hand_over(self, weights: Iterable[tuple[str, Any]], step: int) -> None: ...


class BatchesAhead:
    """The batches of one run, in one process."""

    def __init__(self, run: RunAhead, *, staleness: int) -> None:
        self._run = run
        self._ahead = RolloutsAhead(run.rollouts, trained=run.trained)
        self._most = staleness + 1
        self._began_at: list[int] = []  # the steps of the weights, of the batches in flight

    @property
    def order(self) -> RowOrder:
        return self._run.order

    def take(self, n_rows: int) -> RolloutBatch:
        """Return this process's `n_rows` episodes of the next batch; every process must ask for as many."""
        run, step = self._run, self._run.hand_over(self._ahead)
        n_groups = n_rows * run.n_processes // run.group_size
        planned = run.order.plan(n_groups * self._most)
        for place in range(len(self._ahead), min(self._most, max(1, run.left()))):
            self._begin(planned[place * n_groups : (place + 1) * n_groups], n_rows, step)
        began = time.monotonic()
        batch = run.exchange.all_or_none(lambda: self._ahead.take(step), self.stop)
        run.order.used(range(n_groups))
        run.log(
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
        run = self._run
        rows = [run.row_of(number) for number in row_numbers for _ in range(run.group_size)]
        first = run.process * n_rows
        self._ahead.begin(
            rows[first : first + n_rows], run.sampling, step=step, group_size=run.group_size, offset=first
        )
        self._began_at.append(step)
