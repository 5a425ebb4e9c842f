"""Runs model-written Python in warm, forked, confined processes; fails closed. See docs/sandbox.md."""

from toolgrpo.sandbox.base import Limits, Rung, RunStatus, SandboxResult
from toolgrpo.sandbox.remote import RemoteSandbox
from toolgrpo.sandbox.sandbox import Sandbox, Session

__all__ = ["Limits", "RemoteSandbox", "RunStatus", "Rung", "Sandbox", "SandboxResult", "Session"]
