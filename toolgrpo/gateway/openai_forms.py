"""Requests and answers in OpenAI's form, and vLLM's additions for token ids.

Pure values: JSON in, a request; what was said in, JSON. Whatever cannot be honoured is refused with
a sentence (`Refused`), in the shape in which OpenAI's clients expect errors.

Read and not obeyed: sampling parameters in a training (`sampling` keeps them for whoever serves a
model alone), `tool_choice: required` or of a name (the model may call, nothing forces it), and
`top_logprobs` (there are only those of what was sampled).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError

from toolgrpo.episode.trajectory import Message
from toolgrpo.tools.bounds import read_json


class Refused(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, status: int, code: str, message: str, *, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind


def error_body(refused: Refused) -> dict[str, Any]:
    return {"error": {"message": str(refused), "type": refused.kind, "param": None, "code": refused.code}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One answer of the model, exactly and as a client reads it."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    texts: tuple[str, ...]  # of each token, if log-probabilities were asked for
    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "tool_calls", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A client's request on either path, and the form of its answer."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] | None = None
    logprobs: bool = False  # those of what was sampled are asked for, with the text of each token
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False
    number: str = ""  # the answer's own id
    named_events: ClassVar[bool] = False  # an event of a stream has its type in front

    def error(self, refused: Refused) -> dict[str, Any]:
        return error_body(refused)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.number, "object": kind, "created": int(time.time()), "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatRequest(_Request):
    """A request to `/v1/chat/completions`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    enable_thinking: bool | None = None

    def answer(self, said: ModelAnswer) -> dict[str, Any]:
        """Return the answer in one piece."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content or (None if said.calls else ""),
            "refusal": None,
        }
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [_as_call(call) for call in said.calls]
        choice = {"index": 0, "message": message, "finish_reason": said.finish_reason, "logprobs": None}
        choice |= self._of_tokens(said)
        answer = {**self._head("chat.completion"), "choices": [choice], "usage": _usage(said)}
        return answer | self._of_prompt(said)

    def chunks(self, said: ModelAnswer) -> Iterator[dict[str, Any]]:
        """Give the same as the chunks of a stream: who speaks, text, calls, the end, and perhaps the usage."""
        yield self._chunk({"role": "assistant", "content": ""}, None) | self._of_prompt(said)
        if said.reasoning is not None:
            yield self._chunk({"reasoning_content": said.reasoning}, None)
        of_tokens = self._of_tokens(said)
        if said.content or of_tokens:
            yield self._chunk({"content": said.content}, None, **of_tokens)
        for place, call in enumerate(said.calls):
            yield self._chunk({"tool_calls": [{"index": place, **_as_call(call)}]}, None)
        yield self._chunk({}, said.finish_reason)
        if self.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(said)}

    def _chunk(self, delta: Mapping[str, Any], reason: str | None, **of_tokens: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None, **of_tokens}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _of_tokens(self, said: ModelAnswer) -> dict[str, Any]:
        logprobs: dict[str, Any] = {"logprobs": _chat_logprobs(said)} if self.logprobs else {}
        return logprobs | ({"token_ids": list(said.ids)} if self.token_ids else {})

    def _of_prompt(self, said: ModelAnswer) -> dict[str, Any]:
        return {"prompt_token_ids": list(said.prompt_ids)} if self.token_ids else {}


@dataclass(frozen=True, slots=True)
class TextRequest(_Request):
    """A request to `/v1/completions`: token ids, or a text."""

    prompt: tuple[int, ...] | str

    def answer(self, said: ModelAnswer) -> dict[str, Any]:
        return {**self._piece(said), "usage": _usage(said)}

    def chunks(self, said: ModelAnswer) -> Iterator[dict[str, Any]]:
        """Give the answer, which is the only chunk."""
        yield self.answer(said) if self.include_usage else self._piece(said)

    def _piece(self, said: ModelAnswer) -> dict[str, Any]:
        reason = "length" if said.finish_reason == "length" else "stop"
        choice: dict[str, Any] = {"index": 0, "text": said.content, "finish_reason": reason, "logprobs": None}
        if self.logprobs:
            choice["logprobs"] = {
                "tokens": list(said.texts),
                "token_logprobs": None if said.logprobs is None else list(said.logprobs),
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, said.texts), initial=0))[:-1],
            }
        if self.token_ids:
            choice |= {"token_ids": list(said.ids), "prompt_token_ids": list(said.prompt_ids)}
        return {**self._head("text_completion"), "choices": [choice]}


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
NOT_SAMPLED = ("presence_penalty", "frequency_penalty", "logit_bias")  # which no engine here has


class RequestBody(BaseModel):
    model: str = Field(min_length=1)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: int | None = 1
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    return_token_ids: bool | None = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)

    def asked(self, number: str) -> dict[str, Any]:
        """Return what both kinds of requests have."""
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        sampling |= {name: getattr(self, name) or None for name in NOT_SAMPLED}  # 0: nothing is asked
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "max_tokens": self.max_tokens,
            "stop": tuple(text for text in stops if text),
            "sampling": {name: value for name, value in sampling.items() if value is not None},
            "model": self.model,
            "stream": bool(self.stream),
            "include_usage": bool((self.stream_options or {}).get("include_usage")),
            "token_ids": bool(self.return_token_ids),
            "number": number,
        }


class _ChatBody(RequestBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    response_format: dict[str, Any] | None = None
    functions: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class _TextBody(RequestBody):
    prompt: Any  # looked at in `read_text`: pydantic has an error for each item of a long list
    logprobs: int | None = None
    echo: bool | None = False


def read_chat(body: Any, number: str) -> ChatRequest:
    """Return what a body asks of `/v1/chat/completions`."""
    asked = validated(_ChatBody, body)
    if asked.functions:
        raise Refused(400, "unsupported_value", "`functions` is the old form of tools; give them in `tools`")
    kind = (asked.response_format or {}).get("type", "text")
    if kind != "text":
        raise Refused(400, "unsupported_value", f"response_format {kind!r} is not supported; leave it out")
    thinking = (asked.chat_template_kwargs or {}).get("enable_thinking")
    given = asked.asked(f"chatcmpl-{number}")
    return ChatRequest(
        messages=tuple(message_of(message, place) for place, message in enumerate(asked.messages)),
        tools=() if asked.tool_choice == "none" else tuple(map(tool_of, asked.tools or ())),
        enable_thinking=None if thinking is None else bool(thinking),
        logprobs=bool(asked.logprobs),
        **{**given, "max_tokens": asked.max_completion_tokens or asked.max_tokens},
    )


def read_text(body: Any, number: str) -> TextRequest:
    """Return what a body asks of `/v1/completions`."""
    asked = validated(_TextBody, body)
    prompt: Any = asked.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Refused(400, "unsupported_value", f"one prompt per request is supported, got {len(prompt)}")
        prompt = prompt[0]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and set(map(type, prompt)) <= {int}):
        raise Refused(400, "invalid_value", "the prompt must be a text or a list of token ids")
    if not prompt:
        raise Refused(400, "invalid_value", "the prompt is empty; give a text or the ids of at least one token")
    if asked.echo:
        raise Refused(400, "unsupported_value", "`echo` is not supported; you already have the prompt")
    return TextRequest(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        logprobs=asked.logprobs is not None,
        **asked.asked(f"cmpl-{number}"),
    )


_MOST_ITEMS = {"messages": 4096, "input": 4096, "tools": 1024, "stop": 64, "stop_sequences": 64, "logit_bias": 4096}


def validated(kind: type[Any], body: Any) -> Any:
    if not isinstance(body, dict):
        raise Refused(400, "invalid_value", f"the body must be a JSON object, got a {type(body).__name__}")
    for name, most in _MOST_ITEMS.items():
        given = body.get(name)
        if isinstance(given, list | dict) and len(given) > most:
            raise Refused(400, "invalid_value", f"{name} holds {len(given)} items; at most {most} are read here")
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][:2])
        raise Refused(400, "invalid_value", f"{place}: {first['msg']}") from error
    if (asked.n or 1) != 1:
        raise Refused(
            400, "unsupported_value", f"n is {asked.n}; ask {asked.n} times, at once if you like, for as many answers"
        )
    return asked


_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def message_of(message: Mapping[str, Any], place: int) -> Message:
    """Return a message as chat formats take it: text for content, calls with objects for arguments."""
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise Refused(
            400,
            "invalid_value",
            f"messages[{place}].role must be one of {', '.join(_ROLES)}, got {message.get('role')!r}",
        )
    read: Message = {"role": role, "content": _text(message.get("content"), place)}
    if role == "tool":
        read |= {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
    if role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            read["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise Refused(400, "invalid_value", f"messages[{place}].tool_calls must be a list of calls")
            read["tool_calls"] = [_call(call, place) for call in calls]
    return read


def _text(content: Any, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "refusal", "input_text", "output_text"):
            raise Refused(
                400,
                "unsupported_content",
                f"messages[{place}] holds content of the type {kind!r}; only text is supported",
            )
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, "invalid_value", f"messages[{place}].tool_calls holds something that is not a function call")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    named = {"id": str(call["id"])} if call.get("id") else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: str) -> Any:
    """Return the arguments of a call; those that are no JSON, or beyond all bounds, as the text that they are."""
    try:
        return read_json(text)
    except ValueError:
        return text


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the toolbox would show it: what only a server reads (`strict`) is left out."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, "invalid_value", f"tools holds {json.dumps(tool)[:80]}, which is not a function with a name")
    shown = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    shown.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": shown}


def model_list(names: Sequence[str], window: int) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 0, "owned_by": "toolgrpo", "max_model_len": window}
            for name in names
        ],
    }


def _usage(said: ModelAnswer) -> dict[str, int]:
    sizes = {"prompt_tokens": len(said.prompt_ids), "completion_tokens": len(said.ids)}
    return {**sizes, "total_tokens": sum(sizes.values())}


def _as_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(said: ModelAnswer) -> dict[str, Any] | None:
    if said.logprobs is None:
        return None
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(said.texts, said.logprobs, strict=True)
    ]
    return {"content": tokens, "refusal": None}
