"""Messages in the shape that a family's template takes.

* For a template that knows no tools the schemas go into the system message, calls into the text of an assistant turn and
  results into a user message, in Hermes' words.
* For one that prints one call a message, a message with several calls becomes several, each before its own result.
* For one that knows no messages of the role `tool`, results go into the message of the calls they answer.
* For one that prints schemas or calls nowhere, but reads the family's own form of calls, they are written in that form.
* Arguments that are JSON text become objects, and the reasoning goes where the template looks for it. What is None, as
  `datasets` fills keys that a message lacks, is left out.
* Calls and results that lack an id get one: some templates look a result's call up by it, some refuse a call without.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from toolgrpo.episode.trajectory import Message

_PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")

# As the card of DeepSeek-V3.1 tells its users to.
_DEEPSEEK_TOOL = "### {name}\nDescription: {description}\n\nParameters: {parameters}"
_DEEPSEEK_PREAMBLE = (
    "## Tools\nYou have access to the following tools:\n\n{tools}\n\n"
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces"
)


def with_objects(messages: Sequence[Message], reasoning_key: str) -> list[Message]:
    """Arguments as objects, reasoning under the key that the template reads."""
    shaped: list[Message] = []
    for message in messages:
        message = {"content": "", **{key: value for key, value in message.items() if value is not None}}
        if message["role"] == "assistant":
            if reasoning_key != "reasoning_content" and "reasoning_content" in message:
                message[reasoning_key] = message.pop("reasoning_content")
            if message.get("tool_calls"):
                message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
            elif "tool_calls" in message:
                del message["tool_calls"]  # an empty list: many templates only ask whether the key is there
        shaped.append(message)
    return shaped


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # a row may quote a broken call: the template prints it, or refuses it
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the same with an id for every call and, where a call stands before it, for every result.

    A result without one answers the first call before it that has no answer and has its name; if there is none, the first
    that has no answer. Ids are nine letters and digits, as Mistral's templates demand.
    """
    told: list[Message] = []
    waiting: deque[Mapping[str, Any]] = deque()
    number = 0
    for message in messages:
        if message["role"] == "tool":
            message = dict(message)
            call = next((call for call in waiting if _answers(message, call)), waiting[0] if waiting else None)
            if call is not None and message.setdefault("tool_call_id", call["id"]) == call["id"]:
                waiting.remove(call)  # mostly the first
        elif message.get("tool_calls"):
            waiting.clear()
            for call in message["tool_calls"]:
                number += 1
                waiting.append(call if call.get("id") else {**call, "id": f"call{number:05d}"})
            message = {**message, "tool_calls": list(waiting)}
        told.append(message)
    return told


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the same with ids of nine letters and digits in place of others, such as OpenAI's `call_...`."""
    short: dict[str, str] = {}

    def renamed(one: Mapping[str, Any], key: str) -> dict[str, Any]:
        given = str(one[key])
        return {**one, key: given if _SHORT_ID.fullmatch(given) else short.setdefault(given, f"id{len(short):07d}")}

    told = []
    for message in messages:
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [renamed(call, "id") for call in message["tool_calls"]]}
        told.append(renamed(message, "tool_call_id") if "tool_call_id" in message else message)
    return told


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the same with the name of its call for every result that has none."""
    told: list[Message] = []
    names: dict[str, Any] = {}
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message, known in zip(messages, with_ids(given), strict=True):
        names |= {call["id"]: call.get("function", call).get("name") for call in known.get("tool_calls") or ()}
        name = message["role"] == "tool" and not message.get("name") and names.get(known.get("tool_call_id", ""))
        told.append({**message, "name": name} if name else message)
    return told


def _answers(result: Message, call: Mapping[str, Any]) -> bool:
    if result.get("tool_call_id") is not None:
        return bool(result["tool_call_id"] == call.get("id"))
    return bool(result.get("name") == call.get("function", call).get("name"))


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return a message with several calls as several messages, each followed by its result."""
    apart: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            apart.append(message)
            continue
        results: list[Message] = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            said = (
                {key: message[key] for key in message if key == "weight"} | {"content": ""} if number else dict(message)
            )
            apart.append({**said, "role": "assistant", "tool_calls": [call]})
            if results:
                own = next((result for result in results if _answers(result, call)), results[0])
                apart.append(results.pop(results.index(own)))
        apart += results
    return apart


