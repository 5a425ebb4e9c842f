"""What batches that are drawn ahead need to know of TRL's trainer: its rows, and how far it is.

One more of the files that know TRL's trainer from inside. Used here: `_step`, the micro-batches that
were trained on, of which `steps_per_generation * num_iterations` make a batch; the sampler's data; and
`_save_checkpoint`, between two steps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from toolgrpo.trainer.drawn_batches import DrawnBatches, row_order
from toolgrpo.trainer.groups_ahead import GroupsAhead, Lookahead
from toolgrpo.trainer.overlap import BatchesAhead, Exchange, RunAhead
from toolgrpo.trainer.reward_seam import epoch_order
from toolgrpo.trainer.trl_seam import log_metrics


def open_ahead(trainer: Any) -> BatchesAhead | GroupsAhead:
    """Return what draws the batches of this trainer while it trains."""
    args = trainer.args

    def save() -> None:
        trainer._save_checkpoint(trainer.model, None)

    def step() -> int:
        return int(trainer.state.global_step)

    order = (
        row_order(trainer.train_dataset, partial(epoch_order, trainer))
        if trainer.drawing is None
        else trainer.drawing.order
    )
    run = RunAhead(
        rollouts=trainer.rollouts,
        order=order,
        row_of=lambda number: trainer.train_sampler.data_source[number],
        handover=args.weights_handover,
        sampling=args.sampling_options(),
        group_size=args.num_generations,
        process=trainer.accelerator.process_index,
        n_processes=trainer.accelerator.num_processes,
        trained=trainer.model,
        weights=trainer.policy.weights,
        step=step,
        left=partial(_batches_left, trainer),
        exchange=Exchange(step, save),
        log=partial(log_metrics, trainer),
    )
    if args.draws_ahead:
        return GroupsAhead(run, Lookahead(args.max_staleness, args.carry_over))
    return BatchesAhead(run, staleness=args.max_staleness)


def drawn_from(drawing: DrawnBatches, ahead: BatchesAhead | GroupsAhead | None) -> DrawnBatches:
    """Return what draws the batches, out of the groups that run ahead if there are any."""
    return replace(drawing, ahead=ahead) if isinstance(ahead, GroupsAhead) else drawing


def _batches_left(trainer: Any) -> int:
    args = trainer.args
    micro_batches = trainer.state.max_steps * args.gradient_accumulation_steps - trainer._step
    in_a_batch = args.steps_per_generation * trainer.num_iterations
    return math.ceil(float(micro_batches / in_a_batch))
