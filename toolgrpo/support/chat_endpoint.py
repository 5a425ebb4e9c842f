"""Ask an OpenAI-compatible chat endpoint: one request with its retries, its deadline, its key and its bounds.

The reward `judge` and `--engine chat_api` ask through it.

Invariants: a request ends by its deadline, with all its tries; a reply is bounded, and neither unpacked nor redirected, so
that the key goes to no other address. The key comes from an environment variable, and is in no message of this module.

What is tried again until the deadline: a lost connection, HTTP 408, 425, 429 and 5xx, not before their `Retry-After`; a
reply that cannot be used, within `_TRIES` tries.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import chain, repeat
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
_TRIES, _PAUSES_S, _LONGEST_PAUSE_S = 4, (0.5, 1.0, 2.0, 4.0), 8.0
_MOST_BYTES = 1 << 20  # of a reply
_BUSY = (408, 425, 429)
_NO_MONEY = b"insufficient_quota"  # which comes with 429, and no pause helps


class EndpointFailed(Exception):
    """The endpoint gave no reply that can be used. `status` is that of a request which it refused."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """One endpoint: its address, the variable with its key, and the seconds of a request with all tries."""

    url: str
    key_variable: str
    timeout_s: float

    def client(self) -> aiohttp.ClientSession:
        """Return the connections to it; whoever asks closes them."""
        key = self._key()
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        no_timeout = aiohttp.ClientTimeout(total=None)  # each request has its deadline
        return aiohttp.ClientSession(headers=headers, timeout=no_timeout, auto_decompress=False)

    @property
    def has_key(self) -> bool:
        return bool(self._key())

    async def ask(
        self, client: aiohttp.ClientSession, attempt: Callable[[], tuple[Mapping[str, Any], Callable[[bytes], T]]]
    ) -> T:
        """Return what is read of the reply; raise `EndpointFailed`.

        `attempt` gives the body of each try, with the function that reads its reply and raises ValueError for one that
        cannot be used.
        """
        why, unusable = "", 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s) as deadline:
                for pause_s in chain(_PAUSES_S, repeat(_LONGEST_PAUSE_S)):
                    body, read = attempt()
                    try:
                        status, reply, after_s = await self._post(client, body)
                        if status == 200:
                            return read(reply)
                        why = f"HTTP {status}, {_said(reply)}"
                        if (status < 500 and status not in _BUSY) or _NO_MONEY in reply:
                            raise EndpointFailed(self._shown(why), status)
                    except (aiohttp.ClientError, OSError) as error:
                        why, after_s = str(error) or type(error).__name__, 0.0
                    except ValueError as error:
                        why, after_s, unusable = str(error), 0.0, unusable + 1
                    pause_s = max(pause_s, after_s)
                    ends_s = deadline.when()
                    assert ends_s is not None
                    if unusable == _TRIES or asyncio.get_running_loop().time() + pause_s >= ends_s:
                        break
                    await asyncio.sleep(pause_s)
        raise EndpointFailed(self._shown(why or f"no answer within {self.timeout_s:g} s"))

    async def _post(self, client: aiohttp.ClientSession, body: Mapping[str, Any]) -> tuple[int, bytes, float]:
        reply = b""
        async with client.post(f"{self.url}/chat/completions", json=body, allow_redirects=False) as response:
            while len(reply) <= _MOST_BYTES and (read := await response.content.readany()):
                reply += read
        return response.status, reply[:_MOST_BYTES], _retry_after_s(response.headers.get("Retry-After", ""))

    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip()

    def _shown(self, why: str) -> str:
        """Return a reason on one line without the key, cut after it is gone."""
        key, line = self._key(), " ".join(why.split())
        return f"{line.replace(key, '***') if key else line:.300}"


def _said(reply: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the reply as it is."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        return str(json.loads(reply)["error"]["message"])
    return repr(reply)


def _retry_after_s(header: str) -> float:
    """Return the seconds that `Retry-After` asks for, as a number or as a date."""
    with suppress(ValueError, TypeError, OverflowError):
        if header.replace(".", "", 1).isdecimal():
            return float(header)
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    return 0.0
