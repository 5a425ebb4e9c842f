"""A reaper ends what its child and its owner leave, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from process_tree import all_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reapers are Linux's")

_TREE = """
import os, subprocess, sys, time
from confined_python.processes.linux import fork_under_reaper, outlive_parent
fork_under_reaper(int(sys.argv[1]))
below = subprocess.Popen(["sleep", "555"], start_new_session=True)
print(os.getppid(), os.getpid(), below.pid, flush=True)
{then}
"""


def start(then: str, owner: int = -1) -> tuple[subprocess.Popen[str], list[int]]:
    """A tree that does `then`: its reaper as a Popen, and the ids of reaper, child and grandchild."""
    command = [sys.executable, "-c", _TREE.format(then=then), str(owner)]
    tree = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[owner] if owner >= 0 else [])
    assert tree.stdout is not None
    return tree, [int(pid) for pid in tree.stdout.readline().split()]


def test_what_the_child_leaves_ends_with_it_and_its_exit_code_is_passed_on() -> None:
    tree, (reaper, _, below) = start("os._exit(7)")
    assert tree.pid == reaper
    assert tree.wait(timeout=60) == 7
    assert all_end(below)


def test_a_killed_child_takes_its_own_with_it() -> None:
    tree, (_, child, below) = start("time.sleep(555)")
    os.kill(child, signal.SIGKILL)
    assert tree.wait(timeout=60) == -signal.SIGKILL
    assert all_end(below)


@pytest.mark.parametrize("ended_before", [False, True])
def test_a_child_that_hangs_ends_soon_after_its_owner(ended_before: bool) -> None:
    """One that spins and never looks: the reaper watches the owner for it."""
    owner = subprocess.Popen(["true" if ended_before else "sleep", "555"])
    descriptor = os.pidfd_open(owner.pid)
    if ended_before:
        owner.wait()
    tree, (_, child, below) = start("while True: pass", descriptor)
    os.close(descriptor)
    owner.kill()  # not waited for: a zombie has ended too
    assert tree.wait(timeout=60) == -signal.SIGKILL
    assert all_end(child, below)
    owner.wait()


def test_a_child_that_does_not_outlive_it_ends_with_the_reaper() -> None:
    tree, (reaper, child, below) = start("time.sleep(555)")
    os.kill(reaper, signal.SIGKILL)
    tree.wait(timeout=60)
    assert all_end(child)
    os.kill(below, signal.SIGKILL)  # nobody is left to do it: the child was to watch the reaper


def test_a_terminated_reaper_ends_everything() -> None:
    tree, (_, child, below) = start("time.sleep(555)")
    tree.terminate()
    tree.wait(timeout=60)
    assert all_end(child, below)
