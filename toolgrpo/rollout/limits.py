"""The limits of an episode, as one declarative value, and what keeps it within them. `None` means no limit of that kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.errors import ConfigError
from toolgrpo.rollout.compaction import ContextLimit
from toolgrpo.tools.render import RenderedText, ends_of, joined

_LONGEST_TOKEN_CHARS = 128  # no vocabulary of the supported families has a longer entry that matters here
_HALF_A_CHARACTER = "\ufffd"  # what a cut between the tokens of one character leaves on both sides

# How many tokens an episode has left: of its own length, of the context window, of a turn.


class TurnBudget(NamedTuple):
    """Return how many tokens the next turn may have,
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
        return self.limits.budget(ledger.n_added, self.window - len(ledger.all_ids))

    def refuses(self, ledger: Ledger, *, observed: bool) -> Drop | None:
        """Return why an episode that has said nothing yet cannot say a word, if it cannot."""
        context = self.limits.context
        too_long = context is not None and not ledger.turns and len(ledger.all_ids) > context.max_tokens
        if self.left(ledger) >= 1 and not too_long:
            return None
        what = "the prompt with the text that the environment's reset returned" if observed else "the prompt"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode and its parts."""

    max_completion_length: int  # all tokens after the prompt, sampled and context; not the prompts of later segments
    max_turns: int | None = 8  # assistant turns
    max_user_turns: int | None = None  # what the user says after the prompt; see `row_parts.py`
    max_tool_calls: int | None = None  # calls that are run; further ones are answered with an error
    max_turn_tokens: int | None = None  # sampled tokens of one turn
    max_tool_response_tokens: int | None = 1024  # a longer result is cut in the middle and says so
    deadline_s: float | None = None  # wall-clock seconds of the whole episode
    context: ContextLimit | None = None  # where the history is written anew, see `compaction.py`

    def __post_init__(self) -> None:
        for name in (
            "max_completion_length",
            "max_turns",
            "max_user_turns",
            "max_turn_tokens",
            "max_tool_response_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}; leave it out for no limit")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ConfigError(f"max_tool_calls must be at least 0, got {self.max_tool_calls}")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ConfigError(f"the episode deadline must be a positive number of seconds, got {self.deadline_s}")

    def budget(self, n_added: int, left_of_window: int) -> TurnBudget:
        """Return what the next turn may have after so many tokens behind the prompt."""
        by_length = self.max_completion_length - n_added
        left = min(by_length, left_of_window)
        cap = self.max_turn_tokens
        return TurnBudget(
            tokens=left if cap is None else min(left, cap),
            when_full=StopReason.LENGTH if by_length <= left else StopReason.CONTEXT_FULL,
            by_turn_cap=cap is not None and cap < left,
        )


class TextTokenizer(Protocol):
    """The two sides of a tokenizer, and how many ids it has."""

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


class TokenCutter:
    """Cuts a text longer than `max_tokens` in the middle, and says so in the text; None keeps all."""

    def __init__(self, tokenizer: TextTokenizer, max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def __call__(self, text: str, left_out: int = 0) -> RenderedText:
        """Cut a text; a notice in it that counts `left_out` characters becomes one of all."""
        limit = self._max_tokens
        # A token is a byte at least, and some tokenizers begin every text with one more.
        if limit is None or len(text.encode(errors="replace")) < limit:
            return RenderedText(text, left_out)
        # Only the ends can survive, so only they are tokenized: a megabyte of output costs no more
        # than a page.
        window = limit * _LONGEST_TOKEN_CHARS
        if len(text) <= window and len(self._encode(text)) <= limit:
            return RenderedText(text, left_out)
        ends = ends_of(text, left_out)
        half = limit // 2
        head = self._tokenizer.decode(self._encode(ends.first[:window])[: limit - half])
        tail = self._tokenizer.decode(self._encode(ends.last[-window:])[-half:]) if half else ""
        return joined(head.removesuffix(_HALF_A_CHARACTER), tail.removeprefix(_HALF_A_CHARACTER), ends.n_chars)

    def _encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
