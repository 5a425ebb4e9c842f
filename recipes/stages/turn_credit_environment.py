"""Turn-level credit by the rewards that an environment gives after each turn (`step_reward()`), as a stage.

    --environment my_env.py:MyEnv --stage_fn recipes/stages/turn_credit_environment.py

A copy of yours needs `turn_credit.py` beside it. What it does and what was measured: there.
"""

from __future__ import annotations

from turn_credit import credit_turns, environment

from toolgrpo.learning import Facts, TrainBatch


def stage(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Give each turn's tokens their own advantage."""
    return credit_turns(batch, facts, environment)
