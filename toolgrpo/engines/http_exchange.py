"""One HTTP request and its whole answer, bounded in bytes and in time.

Invariants: an answer is read up to a number of bytes and no further, and is not decompressed (none
is asked for, and one that comes compressed is refused); nothing is followed elsewhere; what keeps a
caller from an answer is a `NoAnswer`, what is wrong with one a `BadAnswer`. The deadline is the
caller's `asyncio.timeout` around `exchange`, so it holds for the headers and the body together,
however slowly they drip.

With hundreds of requests in flight the client's own cost counts, for it runs on the training's cores: hence
aiohttp, and not a pool that looks through all its connections at every request
(`benchmarks/server_client.py`).

`in_background` is for callers that block: each gets an event loop of its own, also where one runs
already (a notebook).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp

from toolgrpo.engines.checks import BadAnswer, Said, shown

T = TypeVar("T")

_CONNECT_S = 10.0
_HEADERS = {"Accept-Encoding": "identity"}


class NoAnswer(Exception):
    """A connection that failed, or was lost before the answer had come whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: at most as many bytes as the caller allowed."""

    status: int
    body: bytes

    @property
    def excerpt(self) -> str:
        """Return its first characters, fit for a sentence."""
        return repr(self.body[:500].decode(errors="replace"))


def new_client(headers: Mapping[str, str], *, keepalive_s: float = 0.0) -> aiohttp.ClientSession:
    """Return a client for many requests at once; but for connecting, deadlines are the callers'.

    It knows no proxy and keeps no cookie. With `keepalive_s` a connection waits so long for its next request.
    """
    connections = aiohttp.TCPConnector(limit=0, force_close=not keepalive_s, keepalive_timeout=keepalive_s or None)
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_end.append(_connected)
    return aiohttp.ClientSession(
        connector=connections,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers={**_HEADERS, **headers},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[tracing],
    )


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    """Tell the request that a connection is made for."""
    context.trace_request_ctx()


async def exchange(
    client: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    most_bytes: int,
    on_connect: Callable[[], None] = lambda: None,
    **options: Any,
) -> Answer:
    """Send one request and read its answer; `NoAnswer` if none comes, `BadAnswer` if it is bad.

    `on_connect` is called if a new connection is made for it, before anything is sent.
    """
    try:
        async with client.request(
            method, url, allow_redirects=False, trace_request_ctx=on_connect, **options
        ) as response:
            if 300 <= response.status < 400:
                to = shown(response.headers.get("location"))
                raise BadAnswer("its status", Said(f"{response.status}, a redirect to {to}"), "an answer of its own")
            return Answer(response.status, await _bounded_body(response, most_bytes))
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(f"{type(error).__name__}: {_why(error)}".removesuffix(": ")) from error


def _why(error: Exception) -> str:
    """Return what happened, in one line."""
    if isinstance(error, aiohttp.ServerDisconnectedError):  # it has what was parsed so far as its message
        return "the connection was closed before an answer had come whole"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    what = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return " ".join(what.split()).removesuffix(" ^")


async def _bounded_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise BadAnswer("its content-encoding", encoding, "none, since none was asked for")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            raise BadAnswer("its body", Said(f"longer than {most_bytes:,} bytes"), "no more than that")
    return bytes(body)


def decoded(body: bytes) -> Any:
    """Return what a body says in JSON; `BadAnswer` if it is not JSON, too deep, or too big."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # broken UTF-8 and JSON are ValueErrors
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        text = body[:120].decode(errors="replace") + ("..." if len(body) > 120 else "")
        raise BadAnswer("its body", text, f"JSON ({what})") from error


def in_background(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end for a caller that blocks, in an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(asyncio.run(work()))
        except BaseException as error:  # carried over to the calling thread, which raises it
            failure.append(error)

    thread = threading.Thread(target=target, name="toolgrpo-http", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


async def without_waiting(function: Callable[..., T], *arguments: Any) -> T:
    """Call what blocks in a thread that nobody waits for: a cancelled caller leaves at once.

    (The threads of `asyncio.to_thread` are waited for when the event loop ends.)
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def target() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:  # carried over to the caller, which raises it
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # the loop has ended: nobody wants to know any more

    threading.Thread(target=target, name="toolgrpo-control", daemon=True).start()
    return await answer
