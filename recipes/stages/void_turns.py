"""Leave out of the loss every episode with a void turn (SimpleTIR, arXiv 2509.02479), as a stage.

    --stage_fn recipes/stages/void_turns.py

A turn is void if it has neither a readable call nor a final answer; `turns/void` is their share. The episode's reward
stays in the baseline of its group.

Measured: nothing yet; no recipe uses it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from toolgrpo.episode.trajectory import has_void_turn
from toolgrpo.learning import Facts, TrainBatch


def stage(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Train on no token of an episode with a void turn."""
    kept = torch.tensor([not has_void_turn(one.trajectory) for one in facts.episodes], device=batch.mask.device)
    return replace(batch, mask=batch.mask * kept.unsqueeze(1))
