"""The endpoint as OpenAI's own client sees it, and the tokens that are kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.gateway import visit
from toolgrpo.engines.base import SampleRequest
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, ScriptedTools, run_episode

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.contract

CALL = 'call add {"a": 1, "b": 2}'
TOOLS = ScriptedTools({"add": lambda a, b: str(a + b)})
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
QUESTION = {"role": "user", "content": "q"}


def client_of(url: str, key: str) -> Any:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def said(*texts: str) -> ScriptedEngine:
    return ScriptedEngine([ByteChat.say(text) for text in texts])


def ask(client: Any, messages: Sequence[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=list(messages), **more)


def answered(message: Any, *results: str) -> list[Any]:
    """Return a message with calls, and a result for each of them."""
    calls = zip(message.tool_calls, results, strict=True)
    return [message, *({"role": "tool", "tool_call_id": call.id, "content": result} for call, result in calls)]


def test_a_plain_answer_and_its_usage() -> None:
    def visitor(url: str, key: str) -> Any:
        return ask(client_of(url, key), [QUESTION])

    seen = visit(said("hello"), visitor)
    (choice,) = seen.returned.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("hello", "stop", None)
    assert seen.returned.usage.completion_tokens == len("hello|")
    assert seen.returned.usage.prompt_tokens == len(seen.trajectory.prompt_ids)


def test_an_agent_with_tools_gives_the_trajectory_of_our_own_loop() -> None:
    def visitor(url: str, key: str) -> None:
        client = client_of(url, key)
        first = ask(client, [QUESTION], tools=[ADD]).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        ask(client, [QUESTION, *answered(first.message, "3")], tools=[ADD])

    seen = visit(said(CALL, "3"), visitor).trajectory
    own = run_episode(said(CALL, "3"), TOOLS)
    assert seen.messages == own.messages
    assert (seen.prompt_ids, seen.ids, seen.mask, seen.logprobs) == (own.prompt_ids, own.ids, own.mask, own.logprobs)
    assert [call.result for call in seen.calls] == ["3"]
    assert [(turn.start, turn.end) for turn in seen.turns] == [(turn.start, turn.end) for turn in own.turns]


def test_a_stream_says_the_same_as_an_answer_in_one_piece() -> None:
    def visitor(url: str, key: str) -> tuple[Any, list[Any]]:
        client = client_of(url, key)
        with client.chat.completions.stream(model="policy", messages=[QUESTION], tools=[ADD]) as stream:
            whole = stream.get_final_completion()
        options = {"include_usage": True}
        chunks = list(ask(client, [QUESTION], tools=[ADD], stream=True, stream_options=options))
        return whole, chunks

    whole, chunks = visit(said(f"so\n{CALL}", f"so\n{CALL}"), visitor).returned
    assert whole.choices[0].message.content == "so"
    assert whole.choices[0].message.tool_calls[0].function.name == "add"
    assert chunks[-1].usage.completion_tokens == len(f"so\n{CALL}|")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"


def test_parallel_requests_of_one_episode_are_answered_each_by_its_own() -> None:
    def script(request: SampleRequest, number: int) -> Any:
        asked = ByteChat.text(request.ids)
        return ScriptedReply(ByteChat.say(asked[asked.index("user:") + 5]), delay_s=0.05)

    def visitor(url: str, key: str) -> list[str]:
        async def all_at_once() -> list[str]:
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                asked = [ask(client, [{"role": "user", "content": letter}]) for letter in "abcdef"]
                return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

        return asyncio.run(all_at_once())

    engine = ScriptedEngine(script)
    seen = visit(engine, visitor)
    assert seen.returned == list("abcdef")
    assert engine.most_open_requests == 6
    assert seen.trajectory.metadata["gateway"]["forks"] == {"history": 5}


def test_tokens_in_tokens_out() -> None:
    def visitor(url: str, key: str) -> Any:
        client = client_of(url, key)
        more = {"extra_body": {"return_token_ids": True}}
        first = client.completions.create(model="policy", prompt=[1, 2, 3], logprobs=0, **more).choices[0]
        ids = [1, 2, 3, *first.token_ids, 7, 8]
        return first, client.completions.create(model="policy", prompt=ids, **more).choices[0]

    seen = visit(said("hi", "ho"), visitor)
    first, second = seen.returned
    assert (first.text, first.token_ids) == ("hi", ByteChat.say("hi"))
    assert first.logprobs.token_logprobs == list(seen.trajectory.logprobs[:3])
    assert second.prompt_token_ids == [1, 2, 3, *ByteChat.say("hi"), 7, 8]
    assert seen.trajectory.ids == (*ByteChat.say("hi"), 7, 8, *ByteChat.say("ho"))
    assert seen.trajectory.mask == (1, 1, 1, 0, 0, 1, 1, 1)


def test_a_stop_text_ends_a_turn_where_it_is_complete() -> None:
    def visitor(url: str, key: str) -> Any:
        return ask(client_of(url, key), [QUESTION], stop=["Observation:"]).choices[0]

    seen = visit(said("a thought. Observation: made up"), visitor)
    assert (seen.returned.message.content, seen.returned.finish_reason) == ("a thought. ", "stop")
    assert ByteChat.text(seen.trajectory.ids) == "a thought. Observation:"


def test_models_are_listed_by_the_name_that_agents_ask_for() -> None:
    def visitor(url: str, key: str) -> Any:
        client = client_of(url, key)
        return [model.id for model in client.models.list()], client.models.retrieve("policy").id

    assert visit(said(), visitor).returned == (["policy"], "policy")
