"""A real Jupyter kernel in a process of its own: cells are run in it, interrupted, run again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CellError(Exception):
    """A cell raised: its name, its text and its traceback as plain text."""


class NotebookKernel:
    """Starts on `with`, in `folder`; `run` gives back what a cell printed."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, timeout_s: float = 600.0) -> None:
        self._folder = folder
        self._env = dict(env)
        self._timeout_s = timeout_s
        self._manager: Any = None
        self._client: Any = None

    def __enter__(self) -> NotebookKernel:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(
            startup_timeout=self._timeout_s, kernel_name="python3", cwd=str(self._folder), env=self._env
        )
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, code: str, *, interrupt_after: str | None = None) -> str:
        """Run a cell to its end and return its output; raises `CellError`.

        `interrupt_after`: interrupt the kernel, as its stop button does, when this text was printed.
        """
        message = self._client.execute(code)
        printed = ""
        deadline = time.monotonic() + self._timeout_s
        error: CellError | None = None
        while True:
            heard = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            if heard["parent_header"].get("msg_id") != message:
                continue
            content = heard["content"]
            match heard["msg_type"]:
                case "stream":
                    printed += content["text"]
                case "error":
                    error = CellError(f"{content['ename']}: {content['evalue']}\n" + "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    if error is not None:
                        raise error
                    return printed
            if interrupt_after is not None and interrupt_after in printed:
                interrupt_after = None
                self._manager.interrupt_kernel()