def results_inside(messages: Sequence[Message]) -> list[Message]:
    """Return results as `tool_responses` of the message whose calls they answer, and the answer that follows them as its content."""
    inside: list[Message] = []
    for message in messages:
        last = inside[-1] if inside else {}
        if message["role"] == "tool" and last.get("tool_calls"):
            response = {"name": _name_of(message, last["tool_calls"]), "response": message["content"]}
            inside[-1] = {**last, "tool_responses": [*last.get("tool_responses", ()), response]}
        elif "tool_responses" in last and not last.get("content") and _is_answer(message):
            inside[-1] = {**last, "content": message["content"]}
        else:
            inside.append(message)
    return inside


def _name_of(result: Message, calls: Sequence[Mapping[str, Any]]) -> str:
    named = {call["id"]: call.get("function", call).get("name") for call in calls if "id" in call}
    return str(result.get("name") or named.get(result.get("tool_call_id"), "unknown"))


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant" and not message.get("tool_calls"))


def with_text(messages: Sequence[Message]) -> list[Message]:
    """Return the same with arguments as JSON text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def calls_in_text(messages: Sequence[Message]) -> list[Message]:
    """Return the same with calls at the end of a turn's text, as LFM2 writes them."""
    told = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [call.get("function", call) for call in message["tool_calls"]]
            listed = ", ".join(f"{call.get('name')}({_in_python(call.get('arguments'))})" for call in calls)
            content = f"{message.get('content') or ''}<|tool_call_start|>[{listed}]<|tool_call_end|>"
            message = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
        told.append(message)
    return told


def _in_python(arguments: Any) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) if isinstance(arguments, Mapping) else ""


def with_schemas(messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the same with the schemas behind the system message's text, in DeepSeek's words."""
    if not schemas:
        return list(messages)
    functions = [schema.get("function", schema) for schema in schemas]
    tools = "\n\n".join(
        _DEEPSEEK_TOOL.format(
            name=function["name"],
            description=function.get("description", ""),
            parameters=json.dumps(function.get("parameters", {}), ensure_ascii=False),
        )
        for function in functions
    )
    return _preceded(list(messages), _DEEPSEEK_PREAMBLE.format(tools=tools), system=True)


def tools_as_text(messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], *, system: bool) -> list[Message]:
    """Return the same conversation for a template that knows only (system,) user and assistant texts."""
    spelled: list[Message] = []
    responses: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            responses.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if responses:
            spelled.append({"role": "user", "content": "\n".join(responses)})
            responses = []
        content = message.get("content") or ""
        if message["role"] == "assistant":
            calls = [f"<tool_call>\n{_call_json(call)}\n</tool_call>" for call in message.get("tool_calls") or ()]
            content = "\n".join([content, *calls]).strip("\n")
        spelled.append({"role": message["role"], "content": content})
    if responses:
        spelled.append({"role": "user", "content": "\n".join(responses)})
    if schemas:
        listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return _preceded(spelled, _PREAMBLE.format(schemas=listed), system=system)
    return spelled if system or not spelled or spelled[0]["role"] != "system" else _preceded(spelled, "", system=False)


def _preceded(messages: list[Message], preamble: str, *, system: bool) -> list[Message]:
    """Return the preamble behind the system message's text, in a system message or, where there are none, a first user message."""
    own = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    text = "\n\n".join(part for part in (own, preamble) if part)
    if not system and rest and rest[0]["role"] == "user":
        text, rest = "\n\n".join(part for part in (text, rest[0]["content"]) if part), rest[1:]
    return [{"role": "system" if system else "user", "content": text}, *rest]


def _call_json(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    plain = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return json.dumps(plain, ensure_ascii=False)
