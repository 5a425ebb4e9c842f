"""Do the engine and the model that is trained agree on what was drawn?

The model scores the tokens of some episodes once more, and its log-probabilities are set against
those that came with the tokens.

Not covered: models whose parameters are spread over processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from toolgrpo.segments import Segment
from toolgrpo.trajectory import Trajectory


@torch.no_grad()
def logprob_difference(
    model: Any,
    trajectories: Sequence[Trajectory],
    temperature: float,
    autocast: AbstractContextManager[Any] | None = None,
) -> float | None:
    """Return the mean absolute difference over all sampled tokens; None where there are none."""
    differences: list[float] = []
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with autocast or nullcontext():
            for trajectory in trajectories:
                if trajectory.has_logprobs and trajectory.n_sampled:
                    for segment in trajectory.segments:
                        differences += _of_one(model, segment, temperature, device)
    finally:
        model.train(training)
    return sum(differences) / len(differences) if differences else None


def _of_one(model: Any, segment: Segment, temperature: float, device: torch.device) -> list[float]:
    ids = torch.tensor([[*segment.prompt_ids, *segment.ids]], device=device)
    logits = model(input_ids=ids).logits[0, len(segment.prompt_ids) - 1 : -1].float() / temperature
    own = logits.log_softmax(-1).gather(-1, ids[0, len(segment.prompt_ids) :, None])[:, 0].tolist()
    return [abs(mine - given) for mine, given in zip(own, segment.logprobs, strict=True) if given is not None]
