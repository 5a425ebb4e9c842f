"""The endpoint as OpenAI's own client sees it; an agent with tools: test_other_forms.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.gateway import visit
from toolgrpo.engines.base import SampleRequest
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.contract

QUESTION = {"role": "user", "content": "q"}


def client_of(url: str, key: str) -> Any:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def said(*texts: str) -> ScriptedEngine:
    return ScriptedEngine([ByteChat.say(text) for text in texts])


def ask(client: Any, messages: Sequence[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=list(messages), **more)


def test_a_plain_answer_its_usage_and_the_name_of_its_model() -> None:
    def visitor(url: str, key: str) -> Any:
        client = client_of(url, key)
        assert [model.id for model in client.models.list()] == ["policy"]
        assert client.models.retrieve("policy").id == "policy"
        with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not served here; 'policy' is"):
            client.models.retrieve("gpt-4o")
        streamed = ask(client, [QUESTION], stream=True, stream_options={"include_usage": True})
        return ask(client, [QUESTION]), [chunk.usage for chunk in streamed]

    seen = visit(said("hello", "hello"), visitor)
    whole, usages = seen.returned
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("hello", "stop", None)
    for usage in (whole.usage, usages[-1]):
        assert usage.completion_tokens == len("hello|")
        assert usage.prompt_tokens == len(seen.trajectory.prompt_ids)


def test_any_model_is_the_policy_and_another_name_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def visitor(url: str, key: str) -> list[Any]:
        create = client_of(url, key).chat.completions.create
        return [create(model=name, messages=[QUESTION]) for name in ("gpt-4o", "policy", "gpt-4o")]

    seen = visit(said("a", "b", "c"), visitor)
    assert [(one.model, one.choices[0].message.content) for one in seen.returned] == [
        *(("gpt-4o", "a"), ("policy", "b"), ("gpt-4o", "c"))
    ]
    assert [text for text in caplog.messages if "'gpt-4o', and 'policy' answers it" in text] == caplog.messages[:1]


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
