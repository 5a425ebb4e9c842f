"""Encode conversations with tool calls as tokens, with a mask on what the assistant says.

A conversation becomes the ledger that reinforcement learning would have made of it: the prompt of
the chat format, what the assistant says in each turn up to and with its end-of-turn token, and the
format's bridge for tool results between. So a family whose template prints no calls is taught the
words in which its calls are read later, and a token that the model is taught to say is one that it
would have sampled.

A row is `{"messages": [...]}` or `{"prompt": [...], "completion": [...]}` in the OpenAI form;
`tools` may hold schemas of its own. Every assistant turn of messages or of a completion is trained
on; those of a prompt, such as a worked question, are only shown.

Not covered: templates that print a turn differently from what their own header begins; they are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any

from toolgrpo.chat import resolve_format
from toolgrpo.chat.base import assistant_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.chat.message_shapes import one_call_each, with_names
from toolgrpo.data.load import Mixture, is_mixture, source_rows
from toolgrpo.data.rows import OnBadRow, Row, raise_bad_row
from toolgrpo.episode.tool_calls import RUNNABLE
from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ChatFormatError, DataError
from toolgrpo.support.shipped_files import located, no_conversations, page_here

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation. The mask is 1 exactly on assistant turns, with their end-of-turn token if the template prints it there."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    untaught: frozenset[str] = frozenset()  # what its turns hold that the template does not print

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask):
            raise ValueError(
                f"an example's ids and mask must have one length; got {len(self.ids)} and {len(self.mask)}"
            )


def read_conversations(path: str | Path, split: str = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a file, of a data set of the hub or of a mixture as {"messages": ..., "n_prompt": how many of them are
    only shown, "tools": schemas or None}; a bad row is an error. At most `limit` are read.
    """
    if str(path).endswith((".jsonl", ".json", ".ndjson")) and not located(path).is_file():
        raise DataError(no_conversations(Path(path)))
    rows = list(islice(_mixed(located(path), split) if is_mixture(path) else _checked(str(path), split), limit))
    if not rows:
        raise DataError(f"{path} has no conversations; one {{'messages': [...]}} per line is expected")
    return rows


def _mixed(path: Path, split: str) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a mixture's tasks, by their weights, each with its opening."""
    mixture = Mixture.from_file(path)
    if chosen := [task.data for task in mixture.tasks if task.tools or task.hidden_tools or task.reward]:
        raise DataError(
            f"the mixture {path} chooses tools or a reward for {', '.join(chosen)}, which `toolgrpo sft` does not read: a row "
            f"names its own schemas in `tools`; leave these keys out"
        )

    def load(spec: str, *, on_bad_row: OnBadRow, split: str = split, columns: object = None) -> Iterator[Row]:
        return ({"prompt": row["messages"], "conversation": row} for row in _checked(spec, split))

    for row in mixture.rows(load, limit=None, seed=0, on_bad_row=raise_bad_row):
        read, messages = row["conversation"], row["prompt"]
        n_opening = len(messages) - len(read["messages"])
        yield {**read, "messages": messages, "n_prompt": n_opening + read["n_prompt"]}


def _checked(spec: str, split: str) -> Iterator[dict[str, Any]]:
    for row in source_rows(spec, split):
        if row.columns is None:
            raise DataError(f"{row.where}: {row.problem}")
        columns = row.columns
        messages, n_prompt = columns.get("messages"), 0
        if messages is None and isinstance(columns.get("prompt"), list) and isinstance(columns.get("completion"), list):
            messages, n_prompt = [*columns["prompt"], *columns["completion"]], len(columns["prompt"])
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            page = page_here("where-every-episode-fails", "docs/background/dead_groups.md")
            raise DataError(
                f"{row.where}: no conversation; `messages` (or `prompt` and `completion`) must be a list of "
                f"messages with a role, got the columns {', '.join(columns)}"
                + (f"; rows with `gold_calls` can be made into such: {page}" if "gold_calls" in columns else "")
                + (_SHAREGPT if any(map(_is_sharegpt, columns.values())) else "")
            )
        messages = [_message(one, f"{row.where}, message {number}") for number, one in enumerate(messages, 1)]
        said = [message for message in messages[n_prompt:] if _is_taught(message)]
        if not said:
            raise DataError(f"{row.where}: no assistant message, so there is nothing to learn from")
        for call in (one for message in said for one in message.get("tool_calls") or ()):
            _check_arguments(call, row.where)
        given = next((one for name in ("tools", "functions") if (one := columns.get(name)) is not None), None)
        yield {"messages": messages, "n_prompt": n_prompt, "tools": _schemas_of(row.where, given)}


_SHAREGPT = (
    "; of ShareGPT's form rename `from` to `role`, `value` to `content`, `human` to `user` and `gpt` to `assistant`, and write "
    "calls as `tool_calls`"
)


