"""Which rows of a batch need the training pass, and what their loss is divided by: the options.

A row whose advantage is 0 on every token adds nothing to the loss of a policy: its pass can be left
out, where nothing else wants it. `NEEDS_EVERY_ROW` is the list of what does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.errors import ConfigError

SKIP_MODES = ("auto", "off")
DENOMINATORS = ("all", "live")

TOKEN_LOSSES = frozenset(("dapo", "cispo", "vespo"))  # divided by the loss tokens of all processes
ROW_LOSSES = frozenset(("grpo", "dr_grpo", "sapo", "luspo"))  # divided by a number of rows

NEEDS_EVERY_ROW: dict[str, Callable[[Any], bool]] = {
    "beta holds every row to the reference model": lambda args: args.beta != 0,
    "the entropy bonus is taken over every row": lambda args: args.entropy_coef != 0 or args.use_adaptive_entropy,
    "top_entropy_quantile ranks the tokens of every row": lambda args: args.top_entropy_quantile < 1,
}
"""What gives a row without an advantage a part in the loss: the reason, and whether a config asks
for it. The load-balancing loss of a mixture of experts is known to the trainer alone, for its
coefficient may stand in the model.
"""


@dataclass
class TrainingRowsOptions:
    """Fields of the training config."""

    skip_dead_rows: str = field(
        default="auto",
        metadata={
            "help": "Leave rows without any advantage out of the training pass: auto (where nothing else needs them) "
            "or off. The gradient is the same.",
            "choices": SKIP_MODES,
        },
    )
    loss_denominator: str = field(
        default="all",
        metadata={
            "help": "What the loss is divided by: all (tokens or rows, as TRL does) or live (those of rows that have an "
            "advantage).",
            "choices": DENOMINATORS,
        },
    )

    def check_training_rows(self) -> None:
        """Refuse values that are unknown, and a denominator that the loss does not have."""
        if self.skip_dead_rows not in SKIP_MODES:
            raise ConfigError(f"skip_dead_rows must be one of {', '.join(SKIP_MODES)}; got {self.skip_dead_rows!r}")
        if self.loss_denominator not in DENOMINATORS:
            raise ConfigError(
                f"loss_denominator must be one of {', '.join(DENOMINATORS)}; got {self.loss_denominator!r}"
            )
        if self.loss_denominator == "live":
            self._check_live_denominator()

    def _check_live_denominator(self) -> None:
        loss_type, beta = getattr(self, "loss_type", "dapo"), getattr(self, "beta", 0.0)
        if loss_type not in TOKEN_LOSSES | ROW_LOSSES:
            raise ConfigError(
                f"loss_denominator live needs a loss that counts tokens or rows over the whole batch "
                f"({', '.join(sorted(TOKEN_LOSSES | ROW_LOSSES))}); {loss_type} is divided by what each micro-batch "
                f"holds. Set loss_denominator to all, or loss_type to dapo"
            )
        if beta != 0:
            raise ConfigError(
                f"loss_denominator live counts only rows that have an advantage, but with beta {beta:g} every row has "
                f"a part in the loss; set loss_denominator to all, or beta to 0"
            )


def why_every_row(args: Any) -> str | None:
    """Return what needs the rows without an advantage in the training pass, or None."""
    if args.skip_dead_rows == "off":
        return "skip_dead_rows is off"
    return next((reason for reason, asks in NEEDS_EVERY_ROW.items() if asks(args)), None)


def dead_by_rewards_alone(args: Any) -> bool:
    """Return whether a group whose combined rewards are all alike has no advantage, whatever else.

    Not where the rewards are normalised one by one: TRL compares those of the whole batch then.
    """
    return bool(args.multi_objective_aggregation == "sum_then_normalize")
