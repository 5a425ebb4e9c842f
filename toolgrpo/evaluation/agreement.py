"""Compare the engine's log-probabilities with those of the trained model.

The model scores some tokens once more, as the engine drew them (temperature, top_p and the like),
and its log-probabilities are set against those that came with the tokens.

A pass reads one sequence, so who has parameters spread over processes only has to see to it that
every process asks for equally many (`NOTHING_DRAWN`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from toolgrpo.engines.base import Engine, HoldsCopy, SamplingOptions
from toolgrpo.engines.decode_batch import processed_logprobs
from toolgrpo.engines.policy import Policy
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ModelError
from toolgrpo.rollout.batch import RolloutBatch

_TOKENS, _SEQUENCES = 64, 4


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens from an engine, with the ids before them; context tokens have the log-probability None."""

    before: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


NOTHING_DRAWN = SampledTokens((0,), (0,), (None,))
"""What a process scores that has less than the others."""


def largest_rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest mean difference of log-probabilities that rounding explains."""
    if dtype != torch.float32:
        return 0.15  # on an H100 it alone made 0.08, of a sharp random model of a 1.5B shape
    return 1e-3 if device.type == "cpu" else 1e-2  # kernels of a GPU may round fp32 to TF32


def drawn_tokens(trajectories: Sequence[Trajectory], step: int | None = None) -> list[SampledTokens]:
    """Return about 64 tokens, after the shortest prompts, skipping tokens sampled with the weights of another step."""
    segments = [
        one
        for trajectory in trajectories
        for one in trajectory.segments
        if any(logprob is not None for logprob in one.logprobs)
        and (step is None or one.weights in (None, (step, step)))
    ]
    found: list[SampledTokens] = []
    for one in sorted(segments, key=lambda segment: len(segment.prompt_ids)):
        if len(found) == _SEQUENCES or sum(len(drawn.ids) for drawn in found) >= _TOKENS:
            break
        first = next(place for place, logprob in enumerate(one.logprobs) if logprob is not None)
        chosen = slice(first, first + _TOKENS)
        found.append(SampledTokens((*one.prompt_ids, *one.ids[:first]), one.ids[chosen], one.logprobs[chosen]))
    return found


@torch.no_grad()
def differences(
    model: Any,
    drawn: Sequence[SampledTokens],
    options: SamplingOptions,
    autocast: AbstractContextManager[Any] | None = None,
) -> list[float]:
    """Return the absolute difference for each token, in one pass for each sequence."""
    found: list[float] = []
    training = model.training
    model.eval()
    try:
        with autocast or nullcontext():
            for one in drawn:
                found += _of_one(model, one, options)
    finally:
        model.train(training)
    return found


def _of_one(model: Any, drawn: SampledTokens, options: SamplingOptions) -> list[float]:
    n, ids = len(drawn.ids), (*drawn.before, *drawn.ids)
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor([ids], device=device), logits_to_keep=n + 1, use_cache=False).logits
    logits_TV, drawn_T1 = logits[0, -n - 1 : -1].float(), torch.tensor(drawn.ids, device=device).unsqueeze(1)
    seen = [ids[: len(drawn.before) + place] for place in range(n)]
    own = processed_logprobs(logits_TV, options, seen).gather(-1, drawn_T1)[:, 0]
    # a token that rounding has put on the other side of a cut is compared with what it would have been without
    uncut = (logits_TV / (options.temperature or 1.0)).log_softmax(-1).gather(-1, drawn_T1)[:, 0]
    own = torch.where(own.isinf(), uncut, own)
    return [abs(mine - given) for mine, given in zip(own.tolist(), drawn.logprobs, strict=True) if given is not None]


class EngineProof:
    """The engine draws from the model that is trained, or the run ends.

    Some tokens of the first training batch after a hand-over are scored with the trainer's weights. An
    engine may have other experts, buffers, positions or another precision than the trainer, and all
    that a run shows of it is a number in a table.

    One trainer's; it asks anew after `again`, and where an engine was given its weights back. Every process
    gathers and makes passes as often as the others.

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
            f"engine {engine.name} samples from another model than the {name} in {dtype} that the trainer holds: the "
            f"log-probabilities of {n_tokens} sampled tokens differ by {difference:.2g} on average from the "
            f"trainer's, and rounding explains {bound:g}. Train with --engine transformers, which samples with "
            f"the trainer's own weights; start a vLLM server from the model that is trained, with --dtype {dtype}"
        )