def _is_sharegpt(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and {"from", "value"} <= {*one} for one in value)
    )


def _message(message: Message, where: str) -> Message:
    """Return a message with its text as one text, its calls as a list, and thinking under the one name of it."""
    message = _with_calls(message, where)
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) and content else [None]
    if all(isinstance(one, dict) and one.get("type") == "text" for one in parts):
        content = "".join(str(one.get("text") or "") for one in parts)
    elif message["role"] == "tool" and isinstance(content, dict | list | int | float):
        content = json.dumps(content, ensure_ascii=False)
    elif content is not None and not isinstance(content, str):
        raise DataError(f"{where}: its content must be text or parts of text; got {content!r:.80}")
    if message["role"] != "assistant":
        return {**message, "content": content or ""}
    thought = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    rest = {key: one for key, one in message.items() if key not in ("reasoning", "thinking")}
    return {**rest, "content": content or "", **({"reasoning_content": thought} if isinstance(thought, str) else {})}


def _with_calls(message: Message, where: str) -> Message:
    """Return a message with its calls under `tool_calls`: also of OpenAI's older form, and where they stand as JSON text."""
    if message["role"] == "function":
        message = {**message, "role": "tool"}
    if (older := message.get("function_call")) is not None:
        rest = {key: one for key, one in message.items() if key != "function_call"}
        message = {**rest, "tool_calls": [{"type": "function", "function": older}]}
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        with suppress(ValueError):
            calls = json.loads(calls) if calls.strip() else None
    if calls is not None and not (isinstance(calls, list) and all(isinstance(one, dict) for one in calls)):
        raise DataError(
            f"{where}: its tool_calls must be a list of calls, or such a list as JSON text; got {calls!r:.80}"
        )
    return message if calls is message.get("tool_calls") else {**message, "tool_calls": calls}


def _is_taught(message: Message) -> bool:
    # OpenAI marks a turn that is only shown with the weight 0
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def _check_arguments(call: Any, where: str) -> None:
    given = call.get("function", call).get("arguments") if isinstance(call, dict) else None
    if isinstance(given, str) and given.strip():
        try:
            json.loads(given)
        except ValueError as error:
            raise DataError(f"{where}: the arguments of a call are no JSON ({error}): {given!r:.200}") from error


def _schemas_of(where: str, given: Any) -> list[Any] | None:
    """Return a row's own schemas, also where they stand as JSON text; an empty list says that it has none."""
    schemas = None if given == "" else given
    if isinstance(given, str) and given.strip():
        with suppress(ValueError):
            schemas = json.loads(given)
    if schemas is None or (isinstance(schemas, list) and all(isinstance(one, dict) for one in schemas)):
        return schemas and [one if "function" in one else {"type": "function", "function": one} for one in schemas]
    raise DataError(f"{where}: `tools` must be a list of schemas, or such a list as JSON text; got {given!r:.80}")


def _stub_of(call: Mapping[str, Any], said: str = "") -> dict[str, Any]:
    return {**call, "function": {"name": call.get("function", call).get("name"), "arguments": {"said": said}}}


_QUESTION: Message = {"role": "user", "content": "q"}
_STUB, _SAID = "STUB", "SAID"  # stand for what an assistant and others say where the text does not matter
_OPENED, _CLOSED = "<think>", "\n</think>\n\n"  # of templates that open the thinking and print none
_THOUGHT_MARKER = re.compile(r"</?think>")
_QUOTED_MARKER = re.compile(r"(?<=[ \t`'\"(])</?think>(?=[ \t`'\").,;:!?])")  # within a sentence
_UNPRINTED = "thought"  # the key of thinking that a turn's own text held, where the template prints none


@dataclass(frozen=True, slots=True)
class _Turn:
    """One assistant turn: what the model says, and the thinking switch under which its header begins so."""

    said: list[int]
    enable_thinking: bool | None
    untaught: frozenset[str]


