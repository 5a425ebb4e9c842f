"""Prompts that leave no room in the context window, found before the first step.

A prompt is tokenized only where its bytes alone do not show that it fits: a token has at least one.

Not covered: what an environment says at its reset, which is not known before an episode, and
datasets that are streamed. Such an episode is dropped when it begins (`DropCause.NO_ROOM`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.chat.base import ChatFormat
from toolgrpo.errors import DataError
from toolgrpo.rollout.rollouts import as_messages, thinking_of
from toolgrpo.rollout.row_tools import offered_tools
from toolgrpo.tools.base import ToolProvider

_NAMED = 3  # rows that an error names
_FOR_A_MESSAGE = 64  # tokens that a template may put around one
_STUB = [{"role": "user", "content": "q"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    """Parts of a prompt, and the number of tokens it must stay below."""

    tokens: int
    chat: ChatFormat
    tools: ToolProvider | None
    enable_thinking: bool | None = None

    def length(self, row: Mapping[str, Any]) -> int:
        """Return the tokens of a row's prompt, or a bound that is below the window."""
        messages = as_messages(row["prompt"])
        offered = offered_tools(self.tools, row)
        schemas = [] if offered is None else offered.schemas
        bound = len(str([messages, schemas]).encode(errors="replace")) + _FOR_A_MESSAGE * (len(messages) + 1)
        bound += len(self.chat.prompt(_STUB, [])) if bound < self.tokens else 0
        if bound < self.tokens:
            return bound
        thinking = thinking_of(row, self.enable_thinking)
        return len(self.chat.prompt(messages, schemas, enable_thinking=thinking))


def rows_that_fit(rows: Any, window: PromptRoom, policy: str, name: str, say: Callable[[str], None]) -> Any:
    """Return the rows whose prompts leave room for a token; what becomes of the others, `policy` says."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "select") or "prompt" not in rows.column_names:
        return rows
    too_long = [(place, length) for place, row in enumerate(rows) if (length := window.length(row)) >= window.tokens]
    if not too_long:
        return rows
    text = _described(too_long, window.tokens, name)
    if policy == "refuse":
        raise DataError(
            f"{text}. Shorten them, give the engine a larger window (--vllm_max_model_length, up to the model's), or "
            f"leave them out with --long_prompts skip"
        )
    if len(too_long) == len(rows):
        raise DataError(f"{text}: that is all of them, and nothing is left")
    say(f"{text}; left out")
    left_out = {place for place, _ in too_long}
    return rows.select([place for place in range(len(rows)) if place not in left_out])


def _described(too_long: Sequence[tuple[int, int]], window: int, name: str) -> str:
    first = ", ".join(f"row {place} ({length:,} tokens)" for place, length in too_long[:_NAMED])
    more = f" and {len(too_long) - _NAMED} more" if len(too_long) > _NAMED else ""
    return f"{name}: the prompt fills the context window of {window:,} tokens in {first}{more}"
