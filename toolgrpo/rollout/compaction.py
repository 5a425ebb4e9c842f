"""Long episodes in a short window: what was said is written anew, and a new segment goes on from it.

A segment (`toolgrpo/segments.py`) whose next turn would begin behind `max_tokens` is left, and the
next one begins with a shorter history:

    drop_results  prompt | turn, stub | turn, stub | turn, result | turn, result
    summarize     prompt with the summary           | turn, result | turn, result

The last `keep_last_turns` turns stay as they were. A summary is asked of the policy at the end of the
segment that is left, in the place of the last results, which it will see in the next one; it is
sampled text and trained on like any other. One that is cut, that is no text, or that does not leave a
history within `max_tokens`, is not used: results are dropped instead.

Invariants: what the model said is repeated token by token and never tokenized again; results, stubs
and the request go through the same proven bridge as every tool result; a rewritten history is never
longer than `max_tokens`, and where none can be, the episode ends with CONTEXT_FULL and a sentence.

Not covered: what a user says in the middle is kept by `drop_results`, and is for the summary to keep
in `summarize`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from toolgrpo.errors import ConfigError
from toolgrpo.trajectory import Message

__all__ = ["STRATEGIES", "STUB", "SUMMARY_REQUEST", "ContextLimit", "ContextOptions", "History"]

STRATEGIES = ("drop_results", "summarize")
STUB = "[dropped to make room; call again if you need it]"
SUMMARY_REQUEST = (
    "[Your context is full. Do not call a tool now: write a short summary of what you have found and done so far, and "
    "what is left to do. It will replace the conversation up to here; the results of your last calls follow after it.]"
)
_WITHHELD = "[shown after your summary]"
_SUMMARY_TITLE = "\n\n[Your summary of what you have done so far]\n"
_EXAMPLE = '\'{"max_tokens": 4096, "keep_last_turns": 2, "strategy": "drop_results"}\''


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """When the history of an episode is written anew, and how."""

    max_tokens: int  # that a segment may have, prompt and all, where a turn begins
    keep_last_turns: int = 2
    strategy: str = "drop_results"

    def __post_init__(self) -> None:
        for name in ("max_tokens", "keep_last_turns"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} of context must be a whole number of at least 1, got {value!r}")
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"strategy of context must be one of {', '.join(STRATEGIES)}; got {self.strategy!r}")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str | None) -> ContextLimit | None:
        """Return what a config or a flag asks for."""
        if given is None:
            return None
        value: Any = given
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ConfigError(f"context must be an object in JSON, as {_EXAMPLE}; got {given!r}") from None
        known = [one.name for one in fields(cls)]
        if not isinstance(value, Mapping) or "max_tokens" not in value or not set(value) <= set(known):
            raise ConfigError(f"context needs max_tokens, and knows {', '.join(known)}, as {_EXAMPLE}; got {given!r}")
        return cls(**value)

    def check_window(self, window: int) -> None:
        """Raise ConfigError if an engine of this window is full before this limit says so."""
        if self.max_tokens >= window:
            raise ConfigError(
                f"context writes the history anew at {self.max_tokens} tokens (max_tokens), but the engine's window of {window} "
                f"is full before; lower max_tokens, so that a turn has room behind it, or raise vllm_max_model_length"
            )


@dataclass
class ContextOptions:
    """The field of a config about long episodes."""

    context: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Write the history anew where a turn would begin behind max_tokens: drop_results or summarize all but "
            f"the last turns, e.g. {_EXAMPLE}."
        },
    )

    def context_limit(self) -> ContextLimit | None:
        return ContextLimit.parse(self.context)


@dataclass(frozen=True, slots=True)
class _Said:
    ids: tuple[int, ...]  # of a turn, as sampled
    answers: tuple[Message, ...]  # what it was followed by


class History:
    """What an episode has said and heard, as far as it is needed to write it anew.

    `render` gives the ids of a prompt; `bridge` those that follow a turn, of a prompt's messages.
    """

    def __init__(
        self,
        limit: ContextLimit,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], list[int]],
        bridge: Callable[[Sequence[int], Sequence[Message], Sequence[Message]], list[int]],
    ) -> None:
        self.limit = limit
        self.messages = list(messages)  # of the prompt, with the last summary if there is one
        self._of_row = list(messages)
        self._render, self._bridge = render, bridge
        self._turns: list[_Said] = []

    def add(self, ids: Sequence[int], answers: Sequence[Message]) -> None:
        """Add a turn and what follows it."""
        self._turns.append(_Said(tuple(ids), tuple(answers)))

    def without_results(self) -> list[int]:
        """Return the history with a stub for each result, but of the last turns."""
        n_old = max(0, len(self._turns) - self.limit.keep_last_turns)
        stubbed = [_Said(turn.ids, tuple(map(_stub, turn.answers))) for turn in self._turns[:n_old]]
        return self._laid([*stubbed, *self._turns[n_old:]], self.messages)

    def with_summary(self, summary: str) -> list[int]:
        """Return the history with a summary in the place of all but the last turns."""
        return self._laid(self._turns[-self.limit.keep_last_turns :], self._summed(summary))

    def forget(self, summary: str) -> None:
        """Go on from what `with_summary` gave."""
        self.messages, self._turns = self._summed(summary), self._turns[-self.limit.keep_last_turns :]

    def room_for_summary(self, n_tokens: int) -> int:
        """Return how many tokens a summary may have: fewer than it replaces of `n_tokens`, and not more
        than leave a history within the limit.
        """
        return min(n_tokens, self.limit.max_tokens + 1) - len(self.with_summary("")) - 1

    @property
    def asked(self) -> list[Message]:
        """Return the messages that ask for a summary, in the place of those that follow the last turn."""
        *others, last = self._turns[-1].answers
        return [*({**one, "content": _WITHHELD} for one in others), {**last, "content": SUMMARY_REQUEST}]

    def _summed(self, summary: str) -> list[Message]:
        *others, last = self._of_row
        return [*others, {**last, "content": f"{last['content']}{_SUMMARY_TITLE}{summary}"}]

    def _laid(self, turns: Sequence[_Said], messages: Sequence[Message]) -> list[int]:
        ids = self._render(messages)
        for turn in turns:
            ids += turn.ids
            ids += self._bridge(ids, turn.answers, messages)
        return ids


def _stub(message: Message) -> Message:
    """Return a result as a stub, where that is shorter."""
    content = str(message["content"])
    return {**message, "content": STUB} if message["role"] == "tool" and len(content) > len(STUB) else message
