"""Measuring and wiping what a run has left: no name, depth, mode or link makes either of them fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from confined_python import Sandbox
from confined_python.host import scratch

LONG = "n" * 250  # nested 40 times this is far beyond what a path may have


def nest(top: Path, name: str, depth: int, mode: int = 0o700) -> None:
    """Folders one in the other, with a file in each."""
    fd = os.open(top, os.O_RDONLY)
    for level in range(depth):
        os.mkdir(name, 0o700, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=inner))
        if level:
            os.fchmod(fd, mode)  # when it is full: not everybody is root
        os.close(fd)
        fd = inner
    os.fchmod(fd, mode)
    os.close(fd)


def loops(top: Path) -> None:
    (top / "one").symlink_to(top / "two")
    (top / "two").symlink_to(top / "one")
    (top / "up").symlink_to(top)
    (top / "folder").mkdir()
    (top / "folder" / "up").symlink_to("..")


def names_that_hurt(top: Path) -> None:
    for name in (b"\xff\xfe", b"a\nb", b" ", b"-rf", b"*", b"x" * 255):
        folder = os.path.join(os.fsencode(top), name)
        os.mkdir(folder)
        open(os.path.join(folder, name), "wb").close()


def shut(top: Path) -> None:
    nest(top, "d", 2, mode=0o500)
    top.chmod(0o100)


LEFT: dict[str, Callable[[Path], None]] = {
    "folders with long names, nested": lambda top: nest(top, LONG, 40),
    "the same, shut": lambda top: nest(top, LONG, 40, mode=0),
    "the same, read only": lambda top: nest(top, LONG, 40, mode=0o500),
    "folders whose owner shut them, the top one too": shut,
    "folders nested deeper than descriptors reach": lambda top: nest(top, "d", 3000),
    "links in a circle": loops,
    "names that hurt": names_that_hurt,
}


@pytest.mark.parametrize("what", LEFT)
def test_it_is_measured_and_wiped(tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "out").symlink_to(outside)
    LEFT[what](folder)
    scratch.holds_more_than(str(folder), 1 << 30)
    scratch.empty(str(folder))
    assert os.listdir(folder) == [] and (outside / "kept").exists()


def test_depth_counts_as_too_much_and_width_as_what_it_takes(tmp_path: Path) -> None:
    nest(tmp_path, LONG, 40)
    assert not scratch.holds_more_than(str(tmp_path), 1 << 20)
    assert scratch.holds_more_than(str(tmp_path), 300 << 10)  # forty folders and forty files
    (tmp_path / "deeper").mkdir()
    nest(tmp_path / "deeper", "d", 200)
    assert scratch.holds_more_than(str(tmp_path), 1 << 30)


def test_a_file_is_measured_by_what_it_takes_on_the_disk(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "link").symlink_to("/")
    assert not scratch.holds_more_than(str(tmp_path), 1 << 20)
    (tmp_path / "full").write_bytes(bytes(2 << 20))
    assert scratch.holds_more_than(str(tmp_path), 1 << 20)
    assert not scratch.holds_more_than(str(tmp_path / "gone"), 1)


def test_a_session_outlives_folders_with_long_names(sandbox: Sandbox) -> None:
    if sandbox.rung.value == "seccomp":
        pytest.skip("programs have no files there")
    program = (
        f"import os, time\nfor _ in range(40):\n    os.mkdir('{LONG}'); os.chdir('{LONG}')\ntime.sleep(0.4)\n'done'"
    )
    with sandbox.session() as session:
        assert session.run(program).value == "done"
        assert session.run("6 * 7").value == 42
    assert sandbox.run("import os; os.listdir()").value == []
