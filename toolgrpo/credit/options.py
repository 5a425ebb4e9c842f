"""The config's fields for turn-level credit, and the frozen value they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from toolgrpo.credit.turn_rewards import BUILT_IN_TURN_REWARDS
from toolgrpo.errors import ConfigError

CREDITS = ("episode", "turns")
LOSSES_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")

_LOSSES_WITHOUT_TURNS: Mapping[str, str] = {
    "vespo": (
        "loss_type vespo weighs a whole sequence by the sign of its one advantage, and turns of one episode differ in "
        "sign. Use dapo, grpo, bnpo, dr_grpo, cispo or sapo"
    ),
}


@dataclass(frozen=True, slots=True)
class Credit:
    """How the turns of an episode share its reward."""

    by_turn: bool = False
    scale: str = "group"  # of `turn_advantages`


@dataclass
class CreditOptions:
    """Fields of the training config for turn-level credit."""

    credit: str = field(
        default="episode",
        metadata={
            "help": "The advantage of a turn: episode (that of its episode) or turns (from the rewards by turn of "
            "turn_reward or turn_reward_fn).",
            "choices": CREDITS,
        },
    )
    turn_reward: list[str] | None = field(
        default=None,
        metadata={"help": "Built-in rewards by turn, with credit turns: gold_call, environment."},
    )
    turn_reward_fn: list[str] | None = field(
        default=None, metadata={"help": "Path of a Python file that exports turn_reward_func; several may be given."}
    )
    turn_reward_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weights of the turn rewards beside the episode's reward, in this order; default: 1 each."},
    )

    def check_credit(self) -> None:
        """Raise ConfigError for values and combinations that cannot work."""
        if self.credit not in CREDITS:
            raise ConfigError(f"credit must be one of {', '.join(CREDITS)}; got {self.credit!r}")
        names = self.turn_reward_names()
        unknown = [name for name in self.turn_reward or () if name not in BUILT_IN_TURN_REWARDS]
        if unknown:
            raise ConfigError(
                f"there is no turn reward {unknown[0]!r}; there are {', '.join(BUILT_IN_TURN_REWARDS)}. A function "
                f"of yours is given as a file: turn_reward_fn"
            )
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise ConfigError(f"the turn reward {twice!r} is given twice; its share is in turn_reward_weights")
        weights = self.turn_reward_weights
        if weights is not None and len(weights) != len(names):
            raise ConfigError(
                f"turn_reward_weights has {len(weights)} numbers for {len(names)} turn rewards "
                f"({', '.join(names) or 'none'}); give one for each, in this order"
            )
        if not all(isfinite(value) for value in weights or ()):
            raise ConfigError(f"turn_reward_weights must be finite, got {weights}")
        if self.credit == "turns":
            self._check_loss()
        elif names:
            raise ConfigError(
                f"the turn reward {names[0]} is given, but credit is episode, which uses none; set credit to turns"
            )

    def _check_loss(self) -> None:
        """Refuse what reads one advantage of a sequence."""
        given: Any = self
        loss_type = getattr(given, "loss_type", "dapo")
        if loss_type not in LOSSES_BY_TOKEN:
            why = _LOSSES_WITHOUT_TURNS.get(
                loss_type, f"loss_type {loss_type} is not known to take advantages by token"
            )
            raise ConfigError(f"credit turns gives each turn its own advantage: {why}; or set credit to episode")
        if getattr(given, "importance_sampling_level", "token") != "token":
            raise ConfigError(
                f"credit turns needs importance_sampling_level token: with {given.importance_sampling_level} one "
                f"ratio stands for all tokens, and its gradient mixes the turns again"
            )
        if getattr(given, "off_policy_mask_threshold", None) is not None:
            raise ConfigError(
                "credit turns cannot be used with off_policy_mask_threshold, which drops a whole sequence by the "
                "sign of its one advantage; leave it out"
            )
        if getattr(given, "multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize":
            raise ConfigError(
                "credit turns works on the sum of an episode's rewards, and multi_objective_aggregation "
                "normalize_then_sum makes none; use sum_then_normalize"
            )
        if getattr(given, "advantage", "grpo") == "max_rl":
            raise ConfigError(
                "advantage max_rl divides by the mean reward of a group, and returns of turns have none; use grpo or loo "
                "with credit turns"
            )

    def turn_reward_names(self) -> Sequence[str]:
        """Return the names of all rewards by turn, in the order of their weights."""
        return [*(self.turn_reward or ()), *(self.turn_reward_fn or ())]

    def credits(self) -> Credit:
        """Return these fields as one value. Without rewards by turn nothing tells the turns apart."""
        scale = str(getattr(self, "scale_rewards", "group"))
        return Credit(
            by_turn=self.credit == "turns" and bool(self.turn_reward_names()),
            scale="none" if getattr(self, "advantage", "grpo") == "loo" else scale,
        )
