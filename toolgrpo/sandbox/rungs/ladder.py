"""Find the rung that this machine can hold, by trying.

The ladder never steps down silently: what was chosen is one log line that says what it does not
promise, and with nothing to hold code the sandbox refuses to start unless `allow_unsafe=True`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

from toolgrpo.errors import ConfigError, SandboxError
from toolgrpo.sandbox.base import Rung, python_command

_PROBE_S = 60.0
_STRONGEST_FIRST = (Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP)
_NO_LINUX = f"this is {sys.platform}, and every rung that confines needs Linux"
_NOT_PROMISED = {
    Rung.NAMESPACES: "no protection from kernel bugs; metadata (names, sizes) of files outside can be read",
    Rung.LANDLOCK: (
        "no protection from kernel bugs; metadata (names, sizes) of files outside can be read; the kernel's process "
        "table and network are shared, and out of reach by system-call filter and Landlock alone"
    ),
    Rung.SECCOMP: "as landlock; and code has no files at all: no scratch folder and no imports beyond the preloaded ones",
}
_UNSAFE_PROMISE = (
    "NOTHING but limits of time and memory: code reads, writes and starts whatever this user can, and what it starts can "
    "live on"
)


def choose_rung(wanted: Rung | str, *, allow_unsafe: bool) -> tuple[Rung, str]:
    """Return the rung to use and the line that says so; refuse to confine less than asked."""
    if os.name != "posix":
        raise SandboxError(
            f"model-written code cannot be run here, not even unconfined: this is {sys.platform}. Use Linux, or a remote "
            "sandbox service (toolgrpo.sandbox.RemoteSandbox)"
        )
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
        return rung, f"sandbox rung {rung.value} (asked for); {_promise(rung)}"
    refused = [] if sys.platform == "linux" else [_NO_LINUX]
    for rung in _STRONGEST_FIRST if sys.platform == "linux" else ():
        reason = probe(rung)
        if reason is None:
            stronger = f" (not here: {'; '.join(refused)})" if refused else ""
            return rung, f"sandbox rung {rung.value}{stronger}; {_promise(rung)}"
        refused.append(f"{rung.value}: {reason}")
    if allow_unsafe:
        return Rung.UNSAFE, f"sandbox rung unsafe ({'; '.join(refused)}); {_promise(Rung.UNSAFE)}"
    raise SandboxError(
        f"nothing on this machine can confine model-written code ({'; '.join(refused)}). Run on Linux with seccomp and "
        "Landlock (a container will do), use a remote sandbox service (toolgrpo.sandbox.RemoteSandbox), or say "
        "allow_unsafe=True (TOOLGRPO_ALLOW_UNSAFE=1 in the environment of a recipe) to run it unconfined"
    )


def _promise(rung: Rung) -> str:
    return f"promised: {_UNSAFE_PROMISE}" if rung is Rung.UNSAFE else f"not promised: {_NOT_PROMISED[rung]}"


@cache
def probe(rung: Rung) -> str | None:
    """Try a rung in a throw-away process; None where this machine holds it, else why not."""
    if sys.platform != "linux":
        return _NO_LINUX
    command = python_command("rungs.confine", "probe_rung", rung)
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=_PROBE_S)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it died"])[-1]
