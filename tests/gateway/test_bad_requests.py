"""What an endpoint answers to what it cannot answer: an error in OpenAI's form, and nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from process_tree import wait_for

from tests.support.gateway import visit
from tests.support.ports import held_port
from toolgrpo.commands.table import GatewayArguments
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.episode.dropped import DropCause
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.errors import ConfigError, EngineError
from toolgrpo.gateway.bounds import Bounds
from toolgrpo.gateway.openai_forms import ChatRequest, ModelAnswer, Refused, TextRequest, read_chat
from toolgrpo.gateway.server import _READERS, Endpoint, Speaker
from toolgrpo.gateway.session import GatewaySession
from toolgrpo.rollout import Episode
from toolgrpo.support.foreign_requests import is_foreign
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, scripted_runner

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
NO_CALLS = {"role": "assistant", "tool_calls": 5}
LONG = {"role": "user", "content": "x" * 5000}
TABLE: dict[str, tuple[Any, tuple[int, str], str]] = {
    "no model": (asked(model=""), (400, "invalid_value"), "model: String should have at least 1 character"),
    "an image": (asked(messages=[IMAGE]), (400, "unsupported_content"), "'image_url'; only text"),
    "no messages": (asked(messages=[]), (400, "invalid_value"), "messages: List should have at least 1"),
    "an unknown role": (asked(messages=[{"role": "critic"}]), (400, "invalid_value"), "got 'critic'"),
    "several answers": (asked(n=3), (400, "unsupported_value"), "ask 3 times"),
    "a promised form": (asked(response_format={"type": "json_object"}), (400, "unsupported_value"), "json_object"),
    "a tool without a name": (asked(tools=[{"type": "function"}]), (400, "invalid_value"), "a function with a name"),
    "no JSON": (b"{", (400, "invalid_value"), "not JSON"),
    "bytes of half a character": (b'{"model": "\xed\xa0\xbd"}', (400, "invalid_value"), "not JSON"),
    "calls that are no list": (
        asked(messages=[NO_CALLS]),
        (400, "invalid_value"),
        "messages[0].tool_calls must be a list",
    ),
    "fifty thousand brackets": (b"[" * 50_000, (400, "invalid_value"), "nested too deeply"),
    "a list": (b"[]", (400, "invalid_value"), "must be a JSON object, got a list"),
    "a window's worth": (
        asked(messages=[LONG]),
        (400, "context_length_exceeded"),
        "4096 tokens, and the prompt has 50",
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
    seen = visit(ScriptedEngine([]), lambda url, key: post(url, key, asked(messages=[LONG]))).trajectory
    assert seen.dropped is not None and seen.dropped.cause is DropCause.NO_ROOM
    assert seen.stop_reason is StopReason.CONTEXT_FULL


DEEP_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 70_000}}]}
MANY: dict[str, tuple[str, Any, tuple[int, str]]] = {
    "messages": ("chat/completions", asked(messages=[QUESTION] * 4097), (400, "messages holds 4097 items")),
    "items of an input": ("responses", {"model": "policy", "input": [QUESTION] * 4097}, (400, "input holds 4097")),
    "tools": ("messages", asked(max_tokens=1, tools=[{"name": "f"}] * 1025), (400, "tools holds 1025")),
    "stop texts": ("chat/completions", asked(stop=["x"] * 65), (400, "stop holds 65")),
    "biases": ("chat/completions", asked(logit_bias={str(n): 1 for n in range(4097)}), (400, "logit_bias holds")),
    "parts": ("chat/completions", asked(messages=[{**QUESTION, "content": [{}] * 70_000}]), (413, "commas")),
    "keys": ("chat/completions", asked(x={str(n): 1 for n in range(70_000)}), (413, "commas and brackets")),
    "lists in the arguments of a call": ("chat/completions", asked(messages=[DEEP_CALL]), (413, "commas and brackets")),
    "digits": ("chat/completions", b'{"n": 1' + b"0" * 100_000 + b"}", (400, "more than 300 digits")),
    "kinds of a prompt": ("completions", asked(prompt=[1, "x"] * 9000), (400, "list of token ids")),
}


@pytest.mark.parametrize("name", MANY)
def test_a_request_that_holds_too_many_things_is_refused(name: str) -> None:
    path, body, (status, sentence) = MANY[name]
    with pytest.raises(Refused) as raised:
        value = Bounds(4096).read(body if isinstance(body, bytes) else json.dumps(body).encode())
        _READERS[f"/v1/{path}"](value, "0")
    assert raised.value.status == status and sentence in str(raised.value)


@pytest.mark.parametrize(("window", "n_bytes"), [(16, 262_144), (32_768, 524_288), (1_000_000, 4_194_304)])
def test_a_body_may_be_several_times_as_long_as_a_prompt_that_fits(window: int, n_bytes: int) -> None:
    bounds = Bounds(window)
    bounds.check_bytes(n_bytes)
    with pytest.raises(Refused, match=rf"{window} tokens.*{n_bytes} bytes"):
        bounds.check_bytes(n_bytes + 1)
    ids = [7] * window
    assert bounds.read(json.dumps({"prompt": ids}).encode())["prompt"] == ids


CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
WHOLE: dict[str, dict[str, Any]] = {
    "/chat/completions": asked(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "1"},
        ],
        **{"tools": [ADD], "tool_choice": "auto", "max_tokens": 9, "stop": ["x"], "n": 1, "temperature": 1, "top_k": 5},
        **{"seed": 1, "logprobs": True, "stream": False, "stream_options": {"include_usage": True}},
        **{"chat_template_kwargs": {"enable_thinking": True}, "response_format": {"type": "text"}, "functions": None},
    ),
    "/completions": {"model": "policy", "prompt": "q", "max_tokens": 9, "stop": "x", "seed": 1, "logprobs": 1},
}
ODD: tuple[Any, ...] = (
    *(None, -1, 10**400, float("nan"), "half \ud83d", '{"a": ' + "[" * 50_000),
    *([], [10**9], {"\udc00": "\ud800"}, [{"role": [], "type": {}, "function": 5}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def odd_requests(whole: Any) -> Iterator[dict[str, Any]]:
    """Yield a request with each odd value in each place, and without each."""
    for path in places(whole):
        for value in (*ODD, KeyError):
            odd = holder = json.loads(json.dumps(whole))
            for key in path[:-1]:
                holder = holder[key]
            if value is KeyError:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield odd


@pytest.mark.parametrize("path", WHOLE)
def test_whatever_a_request_holds_is_answered_and_ends_no_episode(path: str) -> None:
    engine = ScriptedEngine(lambda request, number: ByteChat.say("fine"))
    shared, failures = scripted_runner(engine), list[BaseException | None]()

    async def answer(request: ChatRequest | TextRequest) -> ModelAnswer:
        session = GatewaySession(shared, Episode((QUESTION,)), obeys_sampling=True)  # one for each request
        try:
            return await session.answer(request)
        finally:
            if session.failure.done():
                failures.append(session.failure.exception())

    async def main() -> list[httpx.Response]:
        await engine.open()
        with closing(Endpoint(["policy"], engine.max_model_len)) as endpoint:
            endpoint.admit(answer, asyncio.get_running_loop(), "key")
            async with httpx.AsyncClient(
                trust_env=False, headers={"authorization": "Bearer key"}, timeout=30
            ) as client:
                bodies = [json.dumps(odd).encode() for odd in (WHOLE[path], *odd_requests(WHOLE[path]))]
                return [await client.post(endpoint.url + path, content=body) for body in bodies]

    answers = asyncio.run(main())
    assert answers[0].status_code == 200 and failures == []
    for one in answers:
        assert one.status_code == 200 or refused(one)[0] in (400, 404), one.text
    assert len(answers) / 9 < sum(one.status_code == 200 for one in answers) < len(answers)


def test_a_model_served_alone_draws_as_it_is_asked_or_says_that_it_cannot() -> None:
    async def drawn(alone: bool, **sampling: Any) -> SamplingOptions:
        engine = ScriptedEngine([ByteChat.say("fine")])
        await engine.open()
        session = GatewaySession(scripted_runner(engine), Episode((QUESTION,)), obeys_sampling=alone)
        await session.answer(read_chat(asked(**sampling), "1"))
        return engine.requests[0].options

    assert asyncio.run(drawn(True, repetition_penalty=1.5, presence_penalty=0.0)) == SamplingOptions(
        repetition_penalty=1.5
    )
    for name, value in {"presence_penalty": 1.0, "frequency_penalty": -1, "logit_bias": {"5": 100}}.items():
        assert asyncio.run(drawn(False, **{name: value})) == SamplingOptions(), "the run says how"
        with pytest.raises(Refused, match=f"{name} is not supported; leave it out"):
            asyncio.run(drawn(True, **{name: value}))
    for name, value in (("top_k", -5), ("top_k", 2**40), ("temperature", 3)):  # vLLM raises
        with pytest.raises(Refused, match=f"{name}: Input should be"):
            read_chat(asked(**{name: value}), "1")


@pytest.mark.parametrize(("path", "place"), [("/completions", "prompt"), ("/chat/completions", "messages")])
def test_half_a_character_of_an_agent_is_replaced(path: str, place: str) -> None:
    text = "caf\u00e9 \ud83d \ud83d\ude00 \\ud83d"
    given = {place: text if place == "prompt" else [{"role": "user", "content": text}]}
    engine = ScriptedEngine([ByteChat.say("fine")])
    seen = visit(engine, lambda url, key: post(url, key, {"model": "policy", **given}, path))
    assert seen.returned.status_code == 200 and len(seen.trajectory.turns) == 1
    assert "caf\u00e9 ? \U0001f600 \\ud83d" in ByteChat.text(engine.requests[0].ids)


PAGES = (  # Host and Origin, the interface, and whether a web page of elsewhere has sent it
    *(("127.0.0.1:8000", None, "127.0.0.1", False), ("localhost:8000", None, "127.0.0.1", False)),
    *(("[::1]:8000", None, "::1", False), ("localhost", "http://localhost:3000", "localhost", False)),
    *(("evil.example:8000", None, "127.0.0.1", True), ("127.0.0.1.evil.example", None, "127.0.0.1", True)),
    *((None, None, "127.0.0.1", True), ("", None, "::1", True), ("[::1", None, "127.0.0.1", True)),
    *(("127.0.0.1:8000", "https://evil.example", "127.0.0.1", True), ("127.0.0.1:1", "null", "127.0.0.1", True)),
    *(("evil.example", "http://evil.example", "127.0.0.1", True), ("localhost", "http://[", "127.0.0.1", True)),
    *(("trainer:8000", None, "0.0.0.0", False), ("trainer:8000", "http://trainer:8000", "0.0.0.0", False)),
    *(("trainer:8000", "http://evil.example", "0.0.0.0", True), ("10.0.0.7:8000", None, "10.0.0.7", False)),
)
ORIGINS = r"http://evil.example\@localhost http://localhost\.evil.example http://localhost/x http://a@localhost"
NO_ORIGINS = (*ORIGINS.split(), "localhost", "//localhost", "http://localhost http://evil.example")
OWN_HOSTS = ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000"]  # of a server on port 8000
LOCAL_PAGES = {*OWN_HOSTS, "127.0.0.1", "[::1]", "127.0.0.1:80"}
OTHER_HOSTS = """127.0.0.1 [::1] localhost: 127.0.0.1:80 localhost:08000 [::1].evil [::1].evil:8000 [::1]evil:8000
    [localhost]:8000 evil@127.0.0.1:8000 127.0.0.1:8000@evil 127.0.0.1:8000/ ::1:8000 evil.example evil.example:8000
    127.0.0.1:8000.evil 127.0.0.1.evil.example:8000 localhost.evil:8000 localhost:\u0668000"""
SPACED_HOSTS = ["", "127.0.0.1:8000\n", " localhost:8000", "localhost:8000, evil"]


def test_which_requests_are_those_of_foreign_pages() -> None:
    for host, origin, served_on, foreign in PAGES:
        assert is_foreign(host, origin, served_on=served_on) is foreign, (host, origin, served_on)
    for origin in NO_ORIGINS:  # an origin is a scheme and a host and nothing else
        assert is_foreign("localhost", origin), origin


def test_a_host_is_compared_exactly_with_its_port() -> None:
    for host in (*OWN_HOSTS, *OTHER_HOSTS.split(), *SPACED_HOSTS):
        assert is_foreign(host, None, port=8000) is (host not in OWN_HOSTS), host
        assert is_foreign("localhost:8000", f"http://{host}", port=8000) is (host not in LOCAL_PAGES), host


@pytest.mark.parametrize("header", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_a_web_page_is_not_answered_with_a_key_or_without(header: dict[str, str]) -> None:
    def visitor(url: str, key: str) -> list[httpx.Response]:
        known = {"authorization": f"Bearer {key}", **header}
        with httpx.Client(trust_env=False) as client:
            models = [client.get(f"{url}/models", headers=headers) for headers in (known, header)]
            models.append(client.get(f"{url.removesuffix('/v1')}/health", headers=header))
            return [*models, client.post(f"{url}/chat/completions", headers=known, json=asked())]

    for answer in visit(ScriptedEngine([]), visitor).returned:
        assert refused(answer)[:2] == (403, "foreign_page")


# requests that do not come to their end


def talk(url: str, *pieces: bytes) -> bytes:
    """Send pieces as far as they are taken, each after an answer if one is due; return what is said until the end."""
    said = b""
    with connected(url) as connection:
        with suppress(OSError):  # the other side has had enough
            for piece in pieces:
                connection.sendall(addressed(piece, url))
                while piece.startswith(b"GET") and piece.endswith(b"\r\n\r\n") and not said.endswith(b"}"):
                    said += connection.recv(65536)
        with suppress(ConnectionError):
            while chunk := connection.recv(65536):
                said += chunk
    return said


def head(*headers: str) -> bytes:
    return "\r\n".join(("POST /v1/chat/completions HTTP/1.1", "host: localhost", *headers, "")).encode()


def addressed(piece: bytes, url: str) -> bytes:
    return piece.replace(b"host: localhost\r", f"host: {urlsplit(url).netloc}\r".encode())


def whole(body: Any, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    return head(*headers, f"content-length: {len(content)}") + b"\r\n" + content


async def silent(request: ChatRequest | TextRequest) -> ModelAnswer:
    raise AssertionError("its loop does not run")


@contextmanager
def open_to_all(patience_s: float, *, speaker: Speaker = silent, connections: int | None = None) -> Iterator[str]:
    """Serve at an endpoint whose sessions never answer."""
    endpoint = Endpoint(["policy"], 4096, everyone=True, patience_s=patience_s, connections=connections)
    with closing(endpoint), closing(asyncio.new_event_loop()) as loop:
        endpoint.admit(speaker, loop, "")
        yield endpoint.url


@pytest.mark.parametrize("headers", [["host: [::1"], ["host: localhost", "host: evil.example"]])
def test_a_host_that_is_none_or_two_is_not_answered(headers: list[str]) -> None:
    lines = "\r\n".join(["GET /health HTTP/1.1", *headers, "connection: close", "", ""])
    with open_to_all(60) as url:
        assert talk(url, lines.encode()).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 "))


def test_health_needs_no_key_and_nothing_is_redirected() -> None:
    def visitor(url: str, _: str) -> list[httpx.Response]:
        with httpx.Client(trust_env=False) as client:
            paths = ("/health", "/health/", "/v1/models/", "/v1/chat/completions/", "//evil.example/health/")
            return [client.get(f"{url.removesuffix('/v1')}{path}") for path in paths]

    answers = visit(ScriptedEngine([]), visitor).returned
    assert (answers[0].status_code, answers[0].json()) == (200, {"status": "ok"})
    assert all(answer.status_code in (401, 404) and "location" not in answer.headers for answer in answers[1:])


def test_a_body_that_is_too_large_is_refused_in_the_form_of_its_path() -> None:
    with open_to_all(60) as url:
        answers = {path: post(url, "any", b" " * 2_000_000, path.removeprefix("/v1")) for path in _READERS}
    assert {answer.status_code for answer in answers.values()} == {413}
    assert answers.pop("/v1/messages").json()["error"]["type"] == "request_too_large"
    assert {refused(answer)[1] for answer in answers.values()} == {"context_length_exceeded"}


def test_a_body_is_counted_as_it_comes() -> None:
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with open_to_all(60) as url:
        said = talk(url, head("transfer-encoding: chunked") + b"\r\n", *([chunk] * 400), b"0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413 ") and b"larger than 262144 bytes" in said


UNENDED = {
    "nothing": ([], b""),
    "a part of a line": ([b"POST /v1"], b""),
    "a part of a head": ([head()], b""),
    "a part of a second head": ([b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /v1/mo"], b"HTTP/1.1 200 "),
    "a part of a body": ([head("content-length: 10") + b"\r\n{"], b"HTTP/1.1 408 "),
    "a part of a chunk": ([head("transfer-encoding: chunked") + b"\r\n5\r\n{"], b"HTTP/1.1 408 "),
}


def test_a_request_that_does_not_end_is_let_go() -> None:
    with open_to_all(1.0) as url, ThreadPoolExecutor(len(UNENDED)) as clients:
        said = {name: clients.submit(talk, url, *pieces) for name, (pieces, _) in UNENDED.items()}
        for name, (_, answer) in UNENDED.items():
            assert said[name].result().startswith(answer), name


def test_a_head_without_end_is_let_go() -> None:
    with open_to_all(60) as url:
        said = talk(url, b"GET /v1/models HTTP/1.1\r\n", *([b"x-more: " + b"x" * 0xFFFF + b"\r\n"] * 400))
    assert said == b"" or said.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("said", [b"", b"x", b"chunked"])
def test_a_request_that_trickles_is_let_go(said: bytes) -> None:
    begun = head("transfer-encoding: chunked") + (b"\r\n" if said == b"chunked" else b"x-more: ")
    with open_to_all(0.5) as url, connected(url) as connection:
        connection.settimeout(0.02)
        with suppress(ConnectionError):
            connection.sendall(addressed(begun, url) if said else b"")
            while True:
                connection.sendall(b"1\r\n \r\n" if said == b"chunked" else said)
                with suppress(TimeoutError):
                    if not connection.recv(65536):
                        break


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((str(address.hostname), address.port or 0), timeout=30)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_make_room_for_a_request() -> None:
    with open_to_all(60, connections=8) as url, ExitStack() as stack:
        kept = stack.enter_context(httpx.Client(trust_env=False))
        health = f"{url.removesuffix('/v1')}/health"
        assert kept.get(health).status_code == 200
        silent = [stack.enter_context(connected(url)) for _ in range(100)]
        for connection in silent[::2]:
            with suppress(ConnectionError):
                connection.sendall(head())
        assert kept.get(health).status_code == 200  # on the same connection, which has asked before
        assert httpx.get(health, trust_env=False).status_code == 200
        wait_for(lambda: sum(map(is_closed, silent)) >= 93)


def test_a_connection_too_many_is_told_so_and_ends_no_request_that_is_answered() -> None:
    taken = threading.Semaphore(0)

    def speaker(request: ChatRequest | TextRequest) -> Coroutine[Any, Any, ModelAnswer]:
        taken.release()
        return silent(request)

    with open_to_all(60, speaker=speaker, connections=2) as url, connected(url) as one, connected(url) as other:
        for connection in (one, other):
            connection.sendall(addressed(whole(asked()), url))
            assert taken.acquire(timeout=30)
        said = talk(url)
        assert said.startswith(b"HTTP/1.1 503 ") and b"2 requests are open" in said
        assert not is_closed(one) and not is_closed(other)


def test_an_empty_key_does_not_open_the_door() -> None:
    for key in ("", " ", "k ", "k\n", "schl\u00fcssel"):
        with pytest.raises(ConfigError, match="api_key must be"):
            GatewayArguments(api_key=key)
    refused_too = pytest.raises(ConfigError, match="empty key")
    with closing(Endpoint(["policy"], 1)) as endpoint, closing(asyncio.new_event_loop()) as loop, refused_too:
        endpoint.admit(silent, loop, "")
    assert gc.get_freeze_count() == 0


def test_an_unknown_key_opens_nothing() -> None:
    def visitor(url: str, _: str) -> list[httpx.Response]:
        guessed = [
            post(url, key, asked(), path) for path, key in (("/chat/completions", "sk-guessed"), ("/completions", "x"))
        ]
        return [*guessed, httpx.get(f"{url}/models", trust_env=False)]

    for answer in visit(ScriptedEngine([]), visitor).returned:
        assert refused(answer)[:2] == (401, "invalid_api_key")


def test_a_request_that_is_open_when_its_episode_ends_is_answered() -> None:
    engine = ScriptedEngine([ScriptedReply(ByteChat.say("never"), stalls=True)])
    with ThreadPoolExecutor(1) as client:

        def visitor(url: str, key: str) -> Future[httpx.Response]:
            answer = client.submit(post, url, key, asked())
            wait_for(lambda: engine.open_requests)
            return answer

        seen = visit(engine, visitor)
        assert refused(seen.returned.result())[:2] == (401, "episode_over")
    assert engine.open_requests == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_with_it(stream: bool) -> None:
    engine = ScriptedEngine([ScriptedReply(ByteChat.say("never"), stalls=True), ByteChat.say("fine")])

    def visitor(url: str, key: str) -> httpx.Response:
        with connected(url) as connection:
            connection.sendall(addressed(whole(asked(stream=stream), f"authorization: Bearer {key}"), url))
            wait_for(lambda: engine.open_requests)
        wait_for(lambda: engine.cancelled)
        assert (engine.cancelled, engine.open_requests) == (1, 0)
        return post(url, key, asked())

    seen = visit(engine, visitor)
    assert seen.returned.json()["choices"][0]["message"]["content"] == "fine"
    assert ByteChat.text(seen.trajectory.ids) == "fine|"  # nothing of the request that was left
    assert seen.trajectory.metadata["gateway"]["disconnected"] == 1


def test_an_engine_that_fails_is_a_server_error_and_ends_the_episode() -> None:
    seen = visit(ScriptedEngine([EngineError("out of order")]), lambda url, key: post(url, key, asked()))
    assert refused(seen.returned)[:2] == (503, "engine_failure")
    with pytest.raises(EngineError, match="out of order"):
        seen.session.failure.result()


def test_a_port_that_is_taken_is_said() -> None:
    with held_port() as port, pytest.raises(ConfigError, match="--port"):
        Endpoint(["policy"], 1, port=port)