class ConversationEncoder:
    """Conversations to examples, for one chat format."""

    def __init__(self, tokenizer: Any, chat: TemplateFormat | None = None) -> None:
        self._tokenizer = tokenizer
        found = chat or resolve_format(tokenizer)
        if not isinstance(found, TemplateFormat):
            raise ChatFormatError(
                f"the chat format {found.name} cannot print assistant messages; use a model with a chat template"
            )
        self.chat = found

    def __call__(
        self,
        messages: Sequence[Message],
        schemas: Schemas | None = None,
        n_prompt: int = 0,
        *,
        enable_thinking: bool | None = None,
    ) -> Example:
        """Return the tokens of a conversation. Turns among its first `n_prompt` messages are shown, and not trained on.
        With `enable_thinking` the headers of turns are those of this switch, else those under which the turns fit.

        Raises `ChatFormatError` where its template cannot print it.
        """
        tools = list(schemas or ())
        messages = with_names([self._taken_apart(message) for message in messages])
        if self.chat.family.one_call:  # as such a model plays them: a turn for each call
            shown = one_call_each(messages[:n_prompt])
            messages, n_prompt = [*shown, *one_call_each(messages[n_prompt:])], len(shown)
        ids: list[int] = []
        mask: list[int] = []
        untaught = frozenset[str]()
        asked: Sequence[Message] = ()  # the prompt
        last: int | None = None  # the assistant turn before
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < n_prompt:
                continue
            turn = self._turn(messages, index, tools, enable_thinking)
            if last is None:
                asked = messages[:index]
                before = self.chat.prompt(asked, tools, enable_thinking=turn.enable_thinking)
            else:
                if ids[-1] == self._end_of_last:
                    del ids[-1], mask[-1]
                before = self._between(ids, messages[last:index], asked, tools, turn.enable_thinking)
            ids += before + turn.said
            mask += [0] * len(before) + [int(_is_taught(message))] * len(turn.said)
            untaught |= turn.untaught if _is_taught(message) else frozenset()
            last = index
        return Example(tuple(ids), tuple(mask), untaught)

    def _turn(self, messages: Sequence[Message], index: int, tools: list[Any], given: bool | None) -> _Turn:
        """Return one assistant turn as it is said in a short conversation.

        In the whole one a template may print the turns before it otherwise once it is there, and
        hide its thinking.
        """
        told = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        results = index + 1
        while results < len(messages) and messages[results]["role"] == "tool":
            results += 1  # some templates end a turn with calls by what follows them
        unprinted = messages[index].get(_UNPRINTED)
        tried: list[tuple[str, str, bool | None]] = []
        # Some templates print a system message beside the last user message alone, so not where a turn follows that.
        openings = [[*told, _QUESTION], *([[_QUESTION]] if told else [])]
        for asked, enable_thinking in product(openings, (None, True, False) if given is None else (given,)):
            header, whole = (
                self.chat.render(shown, tools, enable_thinking=enable_thinking, ask=ask)
                for shown, ask in ((asked, True), ([*asked, *messages[index:results]], results > index + 1))
            )
            # A template may print empty thinking in the header, and none in a turn that results follow.
            bare = header.removesuffix(f"{_OPENED}\n{_CLOSED}") if given is False else header
            begins = next((one for one in (header, bare) if whole.startswith(one)), None)
            if begins is not None:
                text = self._thought(unprinted, opening=f"{_OPENED}\n") + whole[len(begins) :]
                return self._turn_of(text, messages[index], enable_thinking)
            tried.append((header, whole, enable_thinking))
        for header, whole, enable_thinking in tried:
            plain = header.removesuffix("\n").removesuffix(_OPENED)
            if plain != header and whole.startswith(plain):
                thought = messages[index].get("reasoning_content") or unprinted or ""
                return self._turn_of(self._thought(thought) + whole[len(plain) :], messages[index], enable_thinking)
        raise ChatFormatError(
            f"the chat template of the {self.chat.name} format prints message {index} otherwise than its own "
            f"header begins, so the assistant's tokens cannot be told apart. Use a template that prints what it asks for."
        )

    def _turn_of(self, text: str, message: Message, enable_thinking: bool | None) -> _Turn:
        """Return the turn of this text, and what of its message does not stand in it."""
        said = self._until_end(text, message)
        parts = {"thinking": message.get("reasoning_content")}
        if message.get("tool_calls"):
            parts["text beside calls"] = message.get("content")
        shown = self._plain(said)
        lost = (
            name
            for name, one in parts.items()
            if one and self._plain(self.chat.encode(self.chat.guarded(one.strip()))) not in shown
        )
        return _Turn(said, enable_thinking, frozenset(lost))

    def _plain(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _thought(self, thought: str | None, opening: str = "") -> str:
        return "" if thought is None else f"{opening}{self.chat.guarded(thought)}{_CLOSED}"

    def _until_end(self, text: str, message: Message) -> list[int]:
        """Return the ids of a turn's text, up to and with the token that ends it."""
        ids = self.chat.encode(text)
        ends = [place for place, token in enumerate(ids) if token in self.chat.stop_ids]
        if ends:
            return ids[: ends[0] + 1]
        return [*ids, self.chat.stop_ids[0] if message.get("tool_calls") else self._end_of_answer]

    @cached_property
    def _end_of_answer(self) -> int:
        """The token that ends a turn without calls, where the template prints none behind the last one."""
        with suppress(ChatFormatError):  # it has no end that a user's words may follow
            return int(self.chat.bridge((), [_QUESTION], messages=[_QUESTION])[0])
        return int(self.chat.stop_ids[0])

    @cached_property
    def _end_of_last(self) -> int | None:
        """The token that ends an answer only where nothing follows it, as `<|return|>` of GPT-OSS; it is no input to the model."""
        answered: list[Message] = [_QUESTION, {"role": "assistant", "content": _STUB}]
        with suppress(ChatFormatError):  # it cannot print this, and may never have to
            alone, followed = (
                self.chat.encode(self.chat.render(shown, [], ask=False).partition(_STUB)[2])[:1]
                for shown in (answered, [*answered, _QUESTION])
            )
            return alone[0] if alone and alone != followed else None
        return None

    def _between(
        self,
        ids: list[int],
        told: Sequence[Message],
        asked: Sequence[Message],
        tools: list[Any],
        enable_thinking: bool | None,
    ) -> list[int]:
        """Return what stands between an assistant turn, the first of `told`, with which `ids` ends, and the next one's text."""
        said, *between = told
        if between and all(message["role"] == "tool" for message in between):
            return self.chat.bridge(ids, between, messages=asked, schemas=tools, enable_thinking=enable_thinking)
        turn: Message = {"role": "assistant", "content": _STUB}
        if calls := said.get("tool_calls"):  # some templates print results behind calls only
            turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [*map(_stub_of, calls[:-1]), _stub_of(calls[-1], _STUB)],
            }
        named = [{**message, "content": f"{_SAID}{place}"} for place, message in enumerate(between)]
        printed = self.chat.render([_QUESTION, turn, *named], [], enable_thinking=enable_thinking)
        lost = [one["role"] for one in named if one["content"] not in printed]
        if lost:
            raise ChatFormatError(
                f"the chat template of the {self.chat.name} format does not print what the role {lost[0]} says where between "
                f"two turns of the assistant stand {', '.join(one['role'] for one in named)}"
            )
        shown = self.chat.render([_QUESTION, turn, *between], [], enable_thinking=enable_thinking)
        after = self.chat.encode(shown.partition(_STUB)[2])
        if calls:  # the rest of the last one
            after = after[next((place for place, token in enumerate(after) if token in self.chat.stop_ids), 0) :]
        return after[1:] if after and after[0] == ids[-1] else after

    def _taken_apart(self, message: Message) -> Message:
        """Read calls and thinking out of an assistant turn's text, in the model's own markers.

        Markers in a text would otherwise be printed as letters, which is right for everybody else's
        messages.
        """
        content, thought = message.get("content"), message.get("reasoning_content")
        # Read again as <think>; a format that has none of it, or markers of its own, is not taught any.
        reads = any(_OPENED in text for text in self.chat.reader.thinking)
        if message["role"] == "assistant" and thought and reads and not self._prints_thoughts:
            message = {key: message[key] for key in message if key != "reasoning_content"} | {_UNPRINTED: thought}
        if message["role"] != "assistant" or not isinstance(content, str):
            return message
        ids = self._tokenizer.encode(content, add_special_tokens=False)
        parsed = self.chat.parse([*ids, self.chat.stop_ids[0]])
        unread = [attempt for attempt in parsed.attempts if attempt.status not in RUNNABLE]
        if unread and len(unread) == len(
            parsed.attempts
        ):  # words about calls, or an object that is none, as they stand
            _, thought, said = content.rpartition(_CLOSED.strip())
            apart_from_it = {"reasoning_content": parsed.reasoning, "content": said.lstrip("\n")}
            return message if parsed.reasoning is None or not thought else {**message, **apart_from_it}
        if unread:
            raise ChatFormatError(f"a call in an assistant's text cannot be read, {unread[0].detail}: {content!r:.200}")
        if not parsed.attempts and (parsed.reasoning is None or self._only_names_markers(content)):
            return message
        apart = {**assistant_message(parsed), **{key: message[key] for key in ("tool_calls",) if message.get(key)}}
        if parsed.reasoning is not None and not self._prints_thoughts and _OPENED in content:
            apart[_UNPRINTED] = apart.pop("reasoning_content")
        return {**message, **apart}

    def _only_names_markers(self, text: str) -> bool:
        """Return whether the markers of thinking in this text are words of it, as in an answer about them."""
        if _OPENED not in text and not self._prints_thoughts and not self._opens_thoughts:
            return True
        return len(_QUOTED_MARKER.findall(text)) == len(_THOUGHT_MARKER.findall(text)) > 0

    @cached_property
    def _opens_thoughts(self) -> bool:
        headers = (self.chat.render([_QUESTION], [], enable_thinking=flag) for flag in (None, True))
        return any(header.rstrip().endswith(self.chat.reader.thinking) for header in headers)

    @cached_property
    def _prints_thoughts(self) -> bool:
        thinks = {"role": "assistant", "content": "a", "reasoning_content": _STUB}
        return any(
            _STUB in self.chat.render([_QUESTION, thinks], [], enable_thinking=flag, ask=False) for flag in (None, True)
        )
