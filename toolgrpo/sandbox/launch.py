"""Which rung this machine can hold, found out by doing, and the mother process on our side.

The ladder never steps down silently: what was chosen is one log line that says what it does not promise, and with
nothing to hold code the sandbox refuses to start unless `allow_unsafe=True`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

from toolgrpo.errors import ConfigError, SandboxError
from toolgrpo.sandbox.base import Rung

__all__ = ["NOT_PROMISED", "Mother", "choose_rung", "probe"]

_START_S = 60.0
NOT_PROMISED = {
    Rung.NAMESPACES: "no protection from kernel bugs; metadata (names, sizes) of files outside can be read",
    Rung.LANDLOCK: (
        "no protection from kernel bugs; metadata (names, sizes) of files outside can be read; the kernel's process "
        "table and network are shared, and out of reach by system-call filter and Landlock alone"
    ),
    Rung.SECCOMP: "as landlock; and code has no files at all: no scratch folder and no imports beyond the preloaded ones",
    Rung.UNSAFE: "NOTHING but limits of time and memory: code reads and writes whatever this user can",
}


def choose_rung(wanted: Rung | str, *, allow_unsafe: bool) -> tuple[Rung, str]:
    """The rung to use and the line that says so; refuses rather than confining less than asked."""
    if wanted != "auto":
        try:
            rung = Rung(wanted)
        except ValueError:
            names = ", ".join(["auto", *Rung])
            raise ConfigError(f"there is no sandbox rung {wanted!r}; choose one of {names}") from None
        if rung is Rung.UNSAFE and not allow_unsafe:
            raise ConfigError("the rung 'unsafe' confines nothing; say allow_unsafe=True if that is what you want")
        reason = None if rung is Rung.UNSAFE else probe(rung)
        if reason is not None:
            raise SandboxError(f"this machine cannot hold the sandbox rung {rung.value!r}: {reason}")
        return rung, f"sandbox rung {rung.value} (asked for); not promised: {NOT_PROMISED[rung]}"
    refused: list[str] = []
    for rung in (Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP):
        reason = probe(rung)
        if reason is None:
            stronger = f" (not here: {'; '.join(refused)})" if refused else ""
            return rung, f"sandbox rung {rung.value}{stronger}; not promised: {NOT_PROMISED[rung]}"
        refused.append(f"{rung.value}: {reason}")
    if allow_unsafe:
        return Rung.UNSAFE, f"sandbox rung unsafe ({'; '.join(refused)}); promised: {NOT_PROMISED[Rung.UNSAFE]}"
    raise SandboxError(
        f"nothing on this machine can confine model-written code ({'; '.join(refused)}). Run on Linux with seccomp and "
        "Landlock, use a remote sandbox service, or say allow_unsafe=True to run it unconfined"
    )


@cache
def probe(rung: Rung) -> str | None:
    """None where this machine holds the rung, else why not; a throw-away process tries it."""
    if sys.platform != "linux":
        return f"{sys.platform} is not Linux"
    done = subprocess.run(
        [sys.executable, "-I", "-c", _starter("probe", "probe_rung"), rung.value],
        env={},
        capture_output=True,
        text=True,
        timeout=_START_S,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it died"])[-1]


class Mother:
    """The mother process, seen from the client."""

    def __init__(self, rung: Rung, *, preload: list[str], scratch: str) -> None:
        readable = interpreter_paths()
        settings: dict[str, Any] = {
            "rung": rung.value,
            "preload": preload,
            "scratch": scratch,
            "readable": readable,
            "nobody_can_read": all(_open_to_all(path) for path in (*readable, scratch)),
        }
        os.chmod(scratch, 0o711)  # each run's folder inside it is its own
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-I", "-c", _starter("mother", "main"), json.dumps(settings), str(theirs.fileno())]
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], cwd="/", stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._control.settimeout(_START_S)
        try:
            hello = self._control.makefile("rb").readline()
        except OSError:
            hello = b""
        if not hello:
            self.close()
            raise SandboxError("the sandbox's mother process did not start; its own words are on stderr above")
        self.missing: list[str] = json.loads(hello)["missing"]

    def worker(self) -> socket.socket:
        """A channel to a new worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's mother process is gone ({error}); open another sandbox") from None
        finally:
            theirs.close()
        return ours

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def interpreter_paths() -> list[str]:
    """What confined code may read: the interpreter's own libraries, the loader's, and time zones."""
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {str(Path(base) / "lib") for base in (sys.base_prefix, sys.prefix)}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    paths |= {"/dev/null", "/dev/urandom", "/dev/zero"}
    return sorted(path for path in paths if Path(path).exists())


def _open_to_all(path: str) -> bool:
    """Whether every folder on the way can be entered by any user."""
    here = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in here.parents)


def _starter(module: str, function: str) -> str:
    """Python that imports our package from where it lies, then forgets that place."""
    root = str(Path(__file__).resolve().parents[2])
    return f"import sys; sys.path.insert(0, {root!r}); from toolgrpo.sandbox.{module} import {function}; {function}()"
