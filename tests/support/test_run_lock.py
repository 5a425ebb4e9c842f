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


def test_a_second_run_is_refused_in_each_process_with_the_process_and_the_time_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Holder(out, 0) as first, Holder(out, 1) as second:
        for process, holder in enumerate((first, second)):
            with pytest.raises(ConfigError, match="another run writes into") as refused:
                claim_folder(tmp_path / "." / "out", process, patience_s=0.0)
            assert f"process {holder.pid} on " in str(refused.value)
            assert re.search(time.strftime(r"since %Y-\d\d-\d\d \d\d:\d\d:\d\d"), str(refused.value))
        claim_folder(out, 2, patience_s=0.0).release()
        claim_folder(tmp_path / "another", patience_s=0.0).release()
        assert str(other_run_in(out)).startswith(f"process {first.pid} on ")
    assert other_run_in(out) is None and other_run_in(tmp_path / "none") is None
    claim = claim_folder(out, patience_s=0.0)
    assert other_run_in(out) is None, "it is this run"
    claim.release()


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


def test_a_model_folder_into_which_a_run_writes_says_so(tmp_path: Path) -> None:
    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.job import Job
    from toolgrpo.commands.terminal import Terminal
    from toolgrpo.errors import ModelError

    flags = f"--model_name_or_path x --dataset_id_or_path arithmetic --reward gsm8k --output_dir {tmp_path}/b".split()
    parts = Job(*parse_arguments(flags), Terminal(None, sys.stdout, quiet=True))
    with Holder(tmp_path / "out") as first, pytest.raises(ModelError, match=rf"process {first.pid} on"):
        parts.model_path(str(tmp_path / "out"))
    with pytest.raises(ModelError, match=r"config\.json"):
        parts.model_path(str(tmp_path / "out"))
