"""A client's first requests, made once before the processes of the episodes are forked.

OpenAI's package and what it stands on import much of themselves, and build their models, only when
a request is made, which each process that was forked before would do again. So some requests are made
here, over a real connection, to a server that gives the same answer to all.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_REQUESTS = 8  # Python makes code faster where it has run so often, and those pages stay shared
_WAIT_S = 10.0
_CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_MESSAGE = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [_CALL]}
_ANSWER = {
    "id": "0",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "tool_calls", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def make_first_requests(client_at: Callable[[str, str], Any], openai: Any) -> None:
    """Let a client of OpenAI's package, made of a URL and a key, talk to a server that is gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(_WAIT_S)
        answering = threading.Thread(target=_answer, args=(listening,), daemon=True)
        answering.start()
        try:
            client = client_at(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "-").with_options(timeout=_WAIT_S)
            if isinstance(client, openai.AsyncOpenAI):
                asyncio.run(_talk_async(client))
            else:
                _talk(client)
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # ends an `accept` that nobody came to
            answering.join(_WAIT_S)


async def _talk_async(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": ""}]
    async with client:
        for _ in range(_REQUESTS):
            said = await client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])
            _go_on(messages, said)


def _talk(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": ""}]
    with client:
        for _ in range(_REQUESTS):
            said = client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])
            _go_on(messages, said)


def _go_on(messages: list[Any], said: Any) -> None:
    message = said.choices[0].message
    messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": ""} for call in message.tool_calls)]


def _answer(listening: socket.socket) -> None:
    """Serve one connection until its client closes it."""
    body = json.dumps(_ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with suppress(OSError, ValueError):
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as asked:
            connection.settimeout(_WAIT_S)
            while line := asked.readline():
                length = 0
                while line.strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                    line = asked.readline()
                asked.read(length)
                connection.sendall(head.encode() + body)
