"""One run a folder, tried with real processes: locks are about what the system does when one ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolgrpo.errors import ConfigError
from toolgrpo.folder_claim import claim_folder, other_run_in

HOLD = """
import os, sys, time
from pathlib import Path
from toolgrpo.folder_claim import claim_folder

claim_folder(Path(sys.argv[1]), int(sys.argv[2]))
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    time.sleep(60)  # as a worker of a data loader: it is not the run
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that keeps a folder."""

    def __init__(self, folder: Path, process: int = 0, *more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), str(process), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.child = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def test_a_second_run_is_refused_with_the_process_and_the_time_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Holder(out)
    try:
        with pytest.raises(ConfigError, match="another run writes into") as refused:
            claim_folder(tmp_path / "." / "out", patience_s=0.0)
        assert f"process {first.process.pid} on " in str(refused.value)
        assert re.search(time.strftime(r"since %Y-\d\d-\d\d \d\d:\d\d:\d\d"), str(refused.value))
        claim_folder(tmp_path / "another", patience_s=0.0).release()
    finally:
        first.kill()


def test_processes_of_one_run_never_meet_and_those_of_two_runs_do(tmp_path: Path) -> None:
    first = [Holder(tmp_path, process) for process in (0, 1)]
    try:
        for process in (0, 1):
            with pytest.raises(ConfigError, match=f"process {first[process].process.pid} "):
                claim_folder(tmp_path, process, patience_s=0.0)
        claim_folder(tmp_path, 2, patience_s=0.0).release()
    finally:
        for holder in first:
            holder.kill()


def test_a_killed_run_keeps_nobody_out_although_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    first = Holder(tmp_path, 0, "fork")
    try:
        os.kill(first.process.pid, signal.SIGKILL)  # and claim at once
        claim = claim_folder(tmp_path)
        os.kill(int(first.child), 0)
        claim.release()
    finally:
        os.kill(int(first.child), signal.SIGKILL)
        first.kill()


def test_what_a_process_claimed_it_may_claim_again_and_gives_back_as_often(tmp_path: Path) -> None:
    one, other = claim_folder(tmp_path), claim_folder(tmp_path)
    one.release()
    one.release()
    assert not can_be_claimed_elsewhere(tmp_path), "the other claim still holds"
    other.release()
    assert can_be_claimed_elsewhere(tmp_path)


def can_be_claimed_elsewhere(folder: Path) -> bool:
    script = "import sys; from pathlib import Path; from toolgrpo.folder_claim import claim_folder\n"
    script += "claim_folder(Path(sys.argv[1]), patience_s=0.0)"
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 or b"another run writes into" in done.stderr
    return done.returncode == 0


def test_who_runs_in_a_folder_can_be_asked_without_keeping_it(tmp_path: Path) -> None:
    assert other_run_in(tmp_path / "none") is None
    first = Holder(tmp_path / "out")
    try:
        assert str(other_run_in(tmp_path / "out")).startswith(f"process {first.process.pid} on ")
    finally:
        first.kill()
    assert other_run_in(tmp_path / "out") is None
    claim = claim_folder(tmp_path / "out", patience_s=0.0)
    assert other_run_in(tmp_path / "out") is None, "it is this run"
    claim.release()


def test_a_model_folder_into_which_a_run_writes_says_so(tmp_path: Path) -> None:
    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.parts import RunParts
    from toolgrpo.commands.terminal import Terminal
    from toolgrpo.errors import ModelError

    flags = ["--model_name_or_path", "x", "--dataset_id_or_path", "arithmetic", "--output_dir", str(tmp_path / "b")]
    flags += ["--reward", "gsm8k"]
    parts = RunParts(*parse_arguments(flags), Terminal(None, sys.stdout, quiet=True))
    first = Holder(tmp_path / "out")
    try:
        with pytest.raises(ModelError, match=f"a run is writing there now .process {first.process.pid} on"):
            parts.model_path(str(tmp_path / "out"))
    finally:
        first.kill()
    with pytest.raises(ModelError, match=r"is a folder without config\.json"):
        parts.model_path(str(tmp_path / "out"))
