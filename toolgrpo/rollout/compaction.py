"""Long episodes in a short window: old tool results are dropped, and a new segment goes on.

A segment (`toolgrpo/episode/segments.py`) whose next turn would begin behind `max_tokens` ends. The next one
has a stub in the place of each older result:

    prompt | turn, stub | turn, stub | turn, result | turn, result

The last `keep_last_turns` turns stay as they were. User messages are never dropped.

Invariants: what the model said is repeated token by token and never tokenized again; results and stubs
go through the same proven bridge as every tool result; a rewritten history is never longer than
`max_tokens`; if none can be that short, the episode ends with CONTEXT_FULL and a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ConfigError

STRATEGY = "drop_results"  # the only one; a config may name it
STUB = "[dropped to make room; call again if you need it]"
_EXAMPLE = '\'{"max_tokens": 4096, "keep_last_turns": 2}\''


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """When old results are dropped."""

    max_tokens: int  # that a segment may have, prompt and all, where a turn begins
    keep_last_turns: int = 2
    strategy: str = STRATEGY

    def __post_init__(self) -> None:
        for name in ("max_tokens", "keep_last_turns"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} of context must be a whole number of at least 1, got {value!r}")
        if self.strategy != STRATEGY:
            raise ConfigError(f"strategy of context must be {STRATEGY}; got {self.strategy!r}")

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
                f"context compacts the history at {self.max_tokens} tokens (max_tokens), but the engine's window of {window} "
                f"is full before that; lower max_tokens to leave room for a turn, or raise vllm_max_model_length"
            )


@dataclass(frozen=True, slots=True)
class _Said:
    ids: tuple[int, ...]  # of a turn, as sampled
    answers: tuple[Message, ...]  # what it was followed by


class History:
    """The turns of an episode, to be laid out again without old results.

    `prompt` has the ids of the prompt; `bridge` gives those that follow a turn.
    """

    def __init__(
        self,
        limit: ContextLimit,
        prompt: Sequence[int],
        bridge: Callable[[Sequence[int], Sequence[Message]], list[int]],
    ) -> None:
        self.limit = limit
        self._prompt, self._bridge = prompt, bridge
        self._turns: list[_Said] = []

    def add(self, ids: Sequence[int], answers: Sequence[Message]) -> None:
        """Add a turn and what follows it."""
        self._turns.append(_Said(tuple(ids), tuple(answers)))

    def without_results(self) -> list[int]:
        """Return the history with a stub for each result, but of the last turns."""
        n_old = len(self._turns) - self.limit.keep_last_turns
        ids = list(self._prompt)
        for place, turn in enumerate(self._turns):
            ids += turn.ids
            ids += self._bridge(ids, tuple(map(_stub, turn.answers)) if place < n_old else turn.answers)
        return ids


def _stub(message: Message) -> Message:
    """Return a result as a stub, where that is shorter."""
    content = str(message["content"])
    return {**message, "content": STUB} if message["role"] == "tool" and len(content) > len(STUB) else message
