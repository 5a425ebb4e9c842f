"""Requests and answers of OpenAI's Responses API and of Anthropic's Messages API, as forms of a chat request.

Both become the messages and tools of a `ChatRequest`, so a session keeps the tokens of each in the same way; only
the JSON around them differs. Where a stream is asked for, a turn comes as the events of its form, in one piece.

Refused: a response that is kept by the server (`previous_response_id`), built-in tools, images, and formats of the
answer. Read and not obeyed: `tool_choice` of a name or `any`, `reasoning.effort`, cache marks, and, in a training,
sampling parameters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from toolgrpo.episode.trajectory import Message
from toolgrpo.gateway.openai_forms import ChatRequest, ModelAnswer, Refused, RequestBody, message_of, tool_of, validated

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ChatRequest):
    """A request to `/v1/responses`."""

    named_events: ClassVar[bool] = True

    def answer(self, said: ModelAnswer) -> Json:
        return self._response(said, self._items(said))

    def chunks(self, said: ModelAnswer) -> Iterator[Json]:
        """Give the answer as events: the response, its items one after the other, the response with all of them."""
        begun = self._response(None, [])
        events: list[Json] = [{"type": f"response.{word}", "response": begun} for word in ("created", "in_progress")]
        items = self._items(said)
        for place, item in enumerate(items):
            at = {"item_id": item["id"], "output_index": place}
            empty = {**item, "status": "in_progress"} | {key: [] for key in ("content",) if key in item}
            empty |= {key: "" for key in ("arguments",) if key in item}
            events.append({"type": "response.output_item.added", "output_index": place, "item": empty})
            if item["type"] == "message":
                (part,), inside = item["content"], {**at, "content_index": 0}
                events += [
                    {"type": "response.content_part.added", **inside, "part": {**part, "text": ""}},
                    {"type": "response.output_text.delta", **inside, "delta": part["text"], "logprobs": []},
                    {"type": "response.output_text.done", **inside, "text": part["text"], "logprobs": []},
                    {"type": "response.content_part.done", **inside, "part": part},
                ]
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                events += [
                    {"type": "response.function_call_arguments.delta", **at, "delta": arguments},
                    {
                        "type": "response.function_call_arguments.done",
                        **at,
                        "arguments": arguments,
                        "name": item["name"],
                    },
                ]
            events.append({"type": "response.output_item.done", "output_index": place, "item": item})
        whole = self._response(said, items)
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield {**event, "sequence_number": number}

    def error(self, refused: Refused) -> Json:
        return {"type": "error", "code": refused.code, "message": str(refused), "param": None, "sequence_number": 0}

    def _items(self, said: ModelAnswer) -> list[Json]:
        items: list[Json] = []
        if said.reasoning is not None:
            thought = [{"type": "reasoning_text", "text": said.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{self.number}", "summary": [], "content": thought})
        if said.content or not said.calls:
            part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
            message = {"type": "message", "id": f"msg_{self.number}", "role": "assistant", "content": [part]}
            items.append({**message, "status": "incomplete" if said.finish_reason == "length" else "completed"})
        for place, call in enumerate(said.calls):
            named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", "id": f"fc_{self.number}_{place}", **named, "status": "completed"})
        return items

    def _response(self, said: ModelAnswer | None, items: list[Json]) -> Json:
        cut = said is not None and said.finish_reason == "length"
        asked = {"model": self.model, "parallel_tool_calls": True, "tool_choice": "auto", "metadata": {}}
        asked |= dict.fromkeys(("error", "instructions", "temperature", "top_p"))
        return {
            **{"id": self.number, "object": "response", "created_at": int(time.time()), **asked},
            "status": "in_progress" if said is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in self.tools],
            "usage": None if said is None else _usage_of_response(said),
        }


@dataclass(frozen=True, slots=True)
class MessagesRequest(ChatRequest):
    """A request to `/v1/messages`."""

    named_events: ClassVar[bool] = True

    def answer(self, said: ModelAnswer) -> Json:
        return {**self._message(said), "content": self._blocks(said), "stop_reason": _stop_reason(said)}

    def chunks(self, said: ModelAnswer) -> Iterator[Json]:
        """Give the answer as events: an empty message, its blocks, why it stopped."""
        yield {"type": "message_start", "message": {**self._message(said), "content": [], "stop_reason": None}}
        for place, block in enumerate(self._blocks(said)):
            at = {"index": place}
            kind = block["type"]
            filled = {"text": "text", "thinking": "thinking", "tool_use": "input"}[kind]
            yield {
                "type": "content_block_start",
                **at,
                "content_block": {**block, filled: {} if kind == "tool_use" else ""},
            }
            delta = (
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
                if kind == "tool_use"
                else {"type": f"{kind}_delta", filled: block[filled]}
            )
            yield {"type": "content_block_delta", **at, "delta": delta}
            yield {"type": "content_block_stop", **at}
        end = {"stop_reason": _stop_reason(said), "stop_sequence": None}
        yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": len(said.ids)}}
        yield {"type": "message_stop"}

    def error(self, refused: Refused) -> Json:
        return error_of_messages(refused)

    def _message(self, said: ModelAnswer) -> Json:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": len(said.prompt_ids), "output_tokens": len(said.ids), **cached}
        head = {"id": self.number, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "stop_sequence": None, "usage": usage}

    def _blocks(self, said: ModelAnswer) -> list[Json]:
        blocks: list[Json] = []
        if said.reasoning is not None:
            blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.content or not said.calls:
            blocks.append({"type": "text", "text": said.content, "citations": None})
        for call in said.calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
        return blocks


def error_of_messages(refused: Refused) -> Json:
    """Return an error in the form of Anthropic's API."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


