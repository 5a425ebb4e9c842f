"""Scratch folders that nobody can remove any more: the next sandbox does, and touches no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from process_tree import all_end, family_of, stop

from confined_python import Rung, Sandbox
from confined_python.base import NOBODY
from confined_python.host import scratch

OPENER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from confined_python import Sandbox
sandbox = Sandbox(workers=1, preload=[], rung=sys.argv[2], allow_unsafe=True)
holder = sandbox.session()
session = holder.__enter__()
written = session.run("import os\\nos.makedirs('a/b')\\nopen('a/b/kept', 'w').write('x')", timeout=600)
assert written.ok, written
print(sandbox._host.pid, flush=True)
session.run("while True: pass", timeout=600)
"""


@pytest.mark.parametrize("rung", ["landlock", "unsafe"])
def test_what_a_killed_opener_and_host_leave_goes_when_the_next_sandbox_starts(
    rung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(workers=1, preload=[]) as living:
        if living.rung not in (Rung.NAMESPACES, Rung.LANDLOCK):
            pytest.skip("this machine does not hold the rung landlock")
        kept = set(tmp_path.iterdir())
        assert len(kept) == 1
        command = [sys.executable, "-c", OPENER, str(tmp_path), rung]
        opener = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert opener.stdout is not None
        host = int(opener.stdout.readline())
        family = family_of(host)
        stop(opener.pid)  # it would remove the folder of a host that died
        os.kill(host, signal.SIGKILL)
        opener.kill()
        opener.communicate()
        assert all_end(*family)
        left = set(tmp_path.iterdir()) - kept
        assert left and list(tmp_path.glob("*/*/a/b/kept")), "the two that would have removed it were killed"
        with Sandbox(workers=1, preload=[]) as following:
            assert not left & set(tmp_path.iterdir())
            assert following.run("6 * 7").value == 42
        assert living.run("open('f', 'w').close(); import os; os.listdir()").value == ["f"], "its folder is its own"
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_this_user_that_nobody_holds_are_swept(tmp_path: Path) -> None:
    held, lock = scratch.claim(str(tmp_path))
    assert lock is not None
    (tmp_path / "elsewhere" / "precious").mkdir(parents=True)
    (tmp_path / "confined-python-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "confined-python-file").touch()
    (tmp_path / "confined-other-folder").mkdir()
    orphan = tmp_path / "confined-python-orphan"
    (orphan / "deep").mkdir(parents=True)
    (orphan / "deep" / "link").symlink_to(tmp_path / "elsewhere")
    foreign = tmp_path / "confined-python-foreign"
    if os.getuid() == 0:
        foreign.mkdir()
        os.chown(foreign, NOBODY, NOBODY)
    before = set(tmp_path.iterdir())
    second, second_lock = scratch.claim(str(tmp_path))
    assert set(tmp_path.iterdir()) == before - {orphan} | {Path(second)}
    assert (tmp_path / "elsewhere" / "precious").is_dir() and Path(held).is_dir()
    os.close(lock)
    third, third_lock = scratch.claim(str(tmp_path))
    assert not Path(held).exists() and Path(second).is_dir() and Path(third).is_dir()
    for fd in (second_lock, third_lock):
        assert fd is not None
        os.close(fd)


def test_a_folder_is_never_swept_between_its_making_and_its_locking(tmp_path: Path) -> None:
    """Many start at a time, and each sweeps what it finds."""
    claims: list[tuple[str, int | None]] = []

    def start() -> None:
        for _ in range(40):
            claims.append(scratch.claim(str(tmp_path)))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({path for path, _ in claims}) == 240
    assert {Path(path) for path, _ in claims} == set(tmp_path.iterdir()), (
        "each has its folder still, and there is no other"
    )
    for _, lock in claims:
        assert lock is not None
        os.close(lock)
