"""Inside the interpreter that an unconfined worker starts for one run or session.

It sets limits, then runs the same cells as anywhere. What stands in for confinement: resource
limits where the system has them, a look at the memory used every tenth of a second (macOS does not
enforce a limit of the address space), and an end of the whole process group as soon as the worker
is gone.
Not covered: everything else. The code can undo all of this; it is for accidents, not for attacks.
"""

from __future__ import annotations

import _thread
import json
import math
import os
import resource
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from toolgrpo.processes.linux import wake_with_parents_end
from toolgrpo.processes.wire import read_frame
from toolgrpo.sandbox.inside import cells

READY = b"\n"  # on the pipe of the results, once the first request can come
_LOOK_S = 0.1
_PEAK_UNIT = 1 if os.uname().sysname == "Darwin" else 1024  # of ru_maxrss, in bytes


def main() -> None:
    settings = json.loads(sys.argv.pop())  # programs see no arguments
    requests, results = settings["requests"], settings["results"]
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cells.prepare_streams()
    cells.use_streams()
    namespace = cells.fresh_namespace()
    cells.warm_up()
    _limit(settings)
    most_memory = _peak_bytes() + (settings["memory_mb"] << 20)
    wake_with_parents_end()  # the guard cannot end what is stopped
    # Not one of `threading`: programs see only the threads that they start.
    _thread.start_new_thread(_guard, (settings["leash"], results, most_memory))
    try:
        os.write(results, READY)
        while (request := read_frame(requests)) is not None:
            _limit_cpu(request["timeout_s"])
            cells.answer(request, namespace, cells.Pipes(requests, results))
    finally:
        os._exit(125)


def _limit(settings: dict[str, Any]) -> None:
    """Set the limits that this system has; what it refuses is left out."""
    limits = [
        (resource.RLIMIT_FSIZE, settings["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, settings["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ]
    mapped = _mapped_bytes()
    if mapped is not None:
        limits.append((resource.RLIMIT_AS, mapped + (settings["memory_mb"] << 20)))
    for kind, most in limits:
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _limit_cpu(timeout_s: float) -> None:
    """Limit the CPU time from now on.

    The wall clock, which the worker watches, ends a run of one thread before.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + 1
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _guard(leash: int, results: int, most_memory: int) -> None:
    """End the run when it takes too much memory, and with the worker, however that dies."""
    with suppress(OSError):  # the code has closed our descriptors
        while not select.select([leash], [], [], _LOOK_S)[0]:
            if _peak_bytes() > most_memory:
                cells.report(results, {"status": "memory", "exit_code": 1})
                os._exit(1)
        os.killpg(0, signal.SIGKILL)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


def _mapped_bytes() -> int | None:
    """Return the size of the address space, where /proc tells it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
