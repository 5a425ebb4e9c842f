"""Send frames between processes: four bytes of length, then JSON. Standard library only.

JSON in both directions: nothing that comes from a process that ran somebody's code is ever
unpickled. What must be Python objects on the way in (a row for an environment, a function given as
a callable) travels as base64 of a pickle, from a trusted parent to its children only.

Invariants: a frame is bounded in both directions; `FrameReader`, which reads what such a process
sends, gives objects only and says `WireError` for anything else.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")
_CHUNK_BYTES = 1 << 20


class WireError(Exception):
    """The other side sent something that is no frame: it can no longer be trusted."""


def pack(message: Any) -> bytes:
    """Return a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(_bounded(len(body))) + body


def send(channel: socket.socket, message: Any) -> None:
    """Send a message over a blocking socket."""
    channel.sendall(pack(message))


def receive(channel: socket.socket) -> Any:
    """Return the next message of a trusted peer; None when it is gone."""
    return _next(channel.recv)


def read_frame(fd: int) -> Any:
    """Return the next message from a pipe of a trusted peer; None when it is closed."""
    return _next(lambda n_bytes: os.read(fd, n_bytes))


def hang_up(channel: socket.socket) -> None:
    """End a channel for the other side too.

    Also where a process that we forked holds a copy of our end.
    """
    with suppress(OSError):  # the peer has gone
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


class FrameReader:
    """Bytes in, messages out: for what a process that is not trusted sends, as it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Take bytes; give the messages that are whole by now."""
        self._buffer += chunk
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _bounded(_LENGTH.unpack_from(self._buffer)[0])
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _object(body)


def pack_objects(value: object) -> str:
    """Return Python objects for a child. Never call `unpack_objects` on what a child sent."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpack_objects(text: str) -> Any:
    """Return the objects that a trusted parent packed."""
    return pickle.loads(base64.b64decode(text))


def _bounded(n_bytes: int) -> int:
    if n_bytes > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {n_bytes} bytes is over the limit of {MAX_FRAME_BYTES}")
    return n_bytes


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes is not JSON") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame holds a {type(message).__name__} where a message was expected")
    return message


def _next(read: Callable[[int], bytes]) -> Any:
    head = _exactly(read, _LENGTH.size)
    body = None if head is None else _exactly(read, _bounded(_LENGTH.unpack(head)[0]))
    return None if body is None else json.loads(body)


def _exactly(read: Callable[[int], bytes], n_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < n_bytes:
        part = read(min(n_bytes - len(parts), _CHUNK_BYTES))
        if not part:
            return None
        parts += part
    return bytes(parts)
