"""Demand of a run's episodes on an engine in this process: how long a context, and how many at a time.

A context is reserved in the engine's cache, so the default is what this run can use and not what
the model could: the longest prompt, tools included, and `max_completion_length` after it.

Not covered: rows that come later than the engine. One whose prompt is longer than all these has so
much less room, and its episode may end with CONTEXT_FULL.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.build import ENGINES, EngineOptions, choose_engine
from toolgrpo.engines.policy import Policy, kv_bytes_per_token
from toolgrpo.errors import DataError
from toolgrpo.rollout.row_parts import as_messages, offered_tools, thinking_of
from toolgrpo.tools.base import ToolProvider

MOST_AT_A_TIME = 256
"""Episodes of an evaluation that one accelerator decodes together; more gain little."""
PROMPT_ROOM = 2048
"""Tokens of a window for what an agent says beside the row: its instructions, its tools."""
_MOST_MEASURED = 512  # rows whose prompts are rendered: the longest by their text
_STEP = 64  # tokens: runs that differ by a few share one compiled engine
_BYTES = 3  # of a token, about, where no tokenizer is at hand
_NAMED = 3  # rows that an error names
_FOR_A_MESSAGE = 64  # tokens that a template may put around one
_STUB = [{"role": "user", "content": "q"}]


@dataclass(frozen=True, slots=True)
class Window:
    """The context that the episodes of a run need, in tokens."""

    longest_prompt: int
    max_completion_length: int
    room: int = 0  # for prompts that were not rendered

    @property
    def tokens(self) -> int:
        needed = self.longest_prompt + self.room + self.max_completion_length
        return -(-needed // _STEP) * _STEP

    def __str__(self) -> str:
        room = f", room for {self.room} more" if self.room else ""
        return (
            f"{self.tokens} tokens: the longest prompt of {self.longest_prompt}{room}, and max_completion_length "
            f"{self.max_completion_length}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts that rows become. Without a chat format their length is a guess."""

    chat: ChatFormat | None
    tools: ToolProvider | None
    enable_thinking: bool | None = None

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        offered = offered_tools(self.tools, row)
        return [] if offered is None else offered.schemas

    def length(self, row: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]) -> int:
        """Return the tokens of a row's prompt."""
        assert self.chat is not None
        thinking = thinking_of(row, self.enable_thinking)
        return len(self.chat.prompt(as_messages(row["prompt"]), schemas, enable_thinking=thinking))

    def window(self, rows: Sequence[Mapping[str, Any]], max_completion_length: int, room: int = 0) -> Window | None:
        """Return the window for these rows; None if there are none.

        Of more than a few hundred rows only the longest, by their text and their tools, are rendered,
        and an eighth of the longest prompt is added.
        """
        if not rows:
            return None
        known: dict[Any, list[dict[str, Any]]] = {}

        def schemas_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
            key = tuple(None if row.get(column) is None else tuple(row[column]) for column in ("tools", "hidden_tools"))
            if key not in known:
                known[key] = self.schemas(row)
            return known[key]

        def size(row: Mapping[str, Any]) -> int:
            return len(json.dumps([row["prompt"], schemas_of(row)], ensure_ascii=False, default=str).encode())

        # to render every prompt of a large data set would delay the start for the sake of its longest one
        measured = rows if len(rows) <= _MOST_MEASURED else heapq.nlargest(_MOST_MEASURED, rows, key=size)
        if self.chat is None:
            return Window(max(map(size, measured)) // _BYTES, max_completion_length, room)
        longest = max(self.length(row, schemas_of(row)) for row in measured)
        return Window(longest, max_completion_length, room + (longest // 8 if len(measured) < len(rows) else 0))

    def length_within(self, row: Mapping[str, Any], tokens: int) -> int:
        """Return the tokens of a row's prompt, or a bound that is below these."""
        assert self.chat is not None
        messages, schemas = as_messages(row["prompt"]), self.schemas(row)
        bound = len(str([messages, schemas]).encode(errors="replace")) + _FOR_A_MESSAGE * (len(messages) + 1)
        # what the template prints by itself, as a default system prompt
        bound += len(self.chat.prompt(_STUB, [])) if bound < tokens else 0
        return bound if bound < tokens else self.length(row, schemas)


@dataclass(frozen=True, slots=True)
class Demand:
    """The options of the engines, suited to a run, and the line that says so (None: as they were)."""

    options: EngineOptions
    line: str | None = None


def suit(
    options: EngineOptions,
    policy: Policy,
    rows: Iterable[Mapping[str, Any]],
    heldout: Sequence[Mapping[str, Any]],
    *,
    prompts: Prompts,
    max_completion_length: int,
    samples: int = 1,
    max_concurrent: int | None = None,
    room: int = 0,
) -> Demand:
    """Return the options with what this run needs of an engine that stands alone, where nobody has said it.

    `heldout` are the rows that are measured, with `samples` episodes each, shared among processes,
    `max_concurrent` the user's own bound on episodes at a time, and `room` the tokens that an agent
    may put into a prompt of its own beside the row's.
    """
    if not ENGINES[choose_engine(options, policy).name].stands_alone:
        return Demand(options)
    if policy.device.type != "cpu" and max_concurrent is None:
        share = -(-len(heldout) // policy.backend.n_processes) * samples
        options = replace(options, max_rows=max(options.max_rows, min(share, MOST_AT_A_TIME)))
    line = None
    if options.max_model_len is None:
        window = prompts.window((*rows, *heldout), max_completion_length, room)
        config = policy.base_model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        # never above the model's own window, where the engine would refuse to start
        if window is not None and (positions is None or window.tokens < positions):
            options = replace(options, max_model_len=window.tokens)
            a_token = kv_bytes_per_token(config, policy.dtype)
            cache = "" if a_token is None else f" ({a_token * window.tokens / 2**20:.0f} MiB of cache)"
            line = f"{window}{cache}"
    return Demand(options, line)


# Prompts that leave no room in the context window, found before the first step.
#
# A prompt is tokenized only where its bytes alone do not show that it fits: a token has at least one.
#
# Not covered: what an environment says at its reset, which is not known before an episode, and
# datasets that are streamed. Such an episode is dropped when it begins (`DropCause.NO_ROOM`).


def rows_that_fit(rows: Any, prompts: Prompts, tokens: int, policy: str, name: str, say: Callable[[str], None]) -> Any:
    """Return the rows whose prompts leave room for a token in a window of so many; what becomes of the others, `policy` says."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "select") or "prompt" not in rows.column_names:
        return rows
    lengths = enumerate(prompts.length_within(row, tokens) for row in rows)
    too_long = [(place, length) for place, length in lengths if length >= tokens]
    if not too_long:
        return rows
    text = _described(rows, too_long, tokens, name)
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


def _described(rows: Any, too_long: Sequence[tuple[int, int]], window: int, name: str) -> str:
    from toolgrpo.data.load import places_of

    places = places_of(rows, [number for number, _ in too_long[:_NAMED]])
    first = ", ".join(f"{places[number]} ({length:,} tokens)" for number, length in too_long[:_NAMED])
    more = f" and {len(too_long) - _NAMED} more" if len(too_long) > _NAMED else ""
    return f"{name}: the prompt fills the context window of {window:,} tokens in {first}{more}"
