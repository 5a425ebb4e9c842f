"""Frames between the trainer, the supervisor and the workers: four bytes of length, then JSON.

JSON in both directions: nothing that comes from a process that ran user code is ever unpickled. What must be Python
objects on the way in (a row for an environment, a function given as a callable) travels as base64 of a pickle, from the
trainer to its children only.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["MAX_FRAME_BYTES", "FrameReader", "WireError", "pack", "pack_objects", "read_frame", "unpack_objects"]

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class WireError(Exception):
    """The other side sent something that is no frame: it can no longer be trusted."""


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        self._buffer += chunk
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame announced {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _decode(body)


def read_frame(sock: socket.socket) -> dict[str, Any] | None:
    """One message from a blocking socket; None at its end."""
    head = _read_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _read_exactly(sock, length)
    return None if body is None else _decode(body)


def pack_objects(value: object) -> str:
    """Python objects for a child. Never call `unpack_objects` on what a child sent."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpack_objects(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes is not JSON") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame holds a {type(message).__name__} where a message was expected")
    return message


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = sock.recv(min(count - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
