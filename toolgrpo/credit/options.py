"""How credit is given to turns: the fields of a config, and the frozen value they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from toolgrpo.credit.anchor import anchor_steps
from toolgrpo.credit.built_in import BUILT_IN_TURN_REWARDS
from toolgrpo.credit.episodes import EpisodeTurns
from toolgrpo.credit.turns import turn_advantages
from toolgrpo.errors import ConfigError

__all__ = ["CREDITS", "INFO_GAIN", "LOSSES_WITHOUT_TURNS", "Credit", "CreditOptions"]

CREDITS = ("episode", "turns", "anchor")
INFO_GAIN = "info_gain"  # the one turn reward that asks the model
LOSSES_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")

LOSSES_WITHOUT_TURNS: Mapping[str, str] = {
    "vespo": (
        "loss_type vespo weighs a whole sequence by the sign of its one advantage, and turns of one episode differ in "
        "sign; what it does then is not shown. Use dapo, grpo, bnpo, dr_grpo, cispo or sapo"
    ),
}
"""Losses that cannot have an advantage for each turn, and why."""


@dataclass
class CreditOptions:
    """Fields of the training config that say which turn gets which part of what an episode earned."""

    credit: str = field(
        default="episode",
        metadata={
            "help": "What the turns of an episode get: episode (all of them the episode's advantage), turns (each what was "
            "earned from it on) or anchor (besides, a comparison with others in the same state).",
            "choices": CREDITS,
        },
    )
    turn_reward: list[str] | None = field(
        default=None,
        metadata={
            "help": "Built-in rewards by turn: call_ok, gold_call, environment, info_gain; for credit turns or anchor."
        },
    )
    turn_reward_fn: list[str] | None = field(
        default=None, metadata={"help": "Path of a Python file that exports turn_reward_func; several may be given."}
    )
    turn_reward_weights: list[float] | None = field(
        default=None,
        metadata={"help": "What each turn reward counts beside the outcome, in this order; default: 1 each."},
    )
    credit_gamma: float = field(
        default=1.0,
        metadata={"help": "What a reward counts one turn earlier, above 0 and at most 1 (credit turns, anchor)."},
    )
    anchor_weight: float = field(
        default=1.0, metadata={"help": "What the comparison in the same state counts beside the episode's advantage."}
    )
    info_gain_text: str = field(
        default="{answer}",
        metadata={"help": "How the model would say the gold answer of its row, for info_gain; {answer} stands for it."},
    )

    def check_credit(self) -> None:
        """Raise ConfigError for values and combinations that cannot work."""
        if self.credit not in CREDITS:
            raise ConfigError(f"credit must be one of {', '.join(CREDITS)}; got {self.credit!r}")
        names = self.turn_reward_names()
        unknown = [name for name in self.turn_reward or () if name not in (*BUILT_IN_TURN_REWARDS, INFO_GAIN)]
        if unknown:
            raise ConfigError(
                f"there is no turn reward {unknown[0]!r}; there are {', '.join((*BUILT_IN_TURN_REWARDS, INFO_GAIN))}. One of "
                f"your own is given as a file: turn_reward_fn"
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
        for name, values in (("turn_reward_weights", weights or ()), ("anchor_weight", (self.anchor_weight,))):
            if not all(isfinite(value) for value in values):
                raise ConfigError(f"{name} must be finite, got {values}")
        if self.anchor_weight < 0:
            raise ConfigError(
                f"anchor_weight must be at least 0 (below, the worse of two turns would be paid), got {self.anchor_weight}"
            )
        if not 0 < self.credit_gamma <= 1:
            raise ConfigError(f"credit_gamma must be above 0 and at most 1, got {self.credit_gamma}")
        if INFO_GAIN in names and "{answer}" not in self.info_gain_text:
            raise ConfigError(
                f"info_gain_text must have {{answer}} where the gold answer stands; got {self.info_gain_text!r}"
            )
        if self.credit == "episode":
            self._check_nothing_idle(names)
        else:
            self._check_loss()

    def _check_nothing_idle(self, names: Sequence[str]) -> None:
        idle = [
            name
            for name, is_set in (
                (f"the turn reward {names[0]}" if names else "", bool(names)),
                ("credit_gamma", self.credit_gamma != 1),
                ("anchor_weight", self.anchor_weight != 1),
            )
            if is_set
        ]
        if idle:
            raise ConfigError(
                f"{idle[0]} is given, but credit is episode, where no turn has a part of its own; set credit to turns"
            )

    def _check_loss(self) -> None:
        """Refuse what reads one advantage of a sequence, or makes one of all its turns'."""
        given: Any = self
        if self.credit == "turns" and self.anchor_weight != 1:
            raise ConfigError(
                "anchor_weight is given, but credit is turns, which compares no states; set credit to anchor"
            )
        loss_type = getattr(given, "loss_type", "dapo")
        if loss_type not in LOSSES_BY_TOKEN:
            why = LOSSES_WITHOUT_TURNS.get(loss_type, f"loss_type {loss_type} is not known to take advantages by token")
            raise ConfigError(
                f"credit {self.credit} gives each turn its own advantage: {why}; or set credit to episode"
            )
        if getattr(given, "importance_sampling_level", "token") != "token":
            raise ConfigError(
                f"credit {self.credit} needs importance_sampling_level token: with {given.importance_sampling_level} one "
                f"ratio stands for all tokens, its gradient mixes the turns again, and what they were given apart is lost"
            )
        if getattr(given, "off_policy_mask_threshold", None) is not None:
            raise ConfigError(
                f"credit {self.credit} cannot be used with off_policy_mask_threshold, which drops a whole sequence by the "
                f"sign of its one advantage; leave it out"
            )
        if getattr(given, "multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize":
            raise ConfigError(
                f"credit {self.credit} works on the sum of an episode's rewards, and multi_objective_aggregation "
                f"normalize_then_sum makes none; use sum_then_normalize"
            )
        if getattr(given, "advantage", "grpo") == "max_rl":
            raise ConfigError(
                f"advantage max_rl divides by the mean outcome, and what is earned from a turn on has none; use grpo or loo "
                f"with credit {self.credit}"
            )

    def turn_reward_names(self) -> list[str]:
        """Return the names of all rewards by turn, in the order of their weights."""
        return [*(self.turn_reward or ()), *(self.turn_reward_fn or ())]

    def credits(self) -> Credit:
        """Return what these fields ask for as one value."""
        scale = str(getattr(self, "scale_rewards", "group"))
        return Credit(
            kind=self.credit,
            gamma=self.credit_gamma,
            weight=self.anchor_weight,
            scale="none" if getattr(self, "advantage", "grpo") == "loo" else scale,
            has_rewards=bool(self.turn_reward_names()),
        )


@dataclass(frozen=True, slots=True)
class Credit:
    """How the turns of an episode share what it earned."""

    kind: str = "episode"
    gamma: float = 1.0
    weight: float = 1.0
    scale: str = "group"
    has_rewards: bool = False

    @property
    def is_of_episode(self) -> bool:
        """Whether each turn has its episode's advantage as it is: nothing tells the turns apart.

        So it is with `turns`, gamma 1 and no rewards by turn: what is earned from any turn on is the
        outcome, and it is compared with that of the whole group, as ever.
        """
        return self.kind == "episode" or (self.kind == "turns" and self.gamma == 1 and not self.has_rewards)

    @property
    def has_more_than_outcomes(self) -> bool:
        """Whether a group whose outcomes are all alike may teach nevertheless."""
        return not self.is_of_episode and (self.has_rewards or self.gamma < 1)

    @property
    def adds_to_episode(self) -> bool:
        """Whether its numbers come on top of the episode's advantage, or in its place."""
        return self.kind == "anchor"

    @property
    def wants_states(self) -> bool:
        return self.kind == "anchor"

    def parts(self, episodes: Sequence[EpisodeTurns], group_size: int) -> list[tuple[float, ...]]:
        """Return a number for each turn of each episode, in whole groups: its advantage, or what is
        added to its episode's.
        """
        if self.kind == "turns":
            return turn_advantages(episodes, group_size, self.gamma, self.scale)
        steps = anchor_steps(episodes, group_size, self.gamma, self.scale)
        return [tuple(self.weight * value for value in of) for of in steps]

    def advantages(
        self, episodes: Sequence[EpisodeTurns], group_size: int, of_episodes: Sequence[float]
    ) -> list[tuple[float, ...]]:
        """Return the advantage of each turn; `of_episodes` are those without credit by turn."""
        if self.is_of_episode:
            return [(value,) * one.n_turns for one, value in zip(episodes, of_episodes, strict=True)]
        parts = self.parts(episodes, group_size)
        if not self.adds_to_episode:
            return parts
        return [tuple(value + part for part in of) for value, of in zip(of_episodes, parts, strict=True)]

    def teaches(self, group: Sequence[EpisodeTurns]) -> bool:
        """Return whether any turn of one group has an advantage though its outcomes may be alike."""
        return not self.is_of_episode and any(any(of) for of in self.parts(group, len(group)))
