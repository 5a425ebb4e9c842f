"""How many tokens an episode has left: of its own length, of the context window, of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from toolgrpo.drops import Drop, DropCause
from toolgrpo.ledger import Ledger
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.trajectory import StopReason


class TurnBudget(NamedTuple):
    """How many tokens the next turn may have,
    and what the episode ends with when that is all there is.
    """

    tokens: int
    when_full: StopReason
    by_turn_cap: bool


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one episode's ledger, in an engine of this window."""

    limits: EpisodeLimits
    window: int

    def left(self, ledger: Ledger) -> int:
        """Return the tokens left of the completion length and of the context window."""
        return min(self.limits.max_completion_length - ledger.n_added, self.window - len(ledger.all_ids))

    def budget(self, ledger: Ledger) -> TurnBudget:
        by_length = self.limits.max_completion_length - ledger.n_added
        left = min(by_length, self.window - len(ledger.all_ids))
        cap = self.limits.max_turn_tokens
        return TurnBudget(
            tokens=left if cap is None else min(left, cap),
            when_full=StopReason.LENGTH if by_length <= left else StopReason.CONTEXT_FULL,
            by_turn_cap=cap is not None and cap < left,
        )

    def refuses(self, ledger: Ledger, *, observed: bool) -> Drop | None:
        """Return why an episode that has said nothing yet cannot say a word, if it cannot."""
        context = self.limits.context
        too_long = context is not None and not ledger.turns and len(ledger.all_ids) > context.max_tokens
        if self.left(ledger) >= 1 and not too_long:
            return None
        what = "the prompt with what the environment's reset returned" if observed else "the prompt"
        cure = "let reset return less" if observed else "shorten it"
        if context is not None and too_long:
            return Drop(
                DropCause.NO_ROOM,
                f"{what} has {len(ledger.all_ids)} tokens, and context allows {context.max_tokens} (max_tokens); {cure}, or "
                f"allow more",
            )
        return Drop(
            DropCause.NO_ROOM,
            f"{what} has {len(ledger.all_ids)} tokens, and the context window {self.window}; "
            f"{cure}, or give the engine a larger window (--vllm_max_model_length)",
        )
