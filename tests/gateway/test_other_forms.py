"""OpenAI's two APIs and Anthropic's Messages API, as their own clients see them, over the turns of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.test_openai_sdk import client_of, said
from tests.support.gateway import visit
from toolgrpo.testing import ByteChat, ScriptedTools, run_episode

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.contract

CALL = 'call add {"a": 1, "b": 2}'
TOOLS = ScriptedTools({"add": lambda a, b: str(a + b)})
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
ADD_OF_CHAT = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ADD_OF_ANTHROPIC = {"name": "add", "input_schema": SCHEMA}


def of_anthropic(url: str, key: str) -> Any:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0, timeout=30)


def responds(client: Any, items: Any, *, stream: bool, **more: Any) -> Any:
    asked = {"model": "policy", "input": items, "tools": [ADD], **more}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        return events.get_final_response()


def answers(client: Any, messages: Any, *, stream: bool, **more: Any) -> Any:
    asked = {"model": "policy", "max_tokens": 100, "messages": messages, "tools": [ADD_OF_ANTHROPIC], **more}
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


def an_agent_of_chat(url: str, key: str, *, stream: bool) -> str:
    client = client_of(url, key)
    messages: list[Any] = [{"role": "user", "content": "q"}]

    def asked() -> Any:
        more: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [ADD_OF_CHAT]}
        if not stream:
            return client.chat.completions.create(**more).choices[0]
        with client.chat.completions.stream(**more) as events:
            return events.get_final_completion().choices[0]

    first = asked()
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert first.finish_reason == "tool_calls"
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    return str(asked().message.content)


def an_agent_of_responses(url: str, key: str, *, stream: bool) -> str:
    client, items = client_of(url, key), [{"role": "user", "content": "q"}]
    first = responds(client, items, stream=stream)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments), first.status) == ("add", {"a": 1, "b": 2}, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items += [item.model_dump(exclude_none=True) for item in first.output]
    return str(responds(client, [*items, result], stream=stream).output_text)


def an_agent_of_messages(url: str, key: str, *, stream: bool) -> str:
    client = of_anthropic(url, key)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    first = answers(client, messages, stream=stream)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input, first.stop_reason) == ("add", {"a": 1, "b": 2}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = answers(client, messages, stream=stream)
    assert last.stop_reason == "end_turn" and last.usage.output_tokens == len("3|")
    return str(last.content[0].text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [an_agent_of_chat, an_agent_of_responses, an_agent_of_messages])
@pytest.mark.parametrize("first", [CALL, f"so\n{CALL}"])
def test_an_agent_gives_the_trajectory_of_our_own_loop(agent: Callable[..., str], first: str, stream: bool) -> None:
    seen = visit(said(first, "3"), lambda url, key: agent(url, key, stream=stream))
    own = run_episode(said(first, "3"), TOOLS)
    assert seen.returned == "3"
    one = seen.trajectory
    assert (one.prompt_ids, one.ids, one.mask, one.logprobs) == (own.prompt_ids, own.ids, own.mask, own.logprobs)
    assert [(turn.start, turn.end) for turn in one.turns] == [(turn.start, turn.end) for turn in own.turns]
    assert one.messages == own.messages and [call.result for call in one.calls] == ["3"]
    assert one.metadata["gateway"]["forks"] == {}


def test_instructions_and_system_are_the_system_message() -> None:
    def visitor(url: str, key: str) -> None:
        responds(client_of(url, key), "q", stream=False, instructions="Be short.")
        system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
        answers(of_anthropic(url, key), [{"role": "user", "content": "q"}], stream=False, system=system)

    seen = visit(said("a", "b"), visitor).trajectory
    prompts = [seen.prompt_ids, *(segment.prompt_ids for segment in seen.segments[1:])]
    assert len(prompts) == 2 and prompts[0] == prompts[1] and "Be short." in ByteChat.text(prompts[0])


def test_a_cut_answer_says_so_in_each_form() -> None:
    def visitor(url: str, key: str) -> tuple[Any, Any]:
        one = responds(client_of(url, key), "q", stream=False, max_output_tokens=2)
        messages = [{"role": "user", "content": "other"}]
        return one, answers(of_anthropic(url, key), messages, stream=True, max_tokens=2)

    one, other = visit(said("hello", "hello"), visitor).returned
    assert (one.status, one.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (other.stop_reason, other.content[0].text) == ("max_tokens", "he")


def test_what_cannot_be_done_is_refused_in_the_form_of_the_client() -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    of_responses: list[tuple[str, Any, dict[str, Any]]] = [
        ("send the whole input", "q", {"previous_response_id": "resp_1"}),
        ("text.format 'json_object'", "q", {"text": {"format": {"type": "json_object"}}}),
        ("computer_call", [{"type": "computer_call"}], {}),
        ("web_search", "q", {"tools": [{"type": "web_search"}]}),
    ]

    def visitor(url: str, key: str) -> None:
        for part, items, more in of_responses:
            with pytest.raises(openai.BadRequestError, match=part):
                responds(client_of(url, key), items, stream=False, **more)
        for part, content in (("'image'", [picture]), ("a text or a list", 5)):
            with pytest.raises(anthropic.BadRequestError, match=part):
                answers(of_anthropic(url, key), [{"role": "user", "content": content}], stream=False)
        with pytest.raises(anthropic.AuthenticationError, match="this key is not known"):
            answers(of_anthropic(url, "sk-wrong"), [{"role": "user", "content": "q"}], stream=False)

    visit(said(), visitor)
