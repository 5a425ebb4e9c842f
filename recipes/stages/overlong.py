"""A penalty near `max_completion_length` (DAPO, arXiv 2503.14476, 3.4), as a stage.

    --stage_fn recipes/stages/overlong.py

It grows in a straight line from 0 to PENALTY over the last BUFFER tokens after the prompt. Copy the file to change them.
`shaping/overlong` is the mean.

Measured: nothing yet; no recipe uses it. Not for `--advantage max_rl`, which needs rewards of at least 0.
"""

from __future__ import annotations

from statistics import fmean

from toolgrpo.learning import Facts, TrainBatch

BUFFER = 256  # tokens
PENALTY = 1.0


def taken_off(n_tokens: int, limit: int) -> float:
    """Return what an episode of so many tokens after its prompt loses."""
    return PENALTY * min(1.0, max(0.0, (n_tokens - (limit - BUFFER)) / BUFFER))


def stage(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Take the penalty off the rewards."""
    lengths = [one.trajectory.n_sampled + one.trajectory.n_context for one in facts.episodes]
    taken = [taken_off(length, facts.max_completion_length) for length in lengths]
    own = list(zip(batch.rewards, taken, strict=True))
    of_scored = [loss for reward, loss in facts.gathered(own) if reward is not None]
    shaped = batch.with_rewards(facts, [None if reward is None else reward - loss for reward, loss in own])
    return shaped.told(**{"shaping/overlong": fmean(of_scored)}) if of_scored else shaped
