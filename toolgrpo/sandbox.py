"""The sandbox for model-written Python: names of the distribution `confined-python`, which knows nothing of toolgrpo."""

from __future__ import annotations

from confined_python import Limits, RemoteSandbox, Rung, RunStatus, Sandbox, SandboxResult, Session

__all__ = ["Limits", "RemoteSandbox", "RunStatus", "Rung", "Sandbox", "SandboxResult", "Session"]
