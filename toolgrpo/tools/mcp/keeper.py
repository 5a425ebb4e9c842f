"""The process above an MCP server: it hands on what the server says, and nothing outlives it.

The server and all that it starts end with it, and with the trainer, however these end: a reaper
(`confined_python.processes.linux`) sees to that. Messages come one a line. One that is too long or too deep for
the SDK to read becomes an error of the call that it answers; what is no message goes to stderr, and
so into the log. The standard library only: it must be there in some milliseconds.

Not covered off Linux: what left the process group, and a trainer that was killed (a sound server
ends with its stdin).
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress

from confined_python.processes.linux import die_with_parent, fork_under_reaper, watch_process

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_CHUNK = 1 << 16
_ENDS = 256  # what is kept of either end of a message that is too long: the id of the call stands in one of them
_MAX_DEPTH = 150  # the SDK reads no more than 200 levels
_ID_FIRST = re.compile(rb'\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


def main(trainer: int, command: Sequence[str]) -> None:
    """Run the server until it ends, its output does, or the reaper above is told to end; never return."""
    owner = watch_process(trainer)
    if os.getppid() != trainer:  # it ended before it could be watched
        os._exit(1)
    fork_under_reaper(owner)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it went to the whole group, and is for the server
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127)
    with suppress(OSError):  # the trainer is gone
        _hand_on(server)
    server.kill()
    os._exit(server.wait() & 0xFF)


def _hand_on(server: subprocess.Popen[bytes]) -> None:
    """Hand on all that the server has said when it, or its output, ends."""
    assert server.stdout is not None
    output, ended = server.stdout.fileno(), watch_process(server.pid)
    poller = select.poll()
    for descriptor in (output, ended):
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    lines = _Lines()
    while output in (ready := dict(poller.poll())) or ended not in ready:
        if not (chunk := os.read(output, _CHUNK)):
            return
        for line, n_bytes in lines.fed(chunk):
            _write(*_readable(line, n_bytes))


class _Lines:
    """Lines from chunks, each without its middle if it is too long, and with its length."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._dropped = 0

    def fed(self, chunk: bytes) -> Iterator[tuple[bytes, int]]:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._grow(end)
            yield bytes(self._line), len(self._line) + self._dropped
            self._line, self._dropped = bytearray(), 0
        self._grow(rest)

    def _grow(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > MAX_MESSAGE_BYTES:
            self._dropped += len(self._line) - 2 * _ENDS
            self._line[_ENDS:-_ENDS] = b""


def _readable(line: bytes, n_bytes: int) -> tuple[int, bytes]:
    """Return what to write of a line, and to which descriptor."""
    if n_bytes > len(line):
        problem = f"the server answered with {n_bytes:,} bytes; at most {MAX_MESSAGE_BYTES:,} are read"
    else:
        try:
            message = json.loads(line.decode())
            if b"\\u" in line:
                json.dumps(message, ensure_ascii=False).encode()  # half a character is an error too
            _check_depth(message)
            return (1 if isinstance(message, dict) else 2), line
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            problem = f"the server's answer cannot be read: {why}"
    answered = _ID_FIRST.match(line) or _ID_LAST.search(line[-_ENDS:])
    if answered is None:
        return 2, line
    error_data = {"code": -32700, "message": problem}
    return 1, json.dumps({"jsonrpc": "2.0", "id": int(answered[1]), "error": error_data}).encode()


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [member for members in nested for member in members]
    if level:
        raise RecursionError


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(descriptor, left) :]
