"""Find the rows of a batch that need the training pass, and the denominator of their loss.

A row whose advantage is 0 on every token adds nothing to the loss of a policy: its pass can be left
out, where nothing else wants it. `NEEDS_EVERY_ROW` is the list of what does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
