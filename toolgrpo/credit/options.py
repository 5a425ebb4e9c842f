"""Turn-level credit as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

LOSSES_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")


@dataclass(frozen=True, slots=True)
class Credit:
    """How the turns of an episode share its reward."""

    by_turn: bool = False
    scale: str = "group"  # of `turn_advantages`
