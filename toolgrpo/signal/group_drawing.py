"""The fields of a config that say which groups are drawn and trained on, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from toolgrpo.errors import ConfigError
from toolgrpo.signal.admission import Admission
from toolgrpo.signal.row_order import Pool, Pools

__all__ = ["CURRICULA", "DYNAMIC_SAMPLING", "GroupDrawingOptions"]

DYNAMIC_SAMPLING = ("off", "backfill")
CURRICULA = ("off", "difficulty_pools")


@dataclass
class GroupDrawingOptions:
    """Which prompts a step draws. By default those of TRL's sampler, each trained on."""

    dynamic_sampling: str = field(
        default="off",
        metadata={
            "help": "backfill: as soon as all rewards of a group are alike, draw another prompt in its place. off: train "
            "on what the step began with.",
            "choices": DYNAMIC_SAMPLING,
        },
    )
    oversample: float = field(
        default=1.0,
        metadata={
            "help": "With backfill: begin a step with so many times its groups (1 to 2); what is left is cancelled."
        },
    )
    max_groups_drawn: float = field(
        default=4.0,
        metadata={
            "help": "With backfill: draw at most so many times the groups of a step, then train on what is there."
        },
    )
    curriculum: str = field(
        default="off",
        metadata={
            "help": "difficulty_pools: draw a row the less often, the nearer the mean reward of its latest group is to "
            "all failed or all solved.",
            "choices": CURRICULA,
        },
    )
    hard_up_to: float = field(default=0.25, metadata={"help": "A row is hard up to this mean reward of a group."})
    normal_up_to: float = field(
        default=0.75, metadata={"help": "A row is normal up to this mean reward of a group, and easy above."}
    )
    hard_weight: float = field(default=0.2, metadata={"help": "How often hard rows are drawn, relative to the others."})
    normal_weight: float = field(default=1.0, metadata={"help": "How often normal rows are drawn."})
    easy_weight: float = field(default=0.2, metadata={"help": "How often easy rows are drawn."})
    unseen_weight: float = field(default=1.0, metadata={"help": "How often rows are drawn that were not drawn before."})
    retire_after_solved: int | None = field(
        default=None, metadata={"help": "Draw a row no more after so many groups in a row that all episodes solved."}
    )
    row_weights: str | None = field(
        default=None,
        metadata={
            "help": "A report of `toolgrpo evaluate` over rows of the training data: what their pools are at the start."
        },
    )
    row_pass_k: int = field(default=1, metadata={"help": "With row_weights: the k of the pass@k that filters rows."})
    row_pass_min: float = field(
        default=0.0, metadata={"help": "With row_weights: leave out rows with a lower pass@k in the report."}
    )
    row_pass_max: float = field(
        default=1.0, metadata={"help": "With row_weights: leave out rows with a higher pass@k in the report."}
    )

    def check_group_drawing(self) -> None:
        """Refuse values and combinations that cannot work."""
        if self.dynamic_sampling not in DYNAMIC_SAMPLING:
            raise ConfigError(
                f"dynamic_sampling must be one of {', '.join(DYNAMIC_SAMPLING)}; got {self.dynamic_sampling!r}"
            )
        if self.curriculum not in CURRICULA:
            raise ConfigError(f"curriculum must be one of {', '.join(CURRICULA)}; got {self.curriculum!r}")
        if not 1 <= self.oversample <= 2:
            raise ConfigError(f"oversample must be from 1 to 2 times the groups of a step, got {self.oversample:g}")
        if self.max_groups_drawn < 1:
            raise ConfigError(
                f"max_groups_drawn must be at least 1 times the groups of a step, got {self.max_groups_drawn:g}"
            )
        if self.oversample > self.max_groups_drawn:
            raise ConfigError(
                f"oversample {self.oversample:g} would begin with more groups than max_groups_drawn "
                f"{self.max_groups_drawn:g} allows; lower the one or raise the other"
            )
        if self.oversample > 1 and self.dynamic_sampling == "off":
            raise ConfigError(
                "oversample draws spare groups for dynamic_sampling backfill, which is off; set both or neither"
            )
        if not self.hard_up_to <= self.normal_up_to:
            raise ConfigError(
                f"hard_up_to must not be above normal_up_to, got {self.hard_up_to:g} and {self.normal_up_to:g}"
            )
        for pool in Pool:
            weight = getattr(self, f"{pool}_weight")
            if not 0 <= weight < float("inf"):
                raise ConfigError(f"{pool}_weight must be 0 or a positive number, got {weight:g}")
        if self.unseen_weight == 0:
            raise ConfigError("unseen_weight 0 would never draw a row for the first time; give it a positive number")
        if self.retire_after_solved is not None and self.retire_after_solved < 1:
            raise ConfigError(f"retire_after_solved must be at least 1, got {self.retire_after_solved}")
        self._check_row_weights()

    def _check_row_weights(self) -> None:
        if not 0 <= self.row_pass_min <= self.row_pass_max <= 1:
            raise ConfigError(
                f"row_pass_min and row_pass_max must be shares in this order, got {self.row_pass_min:g} and "
                f"{self.row_pass_max:g}"
            )
        if self.row_pass_k < 1:
            raise ConfigError(f"row_pass_k must be at least 1, got {self.row_pass_k}")
        filters = (self.row_pass_k, self.row_pass_min, self.row_pass_max)
        if self.row_weights is None and filters != (1, 0.0, 1.0):
            raise ConfigError(
                "row_pass_k, row_pass_min and row_pass_max filter rows by a report; name it in row_weights"
            )
        if self.row_weights is not None and not Path(self.row_weights).is_file():
            raise ConfigError(
                f"row_weights {self.row_weights} is no file; it is what `toolgrpo evaluate --report FILE` writes"
            )

    @property
    def draws_groups(self) -> bool:
        """Whether the steps' prompts are chosen here, in place of TRL's sampler."""
        return (
            self.dynamic_sampling != "off"
            or self.curriculum != "off"
            or self.retire_after_solved is not None
            or self.row_weights is not None
        )

    def pools(self) -> Pools:
        """Return the pools and their weights, all 1 where neither a curriculum nor a report asks for more."""
        weighted = self.curriculum != "off" or self.row_weights is not None
        return Pools(
            self.hard_up_to,
            self.normal_up_to,
            {pool: float(getattr(self, f"{pool}_weight")) if weighted else 1.0 for pool in Pool},
            self.retire_after_solved,
        )

    def admission(self, target: int) -> Admission:
        """Return the rule by which a step of so many groups draws and admits them."""
        if self.dynamic_sampling == "off":
            return Admission.of(target, oversample=1.0, max_groups_drawn=1.0)
        return Admission.of(target, oversample=self.oversample, max_groups_drawn=self.max_groups_drawn)
