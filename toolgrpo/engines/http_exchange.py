"""One HTTP request and its whole answer, bounded in bytes and in time.

Invariants: an answer is read up to a number of bytes and no further, and is not decompressed (none
is asked for, and one that comes compressed is refused); nothing is followed elsewhere; what keeps a
caller from an answer is a `NoAnswer`, what is wrong with one a `BadAnswer`. The deadline is the
caller's `asyncio.timeout` around `exchange`, so it holds for the headers and the body together,
however slowly they drip.

`in_background` is for callers that block: each gets an event loop of its own, also where one runs
already (a notebook).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import httpx

from toolgrpo.engines.checks import BadAnswer, Said, shown

__all__ = ["Answer", "NoAnswer", "decoded", "exchange", "in_background", "new_client", "without_waiting"]

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


def new_client(url: str, headers: Mapping[str, str], *, keepalive_s: float | None = None) -> httpx.AsyncClient:
    """Return a client for many requests at once; but for connecting, deadlines are the callers'."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_s)
    return httpx.AsyncClient(
        limits=limits,
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        headers={**_HEADERS, **headers},
        verify=_certificates() if url.startswith("https:") else False,  # reading them takes time
        follow_redirects=False,
    )


@lru_cache(maxsize=1)
def _certificates() -> Any:
    return httpx.create_ssl_context()


async def exchange(
    client: httpx.AsyncClient,
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

    async def trace(event: str, _: Any) -> None:
        if event == "connection.connect_tcp.complete":
            on_connect()

    try:
        async with client.stream(method, url, extensions={"trace": trace}, **options) as response:
            if 300 <= response.status_code < 400:
                to = shown(response.headers.get("location"))
                raise BadAnswer(
                    "its status", Said(f"{response.status_code}, a redirect to {to}"), "an answer of its own"
                )
            body = await _bounded_body(response, most_bytes)
            return Answer(response.status_code, body)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise NoAnswer(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


async def _bounded_body(response: httpx.Response, most_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise BadAnswer("its content-encoding", encoding, "none, since none was asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
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
