"""Watches one run in its confined process: feeds it, collects what comes out, ends it at a limit.

Invariant: what is kept of a run is bounded, however much it writes. Nothing that comes out of the
process is read as more than bytes here.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.processes.wire import pack
from toolgrpo.sandbox.host.run_process import Process
from toolgrpo.sandbox.host.scratch import holds_more_than

_FRAME_BYTES = 4 << 20  # of a result
_FLOOD_BYTES = 4 << 20  # of one output stream; more ends the run
_JOB = ("code", "expressions", "call", "suite", "came", "keep", "timeout_s")  # what the process is told
_CHECK_S = 0.1  # between looks at the CPU time used, the threads and the scratch folder
_MOST_THREADS = 256


@dataclass(slots=True)
class Outcome:
    """What came out of one run so far."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    results: bytearray = field(default_factory=bytearray)
    verdict: str | None = None  # set when a limit ends the run
    exited: bool = False  # the process ended by itself

    @property
    def gone(self) -> bool:
        """Whether the process has ended or has to."""
        return self.exited or self.verdict is not None

    def buffer(self, process: Process, fd: int) -> bytearray:
        if fd == process.results:
            return self.results
        return self.stdout if fd == process.stdout else self.stderr


def watch(process: Process, request: dict[str, Any], scratch: str, client: socket.socket) -> Outcome:
    """Hand one request to a live process and move bytes until the run is over.

    That is its result, its end, a limit, or the client's end.
    """
    job = {key: request[key] for key in _JOB if key in request}
    inputs = {process.requests: memoryview(pack(job))}
    if process.stdin >= 0:  # closed after a session's first run
        inputs[process.stdin] = memoryview(request["stdin"].encode(errors="replace"))
    outcome = Outcome()
    if process.stopped:
        process.go_on()
    poller = select.poll()
    for fd in (process.stdout, process.stderr, process.results, process.ended, client.fileno()):
        poller.register(fd, select.POLLIN)
    for fd in list(inputs):  # what fits into the pipes goes now
        poller.register(fd, select.POLLOUT)
        _feed(process, poller, inputs, fd)
    _move(process, poller, inputs, outcome, request, scratch, client.fileno())
    return outcome


def drain(process: Process, outcome: Outcome) -> None:
    """Collect what is left in the pipes of a process that runs no more."""
    for fd in (process.stdout, process.stderr, process.results):
        held = outcome.buffer(process, fd)
        while outcome.verdict != "output":
            before = len(held)
            if not _collect(process, outcome, fd) or len(held) == before:
                break


def answer(process: Process, outcome: Outcome, request: dict[str, Any]) -> dict[str, Any]:
    """Return the run in the words of the client.

    The frame is passed on unread, as the stranger's text it is.
    """
    drain(process, outcome)
    code = process.reap() if outcome.exited else None
    if code == -signal.SIGXCPU:
        outcome.verdict = "timeout"
    size = int.from_bytes(outcome.results[:4], "big")
    frame = bytes(outcome.results[4 : 4 + size]) if _complete(outcome.results) else b""
    return {
        "verdict": outcome.verdict,
        "code": code,
        "frame": frame.decode("latin-1"),
        "stdout": _shown(outcome.stdout, request["output_chars"]),
        "stderr": _shown(outcome.stderr, request["output_chars"]),
        "state_lost": request["keep"] and outcome.gone,
    }


def _move(
    process: Process,
    poller: select.poll,
    inputs: dict[int, memoryview],
    outcome: Outcome,
    request: dict[str, Any],
    scratch: str,
    client: int,
) -> None:
    now = time.monotonic()
    deadline, next_check = now + request["timeout_s"], now + _CHECK_S
    cpu_deadline_s = process.cpu_seconds() + request["timeout_s"]
    while outcome.verdict is None:
        now = time.monotonic()
        if now >= deadline:
            outcome.verdict = "timeout"
            return
        if now >= next_check:
            next_check = now + _CHECK_S
            outcome.verdict = _passed_limit(process, outcome, request, scratch, cpu_deadline_s)
            if outcome.verdict is not None:
                return
        for fd, event in poller.poll(max(1.0, 1000 * (min(deadline, next_check) - now))):
            if fd == process.ended:
                outcome.exited = True
                return
            if fd == client:
                outcome.verdict = "abandoned"
                return
            if fd in inputs:
                _feed(process, poller, inputs, fd)
            elif not _collect(process, outcome, fd) or event == select.POLLHUP:
                poller.unregister(fd)
        if _complete(outcome.results):
            return


def _passed_limit(
    process: Process, outcome: Outcome, request: dict[str, Any], scratch: str, cpu_deadline_s: float
) -> str | None:
    """Return the verdict on a run that uses too much of what no limit of the kernel bounds."""
    if process.cpu_seconds() > cpu_deadline_s:
        return "timeout"
    if process.threads() > _MOST_THREADS:
        outcome.stderr += b"\n[ended: more than %d threads at a time]\n" % _MOST_THREADS
        return "memory"
    without_name = process.unlinked_bytes(request["file_mb"] << 20)
    if holds_more_than(scratch, (request["scratch_mb"] << 20) - without_name):
        return "disk"
    return None


def _feed(process: Process, poller: select.poll, inputs: dict[int, memoryview], fd: int) -> None:
    try:
        inputs[fd] = inputs[fd][os.write(fd, inputs[fd]) :] if inputs[fd] else inputs[fd]
    except BlockingIOError:
        return
    except BrokenPipeError:
        inputs[fd] = inputs[fd][:0]
    if not inputs[fd]:
        poller.unregister(fd)
        del inputs[fd]
        if fd == process.stdin:
            process.close_stdin()


def _collect(process: Process, outcome: Outcome, fd: int) -> bool:
    """Read what is there; False when nothing can come any more."""
    try:
        part = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    held = outcome.buffer(process, fd)
    held += part
    if len(held) > (_FRAME_BYTES if fd == process.results else _FLOOD_BYTES):
        outcome.verdict = "output"
    return bool(part)


def _complete(frame: bytearray) -> bool:
    return len(frame) >= 4 and len(frame) >= 4 + int.from_bytes(frame[:4], "big")


def _shown(raw: bytearray, most: int) -> str:
    text = raw.decode("utf-8", "replace")
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[output cut: {len(text) - most} more characters]"
