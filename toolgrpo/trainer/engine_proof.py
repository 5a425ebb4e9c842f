"""The engine draws from the model that is trained, or the run ends.

Some tokens of the first training batch after a hand-over are scored with the trainer's weights. An
engine may have other experts, buffers, positions or another precision than the trainer, and all
that a run shows of it is a number in a table.

Invariant: every process gathers and makes passes as often as the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolgrpo.engines.base import Engine, HoldsCopy, SamplingOptions
from toolgrpo.engines.policy import Policy
from toolgrpo.errors import ModelError
from toolgrpo.evaluation.agreement import NOTHING_DRAWN, differences, drawn_tokens, largest_rounding
from toolgrpo.rollout.batch import RolloutBatch


class EngineProof:
    """One trainer's; it asks anew after `again`, and where an engine was given its weights back.

    `model` gives the one that is trained, as it is spread over processes, `step` that of the training.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        accelerator: Any,
        options: SamplingOptions,
        *,
        model: Callable[[], Any],
        step: Callable[[], int],
    ) -> None:
        self._policy = policy
        self._accelerator = accelerator
        self._model = model
        self._step = step
        self._engine = engine if isinstance(engine, HoldsCopy) and engine.gives_logprobs else None
        self._options = options
        self._proven_at: int | None = None  # how often it had been given its weights back

    def again(self) -> None:
        """Let the next batch be looked at: weights or adapter may be others than before."""
        self._proven_at = None

    def hear(self, batch: RolloutBatch) -> None:
        """Compare some of its tokens, where that is due in any process.

        Raises `ModelError` in every process if the two are further apart than rounding explains.
        """
        if self._engine is None:
            return
        accelerator, restores = self._accelerator, self._engine.restores
        due = self._proven_at != restores
        own = drawn_tokens(batch.trajectories, self._step()) if due else []
        state = accelerator.gather(torch.tensor([due, len(own)], device=accelerator.device)).view(-1, 2)
        if not state[:, 0].any():
            return
        own += [NOTHING_DRAWN] * (int(state[:, 1].max()) - len(own))
        found = differences(self._model(), own, self._options, accelerator.autocast())
        sums = torch.tensor([sum(found), float(len(found))], device=accelerator.device)
        total, n_tokens = accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
        if n_tokens:
            self._proven_at = restores
            self._check(self._engine, total / n_tokens, int(n_tokens))

    def _check(self, engine: Engine, difference: float, n_tokens: int) -> None:
        policy = self._policy
        bound = largest_rounding(policy.dtype, policy.device)
        if difference <= bound:
            return
        name, dtype = type(policy.base_model).__name__, str(policy.dtype).removeprefix("torch.")
        raise ModelError(
            f"engine {engine.name} draws from another model than the {name} in {dtype} that the trainer holds: the "
            f"log-probabilities of {n_tokens} tokens that it drew differ by {difference:.2g} on average from the "
            f"trainer's, and rounding explains {bound:g}. Train with --engine transformers, which draws with the "
            f"trainer's own weights; a vLLM server has to be started from the model that is trained, with --dtype {dtype}"
        )
