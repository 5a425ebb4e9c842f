"""Python, run in the sandbox: stateless as a tool, or with variables that last for an episode.

    --tools_script tools_funcs/python_tools.py                      each call starts anew
    --environment tools_funcs/python_tools.py:PythonSession         variables stay until the episode ends

docs/background/sandbox.md says what model-written code can and cannot do there. `TOOLGRPO_PYTHON_TIMEOUT` is the
time limit of one run in seconds (default 5). With `TOOLGRPO_SANDBOX_URL` the stateless form runs on a remote sandbox service.
Where nothing confines code (macOS), both forms refuse to start unless TOOLGRPO_ALLOW_UNSAFE=1 says to run it unconfined.
"""

from __future__ import annotations

import ast
import os
import threading
from contextlib import ExitStack

from confined_python import parse_python
from toolgrpo.sandbox import RemoteSandbox, Sandbox, SandboxResult, Session
from toolgrpo.tools import tool

_RUN_TIMEOUT_S = float(os.environ.get("TOOLGRPO_PYTHON_TIMEOUT", "5"))
_lock = threading.Lock()
_sandbox: Sandbox | RemoteSandbox | None = None


def _get_sandbox() -> Sandbox | RemoteSandbox:
    """One sandbox a worker process, started by its first call."""
    global _sandbox
    with _lock:
        if _sandbox is None:
            url = os.environ.get("TOOLGRPO_SANDBOX_URL")
            _sandbox = RemoteSandbox(url) if url else Sandbox()
        return _sandbox


def _as_text(result: SandboxResult) -> str:
    """What the model reads: what was printed, the last expression's value, and what went wrong."""
    parts = [result.stdout.rstrip("\n")]
    if result.ok and result.value_repr is not None:
        parts.append(result.value_repr)
    if not result.ok:
        parts.append(result.stderr.strip())
        if result.status != "error" or not result.stderr.strip():
            parts.append(f"the run ended with status {result.status}")
    return "\n".join(part for part in parts if part) or "(no output; print something, or end with an expression)"


@tool(keep_processes=True)
def python(code: str) -> str:
    """Run Python code and return what it prints and the value of its last expression. Nothing is kept between calls.

    Args:
        code: The program. The standard library, numpy and sympy can be imported; there is no network.
    """
    sandbox = _get_sandbox()
    return _as_text(
        sandbox.run(_printing(code) if isinstance(sandbox, RemoteSandbox) else code, timeout=_RUN_TIMEOUT_S)
    )


def _printing(code: str) -> str:
    """Code that prints the value of its last expression, which a remote service does not return."""
    try:
        tree = parse_python(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # whoever runs it says so
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return code
    shown = ast.parse("(lambda value: None if value is None else print(repr(value)))(0)").body[0]
    shown.value.args[0] = tree.body[-1].value
    tree.body[-1] = shown
    return ast.unparse(tree)


@tool(keep_processes=True)
def execute_code(code: str) -> str:
    """Run Python code and return what it prints and the value of its last expression. Nothing is kept between calls.

    Args:
        code: The program. The standard library, numpy and sympy can be imported; there is no network.
    """
    return python(code)  # another name of it, for models and data that know this one; multi_tools.py offers both


class PythonSession:
    """A Python session of one episode."""

    def reset(self, **row: object) -> None:
        """Start anew; the rows' columns are not used. The sandbox is opened by the first call: not every episode makes one."""
        self._open = ExitStack()
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """Run Python code and return what it prints and the value of its last expression. Variables stay for later calls.

        Args:
            code: The program. The standard library, numpy and sympy can be imported; there is no network.
        """
        if self._session is None:
            sandbox = self._open.enter_context(Sandbox(workers=1))
            self._session = self._open.enter_context(sandbox.session())
        result = self._session.run(code, timeout=_RUN_TIMEOUT_S)
        return _as_text(result) + ("\n(all variables are gone)" if result.state_lost else "")

    def close(self) -> None:
        """End the session's processes."""
        self._open.close()


TOOL_FUNCTIONS = [python]
