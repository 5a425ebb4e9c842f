"""Runs model-written Python in processes that are confined; fails closed. See docs/background/sandbox.md.

The names are imported on first use: the processes that run code import this package too, and need
neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolgrpo.sandbox.base import Limits, Rung, RunStatus, SandboxResult
    from toolgrpo.sandbox.client.pool import Sandbox, Session
    from toolgrpo.sandbox.remote import RemoteSandbox

__all__ = ["Limits", "RemoteSandbox", "RunStatus", "Rung", "Sandbox", "SandboxResult", "Session"]

_LAZY = {
    "Limits": "base",
    "RemoteSandbox": "remote",
    "RunStatus": "base",
    "Rung": "base",
    "Sandbox": "client.pool",
    "SandboxResult": "base",
    "Session": "client.pool",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"toolgrpo.sandbox.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