class _ResponsesBody(RequestBody):
    input: str | list[Json]
    tools: list[Json] | None = None
    tool_choice: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = False
    text: Json | None = None


class _MessagesBody(RequestBody):
    messages: list[Json] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    tools: list[Json] | None = None
    tool_choice: Any = None
    system: str | list[Json] | None = None
    stop_sequences: list[str] | None = None
    thinking: Json | None = None


def read_responses(body: Any, number: str) -> ResponsesRequest:
    """Return what a body asks of `/v1/responses`."""
    asked = validated(_ResponsesBody, body)
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(asked, name):
            raise Refused(400, "unsupported_value", f"{name}: nothing is stored between requests; send the whole input")
    kind = ((asked.text or {}).get("format") or {}).get("type", "text")
    if kind != "text":
        raise Refused(400, "unsupported_value", f"text.format {kind!r} is not supported; leave it out")
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    messages = _joined(_of_item(item, place) for place, item in enumerate(items))
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    if not messages:
        raise Refused(400, "invalid_value", "input is empty; give a text or at least one message")
    tools = () if asked.tool_choice == "none" else asked.tools or ()
    return ResponsesRequest(
        messages=tuple(message_of(message, place) for place, message in enumerate(messages)),
        tools=tuple(_flat_tool(tool, "parameters") for tool in tools),
        **{**asked.asked(f"resp_{number}"), "max_tokens": asked.max_output_tokens},
    )


def read_messages(body: Any, number: str) -> MessagesRequest:
    """Return what a body asks of `/v1/messages`."""
    asked = validated(_MessagesBody, body)
    messages: list[Json] = [] if not asked.system else [{"role": "system", "content": asked.system}]
    for place, message in enumerate(asked.messages):
        messages += _of_blocks(message, place)
    choice = (asked.tool_choice or {}).get("type") if isinstance(asked.tool_choice, dict) else None
    thinking = (asked.thinking or {}).get("type")
    return MessagesRequest(
        messages=tuple(message_of(message, place) for place, message in enumerate(messages)),
        tools=() if choice == "none" else tuple(_flat_tool(tool, "input_schema") for tool in asked.tools or ()),
        enable_thinking=None if thinking is None else thinking != "disabled",
        **{**asked.asked(f"msg_{number}"), "stop": tuple(text for text in asked.stop_sequences or () if text)},
    )


def _of_item(item: Json, place: int) -> Json:
    """Return an item of a response's input as a message of the chat form, perhaps a part of one."""
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"role": "assistant", "reasoning_content": "".join(str(part.get("text") or "") for part in parts)}
    raise Refused(400, "unsupported_value", f"input[{place}] is of the type {kind!r}, which is not supported")


def _joined(parts: Iterator[Json]) -> list[Message]:
    """Return messages, of which one of the assistant's may have come as thoughts, text and calls apart."""
    messages: list[Message] = []
    for part in parts:
        last = messages[-1] if messages else {}
        if part["role"] == last.get("role") == "assistant" and not (part.get("content") and last.get("content")):
            calls = [*last.get("tool_calls", ()), *part.get("tool_calls", ())]
            last |= {key: value for key, value in part.items() if value}
            last |= {"tool_calls": calls} if calls else {}
        else:
            messages.append(part)
    return messages


def _of_blocks(message: Json, place: int) -> list[Json]:
    """Return a message of Anthropic's form as messages of the chat form: results of calls come first."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise Refused(400, "invalid_value", f"messages[{place}].content must be a text or a list of blocks")
    results, texts, calls, thoughts = [], [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            texts.append(block)  # of another kind than text: refused where it is read
    if not texts and not calls and not thoughts:
        return results
    said: Json = {"role": role, "content": texts}
    said |= {"tool_calls": calls} if calls else {}
    return [*results, said | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]


def _flat_tool(tool: Mapping[str, Any], schema: str) -> Json:
    """Return a tool whose name and schema stand beside its type."""
    if tool.get("type") not in (None, "function", "custom") or not tool.get("name"):
        raise Refused(
            400, "unsupported_value", f"tools holds {json.dumps(tool)[:80]}, which is not a function with a name"
        )
    shown = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(schema)}
    return tool_of({"type": "function", "function": shown})


def _usage_of_response(said: ModelAnswer) -> Json:
    sizes = {"input_tokens": len(said.prompt_ids), "output_tokens": len(said.ids)}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {**sizes, "total_tokens": sum(sizes.values()), **details}


def _stop_reason(said: ModelAnswer) -> str:
    return {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[said.finish_reason]
