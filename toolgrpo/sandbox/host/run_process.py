"""A process that runs code, as its worker holds it: on any POSIX system, however it was started.

Invariant: `ended` can be read as soon as the process has ended, and not before; nothing that its
code does to its own descriptors changes that.
"""

from __future__ import annotations

import os
import select
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolgrpo.sandbox.host import usage


@dataclass(slots=True)
class Process(ABC):
    """A process and our ends of its pipes; `pid` is -1 once it was waited for.

    `proc`: /proc, opened, where the process can be looked at there and `ended` is its pidfd.
    """

    pid: int
    ended: int
    stdin: int
    stdout: int
    stderr: int
    requests: int
    results: int
    stopped: bool = field(default=False, init=False)
    proc: int | None = field(default=None, init=False)

    @abstractmethod
    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads so far; 0.0 where the process limits its own."""

    @abstractmethod
    def reap(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""

    def threads(self) -> int:
        """Return how many threads it has; 0 where that cannot be told."""
        return 0 if self.proc is None else usage.threads(self.proc, self.ended)

    def unlinked_bytes(self, most_each: int) -> int:
        """Return the size of its files that have no name any more; 0 where that cannot be told."""
        return 0 if self.proc is None else usage.unlinked_bytes(self.proc, self.ended, most_each)

    def is_dead(self) -> bool:
        return bool(select.select([self.ended], [], [], 0)[0])

    def stop(self) -> None:
        """Let it rest, its threads too, until `go_on`."""
        self._signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.stopped = False

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(self.pid, number)

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def release(self) -> None:
        """Wait for the end of a killed process and close what we hold of it."""
        if self.pid > 0:
            self.reap()
        self.close_stdin()
        for fd in (self.ended, self.stdout, self.stderr, self.requests, self.results):
            os.close(fd)


class Launcher(Protocol):
    """Starts and ends the processes of a worker."""

    def prepare_scratch(self, scratch: str) -> Any:
        """Make a scratch folder and return the rules that bind a process to it.

        Both are built once for all the processes that use the folder after each other.
        """

    def start(self, rules: Any, scratch: str, limits: dict[str, int]) -> Process:
        """Start a process that waits for code, with the limits it is born with."""

    def kill(self, process: Process) -> None:
        """End the run: after this nothing of it executes any more."""

    def was_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process for want of memory since the last call."""
