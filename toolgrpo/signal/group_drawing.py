"""The fields of a config that say which groups are drawn and trained on, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolgrpo.errors import ConfigError
from toolgrpo.signal.admission import Admission

DYNAMIC_SAMPLING = ("off", "backfill")


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
    max_groups_drawn: float = field(
        default=4.0,
        metadata={
            "help": "With backfill: draw at most so many times the groups of a step, then train on what is there."
        },
    )

    def check_group_drawing(self) -> None:
        """Refuse values and combinations that cannot work."""
        if self.dynamic_sampling not in DYNAMIC_SAMPLING:
            raise ConfigError(
                f"dynamic_sampling must be one of {', '.join(DYNAMIC_SAMPLING)}; got {self.dynamic_sampling!r}"
            )
        if self.max_groups_drawn < 1:
            raise ConfigError(
                f"max_groups_drawn must be at least 1 times the groups of a step, got {self.max_groups_drawn:g}"
            )

    @property
    def draws_groups(self) -> bool:
        """Whether the steps' prompts are chosen here, in place of TRL's sampler."""
        return self.dynamic_sampling != "off"

    def admission(self, target: int) -> Admission:
        """Return the rule by which a step of so many groups draws and admits them."""
        return Admission.of(target, max_groups_drawn=self.max_groups_drawn if self.draws_groups else 1.0)
