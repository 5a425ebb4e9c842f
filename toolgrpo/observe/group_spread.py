"""How far the rewards of a batch spread: what tells a person early that GRPO has nothing to learn from.

`reward` (mean) and `reward_std` are logged by TRL; this adds the smallest, the largest, and the share of groups whose
rewards are all alike. Alike means within 1e-6, because the standard deviation of equal fp32 rewards is seldom exactly 0
(TRL's `frac_reward_zero_std` misses most such groups).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["reward_spread"]

_ALIKE = 1e-6


def reward_spread(rewards: Sequence[float], group_size: int) -> dict[str, float]:
    """Metrics of one batch; the rewards of a group stand together."""
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    alike = sum(max(group) - min(group) < _ALIKE for group in groups)
    return {
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/groups_without_spread": alike / len(groups),
    }
