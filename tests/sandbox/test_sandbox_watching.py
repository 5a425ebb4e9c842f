"""What ends a run that says nothing: each limit by itself, and the end of who asked for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.sandbox.host.run_process import Launcher, Process, open_pipes
from toolgrpo.sandbox.host.run_worker import Run

REQUEST: dict[str, Any] = {
    "code": "", "stdin": "", "keep": False, "timeout_s": 600.0, "scratch_mb": 1, "file_mb": 1, "output_chars": 100
}  # fmt: skip


class Silent(Launcher):
    """Has one process with nobody at the other ends of its pipes; each look finds `per_look_s` more CPU time used."""

    def __init__(self, per_look_s: float = 0.0) -> None:
        self.per_look_s, self.used_s = per_look_s, 0.0

    def start(self, rules: None, path: str, limits: dict[str, int]) -> Process:
        ours, self.theirs = open_pipes()
        ended, self.alive = os.pipe()
        return Process(self, 1, ended, *ours)

    def kill(self, pid: int) -> None: ...

    def reap(self, pid: int) -> int:
        return 0

    def cpu_seconds(self, pid: int) -> float:
        self.used_s += self.per_look_s
        return self.used_s


@pytest.mark.parametrize(
    ("verdict", "per_look_s"),
    [("timeout", 200.0), ("abandoned", 0.0)],
    ids=["the CPU time of all threads", "the end of who asked"],
)
def test_what_ends_a_run_that_says_nothing(verdict: str, per_look_s: float, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if verdict == "abandoned":
            ours.close()
        launcher = Silent(per_look_s)
        process = launcher.start(None, str(tmp_path), {})
        run = Run(process, REQUEST, str(tmp_path))
        run.watch(theirs)
    assert run.answer()["verdict"] == verdict
    process.release()
    for fd in (*launcher.theirs, launcher.alive):
        os.close(fd)
