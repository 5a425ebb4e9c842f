"""What an endpoint answers to what it cannot answer: an error in OpenAI's form, and nothing hangs."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.gateway import visit
from toolgrpo.drops import DropCause
from toolgrpo.errors import EngineError
from toolgrpo.gateway.server import Endpoint
from toolgrpo.gateway.session import Session
from toolgrpo.rollout import Episode
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, scripted_runner
from toolgrpo.trajectory import StopReason

QUESTION = {"role": "user", "content": "q"}


def post(url: str, key: str, body: Any, path: str = "/chat/completions") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url + path, content=content, headers=headers, timeout=30, trust_env=False)


def refused(answer: httpx.Response) -> tuple[int, str, str]:
    """Return the status, the code and the sentence of an error in OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["message"]


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [QUESTION], **changes}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
TABLE: dict[str, tuple[Any, tuple[int, str], str]] = {
    "another model": (asked(model="gpt-4o"), (404, "model_not_found"), "'gpt-4o' is not served here; ask for 'policy'"),
    "an image": (asked(messages=[IMAGE]), (400, "unsupported_content"), "'image_url'; only text"),
    "no messages": (asked(messages=[]), (400, "invalid_value"), "messages: List should have at least 1"),
    "an unknown role": (asked(messages=[{"role": "critic"}]), (400, "invalid_value"), "got 'critic'"),
    "several answers": (asked(n=3), (400, "unsupported_value"), "ask 3 times"),
    "a promised form": (asked(response_format={"type": "json_object"}), (400, "unsupported_value"), "json_object"),
    "a tool without a name": (asked(tools=[{"type": "function"}]), (400, "invalid_value"), "no function with a name"),
    "no JSON": (b"{", (400, "invalid_value"), "no JSON"),
    "a list": (b"[]", (400, "invalid_value"), "must be a JSON object, got a list"),
    "a window's worth": (
        asked(messages=[{"role": "user", "content": "x" * 5000}]),
        (400, "context_length_exceeded"),
        "context window is 4096 tokens, and the prompt has 50",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_request_that_cannot_be_answered_is_refused_in_a_sentence(name: str) -> None:
    body, expected, sentence = TABLE[name]
    engine = ScriptedEngine([ByteChat.say("fine")])

    def visitor(url: str, key: str) -> tuple[httpx.Response, httpx.Response]:
        return post(url, key, body), post(url, key, asked())

    seen = visit(engine, visitor)
    status, code, message = refused(seen.returned[0])
    assert (status, code) == expected and sentence in message
    assert seen.returned[1].json()["choices"][0]["message"]["content"] == "fine"  # and the episode goes on
    assert len(seen.trajectory.turns) == 1


def test_an_episode_whose_first_prompt_does_not_fit_is_dropped_for_that() -> None:
    seen = visit(ScriptedEngine([]), lambda url, key: post(url, key, TABLE["a window's worth"][0]))
    assert seen.trajectory.dropped is not None and seen.trajectory.dropped.cause is DropCause.NO_ROOM
    assert seen.trajectory.stop_reason is StopReason.CONTEXT_FULL


@pytest.mark.parametrize(("path", "key"), [("/chat/completions", "sk-guessed"), ("/models", ""), ("/completions", "x")])
def test_an_unknown_key_opens_nothing(path: str, key: str) -> None:
    def visitor(url: str, _: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        method = "GET" if path == "/models" else "POST"
        return httpx.request(method, url + path, headers=headers, json=asked(), trust_env=False)

    status, code, _ = refused(visit(ScriptedEngine([]), visitor).returned)
    assert (status, code) == (401, "invalid_api_key")


def test_what_is_not_served_is_named() -> None:
    seen = visit(ScriptedEngine([]), lambda url, key: post(url, key, {}, "/embeddings"))
    status, code, message = refused(seen.returned)
    assert (status, code) == (404, "not_found") and "/v1/chat/completions" in message


def in_a_session(engine: ScriptedEngine, act: Callable[[Endpoint, Session, str], Any]) -> Session:
    """Let `act` use an endpoint with one session, on the session's own loop."""

    async def main() -> Session:
        await engine.open()
        session = Session(scripted_runner(engine), Episode((QUESTION,)))
        endpoint = Endpoint(["policy"], engine.max_model_len)
        try:
            await act(endpoint, session, endpoint.admit(session, asyncio.get_running_loop()))
            return session
        finally:
            endpoint.close()
            await engine.close()

    return asyncio.run(main())


def test_a_key_is_good_for_nothing_after_its_episode() -> None:
    async def act(endpoint: Endpoint, session: Session, key: str) -> None:
        endpoint.dismiss(key)
        await session.end()
        answer = await asyncio.to_thread(post, endpoint.url, key, asked())
        assert refused(answer)[:2] == (401, "episode_over")

    in_a_session(ScriptedEngine([]), act)


def test_a_request_that_is_open_when_its_episode_ends_is_answered() -> None:
    engine = ScriptedEngine([ScriptedReply(ByteChat.say("never"), stalls=True)])

    async def act(endpoint: Endpoint, session: Session, key: str) -> None:
        answer = asyncio.create_task(asyncio.to_thread(post, endpoint.url, key, asked()))
        while not engine.open_requests:
            await asyncio.sleep(0.01)
        endpoint.dismiss(key)
        await session.end()
        assert refused(await answer)[:2] == (401, "episode_over")
        assert engine.open_requests == 0

    in_a_session(engine, act)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_with_it(stream: bool) -> None:
    engine = ScriptedEngine([ScriptedReply(ByteChat.say("never"), stalls=True), ByteChat.say("fine")])

    async def act(endpoint: Endpoint, session: Session, key: str) -> None:
        leaving = asyncio.to_thread(leave, endpoint.url, key, asked(stream=stream), lambda: engine.open_requests == 1)
        await leaving
        for _ in range(500):
            if engine.cancelled:
                break
            await asyncio.sleep(0.01)
        assert (engine.cancelled, engine.open_requests, session.disconnected) == (1, 0, 1)
        answer = await asyncio.to_thread(post, endpoint.url, key, asked())
        assert answer.json()["choices"][0]["message"]["content"] == "fine"
        await session.end()
        done = session.trajectory(StopReason.FINISHED)
        assert ByteChat.text(done.ids) == "fine|"  # nothing of the request that was left
        assert done.metadata["gateway"]["disconnected"] == 1

    in_a_session(engine, act)


def leave(url: str, key: str, body: Any, when: Callable[[], bool]) -> None:
    """Send a request by hand, and hang up as soon as `when` says so."""
    address = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        until = time.monotonic() + 30
        while not when() and time.monotonic() < until:
            time.sleep(0.01)


def test_an_engine_that_fails_is_a_server_error_and_ends_the_episode() -> None:
    async def act(endpoint: Endpoint, session: Session, key: str) -> None:
        answer = await asyncio.to_thread(post, endpoint.url, key, asked())
        assert refused(answer)[:2] == (503, "engine_failure")
        with pytest.raises(EngineError, match="out of order"):
            session.failure.result()
        await session.end()

    in_a_session(ScriptedEngine([EngineError("out of order")]), act)


def test_a_port_that_is_taken_is_said() -> None:
    from toolgrpo.errors import ConfigError

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            Endpoint(["policy"], 1, port=taken.getsockname()[1])
