"""A process that writes into a folder, as far as other runs can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_HOLD = """
import os, sys, time
from pathlib import Path
from toolgrpo.support.run_lock import claim_folder

claim_folder(Path(sys.argv[1]), int(sys.argv[2]))
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    time.sleep(60)  # as a worker of a data loader: it is not the run
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


class Holder:
    """Claims a folder as this process of a run, until it is killed; with "fork", a child of it lives on."""

    def __init__(self, folder: Path, process: int = 0, *more: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(folder), str(process), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.child = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
