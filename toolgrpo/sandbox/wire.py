"""Frames between the processes: four bytes of length, then JSON.

Every reader gives the most it accepts: what comes from a sandboxed process is never trusted to be short or well formed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any

__all__ = ["hang_up", "pack", "read_frame", "receive", "send"]

_HEADER = struct.Struct("!I")


def pack(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(body)) + body


def send(channel: socket.socket, message: Any) -> None:
    channel.sendall(pack(message))


def receive(channel: socket.socket) -> Any:
    """The next message of a trusted peer; None when it is gone."""
    header = _exactly(channel.recv, _HEADER.size)
    body = None if header is None else _exactly(channel.recv, _HEADER.unpack(header)[0])
    return None if body is None else json.loads(body)


def hang_up(channel: socket.socket) -> None:
    """End a channel for the other side too, also where a process that we forked holds a copy of our end."""
    with suppress(OSError):  # the peer has gone
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


def read_frame(fd: int) -> Any:
    """The next message from a pipe; None when it is closed."""
    header = _exactly(lambda n: os.read(fd, n), _HEADER.size)
    body = None if header is None else _exactly(lambda n: os.read(fd, n), _HEADER.unpack(header)[0])
    return None if body is None else json.loads(body)


def _exactly(read: Any, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = read(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
