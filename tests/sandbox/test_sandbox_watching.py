"""What ends a run that says nothing: each limit by itself, and the end of who asked for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.sandbox.host.run_process import Process
from toolgrpo.sandbox.host.run_watch import answer, watch

REQUEST: dict[str, Any] = {
    "code": "", "stdin": "", "keep": False, "timeout_s": 600.0, "scratch_mb": 1, "file_mb": 1, "output_chars": 100
}  # fmt: skip


class Silent(Process):
    """Pipes with nobody at their other ends; it uses as much CPU time as it is told."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(6)]
        ended, stdin, stdout, stderr, requests, results = pipes
        super().__init__(1, ended[0], stdin[1], stdout[0], stderr[0], requests[1], results[0])
        self.theirs = [ended[1], stdin[0], stdout[1], stderr[1], requests[0], results[1]]
        self.used_s = 0.0

    def cpu_seconds(self) -> float:
        self.used_s += 200.0
        return self.used_s

    def reap(self) -> int:
        self.pid = -1
        return 0


class Restful(Silent):
    def cpu_seconds(self) -> float:
        return 0.0


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def ended_by(process: Silent, request: dict[str, Any], folder: Path, client: socket.socket) -> str | None:
    for fd in (process.stdout, process.stderr, process.results, process.stdin, process.requests):
        os.set_blocking(fd, False)
    outcome = watch(process, request, str(folder), client)
    verdict = answer(process, outcome, request)["verdict"]
    process.release()
    for fd in process.theirs:
        os.close(fd)
    return None if verdict is None else str(verdict)


def test_the_cpu_time_of_all_threads(tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    assert ended_by(Silent(), REQUEST, tmp_path, channel[1]) == "timeout"


def test_the_wall_clock(tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    assert ended_by(Restful(), {**REQUEST, "timeout_s": 0.05}, tmp_path, channel[1]) == "timeout"


def test_the_scratch_folder(tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    assert ended_by(Restful(), REQUEST, tmp_path, channel[1]) == "disk"


def test_the_end_of_who_asked(tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    channel[0].close()
    assert ended_by(Restful(), REQUEST, tmp_path, channel[1]) == "abandoned"
