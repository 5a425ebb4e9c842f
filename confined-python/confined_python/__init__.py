"""Runs model-written Python in processes that are confined; fails closed. README.md says what holds and what does not.

Public are the names below, `confined_python.errors`, `confined_python.grading`, and for programs that keep processes of
their own `confined_python.processes`. The names are imported on first use: the processes that run code import this
package too, and need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confined_python.base import Limits, Rung, RunStatus, SandboxResult
    from confined_python.client.host_process import choose_rung
    from confined_python.client.pool import DEFAULT_PRELOAD, SHARED_WORKERS, Sandbox, Session, SharedSandbox
    from confined_python.parsing import parse_python
    from confined_python.remote import RemoteSandbox

__version__ = "0.1.0"
__all__ = [
    "DEFAULT_PRELOAD",
    "SHARED_WORKERS",
    "Limits",
    "RemoteSandbox",
    "RunStatus",
    "Rung",
    "Sandbox",
    "SandboxResult",
    "Session",
    "SharedSandbox",
    "choose_rung",
    "parse_python",
]

_LAZY = {
    "DEFAULT_PRELOAD": "client.pool",
    "SHARED_WORKERS": "client.pool",
    "Limits": "base",
    "RemoteSandbox": "remote",
    "RunStatus": "base",
    "Rung": "base",
    "Sandbox": "client.pool",
    "SandboxResult": "base",
    "Session": "client.pool",
    "SharedSandbox": "client.pool",
    "choose_rung": "client.host_process",
    "parse_python": "parsing",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"confined_python.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
