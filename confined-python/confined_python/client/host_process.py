"""The sandbox's processes on our side: the rung that this machine can hold, found by trying, and the
host, which is started by exec with a clean environment, asked for workers, closed.

The ladder of rungs never steps down silently: what was chosen is one log line that says what it does
not promise, and with nothing to hold code the sandbox refuses to start unless `allow_unsafe=True`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from confined_python.base import Rung, python_command
from confined_python.errors import SandboxError, UserError
from confined_python.host import scratch
from confined_python.processes.wire import hang_up

VMSTAT = Path("/proc/vmstat")  # where the kernel counts the processes that it has killed for want of memory
_START_S = 60.0
_CLOSE_S = 10.0
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # more would count in the memory of a run, for each of its threads
    "LANG": "C.UTF-8",
    "PATH": "",
}
_PROBE_S = 60.0
_STRONGEST_FIRST = (Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP)
_NO_LINUX = f"this is {sys.platform}, and every rung that confines needs Linux"
_PROMISE = {
    Rung.NAMESPACES: "not promised: no protection from kernel bugs; metadata (names, sizes) of files outside can be read",
    Rung.LANDLOCK: (
        "not promised: no protection from kernel bugs; metadata (names, sizes) of files outside can be read; the kernel's "
        "process table and network are shared, and out of reach by system-call filter and Landlock alone"
    ),
    Rung.SECCOMP: (
        "not promised: as landlock; and code has no files at all: no scratch folder and no imports beyond the preloaded ones"
    ),
    Rung.UNSAFE: (
        "promised: NOTHING but limits of time and memory: code reads, writes and starts whatever this user can, and what it "
        "starts can live on"
    ),
}


def choose_rung(wanted: Rung | str, *, allow_unsafe: bool) -> tuple[Rung, str]:
    """Return the rung to use and the line that says so; refuse to confine less than asked."""
    if wanted != "auto":
        try:
            rung = Rung(wanted)
        except ValueError:
            names = ", ".join(["auto", *Rung])
            raise UserError(f"there is no sandbox rung {wanted!r}; choose one of {names}") from None
        if rung is Rung.UNSAFE and not allow_unsafe:
            raise UserError("the rung 'unsafe' confines nothing; say allow_unsafe=True if that is what you want")
        reason = None if rung is Rung.UNSAFE else probe(rung)
        if reason is not None:
            raise SandboxError(f"this machine cannot hold the sandbox rung {rung.value!r}: {reason}")
        return rung, f"sandbox rung {rung.value} (asked for); {_PROMISE[rung]}"
    refused = [] if sys.platform == "linux" else [_NO_LINUX]
    for rung in _STRONGEST_FIRST if sys.platform == "linux" else ():
        reason = probe(rung)
        if reason is None:
            stronger = f" (not here: {'; '.join(refused)})" if refused else ""
            return rung, f"sandbox rung {rung.value}{stronger}; {_PROMISE[rung]}"
        refused.append(f"{rung.value}: {reason}")
    if allow_unsafe:
        return Rung.UNSAFE, f"sandbox rung unsafe ({'; '.join(refused)}); {_PROMISE[Rung.UNSAFE]}"
    raise SandboxError(
        f"nothing on this machine can confine model-written code ({'; '.join(refused)}). Run on Linux with seccomp and "
        "Landlock (a container will do), use a remote sandbox service (RemoteSandbox), or say "
        "allow_unsafe=True (CONFINED_PYTHON_ALLOW_UNSAFE=1 in the environment) to run it unconfined"
    )


@cache
def probe(rung: Rung) -> str | None:
    """Try a rung in a throw-away process; None where this machine holds it, else why not."""
    if sys.platform != "linux":
        return _NO_LINUX
    command = python_command("host.confine", "probe_rung", [rung, not _nobody_can_read(interpreter_paths())])
    done = subprocess.run(
        command, env=_of_interpreter("LD_LIBRARY_PATH", "TMPDIR"), capture_output=True, text=True, timeout=_PROBE_S
    )
    return None if "held" in done.stdout.split() else (done.stderr.strip().splitlines() or ["it died"])[-1]


def _of_interpreter(*names: str) -> dict[str, str]:
    """Return what an interpreter may need of this process's environment; of runs only an unconfined one, which is one too, sees it."""
    return {name: os.environ[name] for name in names if name in os.environ}


class Host:
    """The host process, seen from the client.

    `limits` are those that its workers expect a run to have.
    """

    def __init__(self, rung: Rung, *, preload: list[str], limits: dict[str, Any]) -> None:
        parent = tempfile.gettempdir()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        lent: dict[str, int | None] = {"control": theirs.detach()}
        settings = {"opener": os.getpid(), "rung": rung, "limits": limits, "tmp": parent}
        if rung is not Rung.UNSAFE:
            lent["owner"] = os.pidfd_open(os.getpid())
            lent["proc"] = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            lent["vmstat"] = _open_vmstat()
            readable = interpreter_paths()
            settings |= {"preload": preload, "readable": readable, "nobody_can_read": _nobody_can_read(readable)}
        fds = [fd for fd in lent.values() if fd is not None]
        module = "host.unconfined" if rung is Rung.UNSAFE else "host.host"
        try:
            self._process = subprocess.Popen(
                python_command(module, "main", {**settings, **lent}),
                env={**_ENVIRONMENT, **_of_interpreter("LD_LIBRARY_PATH")},
                pass_fds=fds,
                cwd="/",
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is the opener's to handle
            )
        finally:
            for fd in fds:
                os.close(fd)
        self.scratch: str | None = None
        self._control.settimeout(_START_S)
        try:
            hello = self._control.makefile("rb").readline()
        except OSError:
            hello = b""
        if not hello:
            self.close()
            raise SandboxError("the sandbox's host process did not start; its own words are on stderr above")
        self.scratch = json.loads(hello)

    @property
    def pid(self) -> int:
        return self._process.pid

    def worker(self) -> socket.socket:
        """Return a channel to a new worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's host process is gone ({error}); open another sandbox") from None
        finally:
            theirs.close()
        return ours

    def close(self) -> None:
        """Have the host end its workers, remove the scratch folder and end.

        What a dead host left is removed here.
        """
        hang_up(self._control)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.scratch is not None:
            with suppress(OSError):
                scratch.remove(self.scratch)


def _open_vmstat() -> int | None:
    with suppress(OSError):  # no /proc, or one that shows less
        return os.open(VMSTAT, os.O_RDONLY)
    return None


def interpreter_paths() -> list[str]:
    """Return what confined code may read: the interpreter's libraries, the loader's, time zones."""
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {str(Path(base) / "lib") for base in (sys.base_prefix, sys.prefix)}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    paths |= {"/dev/null", "/dev/urandom", "/dev/zero"}
    return sorted(path for path in paths if Path(path).exists())


def _nobody_can_read(paths: list[str]) -> bool:
    return all(open_to_all(path) for path in (*paths, f"{tempfile.gettempdir()}/any"))


def open_to_all(path: str) -> bool:
    """Return whether every folder on the way can be entered by any user."""
    here = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in here.parents)
