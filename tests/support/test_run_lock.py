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

from tests.support.held_folder import Holder
from toolgrpo.errors import ConfigError
from toolgrpo.support.run_lock import claim_folder, other_run_in


def test_a_second_run_is_refused_with_the_process_and_the_time_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Holder(out) as first:
        with pytest.raises(ConfigError, match="another run writes into") as refused:
            claim_folder(tmp_path / "." / "out", patience_s=0.0)
        assert f"process {first.pid} on " in str(refused.value)
        assert re.search(time.strftime(r"since %Y-\d\d-\d\d \d\d:\d\d:\d\d"), str(refused.value))
        claim_folder(tmp_path / "another", patience_s=0.0).release()


def test_processes_of_one_run_never_meet_and_those_of_two_runs_do(tmp_path: Path) -> None:
    with Holder(tmp_path, 0) as first, Holder(tmp_path, 1) as second:
        for process, holder in enumerate((first, second)):
            with pytest.raises(ConfigError, match=f"process {holder.pid} "):
                claim_folder(tmp_path, process, patience_s=0.0)
        claim_folder(tmp_path, 2, patience_s=0.0).release()


def test_a_killed_run_keeps_nobody_out_although_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    with Holder(tmp_path, 0, "fork") as first:
        try:
            os.kill(first.pid, signal.SIGKILL)  # and claim at once
            claim = claim_folder(tmp_path)
            os.kill(int(first.child), 0)
            claim.release()
        finally:
            os.kill(int(first.child), signal.SIGKILL)


def test_what_a_process_claimed_it_may_claim_again_and_gives_back_as_often(tmp_path: Path) -> None:
    one, other = claim_folder(tmp_path), claim_folder(tmp_path)
    one.release()
    one.release()
    assert not can_be_claimed_elsewhere(tmp_path), "the other claim still holds"
    other.release()
    assert can_be_claimed_elsewhere(tmp_path)


def can_be_claimed_elsewhere(folder: Path) -> bool:
    script = "import sys; from pathlib import Path; from toolgrpo.support.run_lock import claim_folder\n"
    script += "claim_folder(Path(sys.argv[1]), patience_s=0.0)"
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 or b"another run writes into" in done.stderr
    return done.returncode == 0


def test_who_runs_in_a_folder_can_be_asked_without_keeping_it(tmp_path: Path) -> None:
    assert other_run_in(tmp_path / "none") is None
    with Holder(tmp_path / "out") as first:
        assert str(other_run_in(tmp_path / "out")).startswith(f"process {first.pid} on ")
    assert other_run_in(tmp_path / "out") is None
    claim = claim_folder(tmp_path / "out", patience_s=0.0)
    assert other_run_in(tmp_path / "out") is None, "it is this run"
    claim.release()


def test_a_model_folder_into_which_a_run_writes_says_so(tmp_path: Path) -> None:
    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.job import Job
    from toolgrpo.commands.terminal import Terminal
    from toolgrpo.errors import ModelError

    flags = ["--model_name_or_path", "x", "--dataset_id_or_path", "arithmetic", "--output_dir", str(tmp_path / "b")]
    flags += ["--reward", "gsm8k"]
    parts = Job(*parse_arguments(flags), Terminal(None, sys.stdout, quiet=True))
    writing = "a run is writing there now .process {} on"
    with Holder(tmp_path / "out") as first, pytest.raises(ModelError, match=writing.format(first.pid)):
        parts.model_path(str(tmp_path / "out"))
    with pytest.raises(ModelError, match=r"config\.json"):
        parts.model_path(str(tmp_path / "out"))
