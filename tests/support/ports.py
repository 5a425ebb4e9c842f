"""A port for a server that another process is about to open.

Port 0 gives one of those that outgoing connections get as well: until the server is up, one of them may take it, even a
connection to the server itself. So the port is drawn from below that range (it starts at 32768 on Linux).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_PORTS = range(20_000, 32_768)
_TRIES = 100


def free_port() -> int:
    """Return a port that nobody on this machine listens at."""
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_TRIES} ports from {_PORTS.start} to {_PORTS.stop - 1} is free on this machine")


@contextmanager
def held_port() -> Iterator[int]:
    """Listen at a port, which nobody else can have meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])
