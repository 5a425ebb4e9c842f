"""Requests to a sandbox, its results, and the start of its processes.

Invariants: a result's `value` is built from exact built-in types only, whatever the run's code did;
every run has one status. This module imports the standard library alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

NOBODY = 65534  # the user that runs become where the sandbox is opened by root


class RunStatus(StrEnum):
    """End of a run."""

    OK = "ok"
    ERROR = "error"  # an uncaught exception, or an exit with another code than 0
    TIMEOUT = "timeout"  # the wall-clock or the CPU deadline
    MEMORY = "memory"
    OUTPUT = "output"  # printed far more than is kept
    DISK = "disk"  # wrote more than the scratch folder may hold
    KILLED = "killed"  # the process died of a signal


class Rung(StrEnum):
    """One step of the ladder, strongest first."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. `memory_mb` counts from what the preloaded libraries already occupy."""

    timeout_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 16
    scratch_mb: int = 64
    open_files: int = 64
    output_chars: int = 20_000  # kept of each of stdout and stderr

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mb", "file_mb", "scratch_mb", "open_files", "output_chars"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be greater than 0; got {value!r}")


def limits_of_run(limits: Limits, timeout_s: float | None, memory_mb: int | None) -> Limits:
    """Return the limits of a run that names some of its own."""
    if timeout_s is not None:
        limits = replace(limits, timeout_s=timeout_s)
    return limits if memory_mb is None else replace(limits, memory_mb=memory_mb)


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of one run.

    `value` is the last expression's where it is a plain literal; `value_repr` is its text.
    """

    status: RunStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # None: ended by a signal or a deadline
    duration: float = 0.0  # seconds
    value: Any = None
    value_repr: str | None = None
    value_is_plain: bool = False
    state_lost: bool = False  # in a session: the process is gone, the next run starts from nothing

    @property
    def ok(self) -> bool:
        return self.status is RunStatus.OK


def shown(text: str, most: int) -> str:
    """Return output of a run, cut to its first characters."""
    return text if len(text) <= most else f"{text[:most]}\n[output cut: {len(text) - most} more characters]"


def python_command(module: str, function: str, settings: Any) -> list[str]:
    """Return the command of a new interpreter that imports our package from where it lies, forgets that
    place, and calls a function, which finds `settings` as JSON in its last argument.
    """
    root = str(Path(__file__).resolve().parents[1])
    start = f"from confined_python.{module} import {function}; del sys.path[0]; {function}()"
    code = f"import sys; sys.path.insert(0, {root!r}); {start}"
    return [sys.executable, "-I", "-c", code, json.dumps(settings)]
