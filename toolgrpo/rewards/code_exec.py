"""`code_exec`: 1.0 if the program of the final response passes all of its row's tests in the sandbox, else 0.0.

The program is the last fenced block of Python, or the whole response where that is Python itself. Columns: `tests` (a list
of asserts, or a text with `def check(candidate)`), and where a row has them `test_imports`, `test_setup_code`, `entry_point`.

Invariants: grading cannot be forged by the program (toolgrpo/sandbox/grading/grade.py says how, and for which tests it can); a sandbox
that fails is opened anew once, then the error stops the training: it is never a score.
"""

from __future__ import annotations

import ast
import atexit
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from toolgrpo.errors import RewardError, SandboxError
from toolgrpo.rewards.episode_reading import final_answer
from toolgrpo.sandbox import Sandbox
from toolgrpo.sandbox.grading import grade
from toolgrpo.sandbox.grading.split_plan import Suite
from toolgrpo.trajectory import Message

__all__ = ["code_exec", "program_of"]

_TIMEOUT_S = 10.0
_WORKERS = max(2, min(8, os.cpu_count() or 2))
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3", "")


def code_exec(
    completions: Sequence[Sequence[Message]],
    tests: Sequence[str | Sequence[str]],
    test_imports: Sequence[str | None] | None = None,
    test_setup_code: Sequence[str | None] | None = None,
    entry_point: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> list[float]:
    nothing: Sequence[str | None] = [None] * len(completions)
    columns = zip(tests, test_imports or nothing, test_setup_code or nothing, entry_point or nothing, strict=True)
    suites = [_suite(row, *cells) for row, cells in enumerate(columns)]
    programs = [program_of(final_answer(completion)) for completion in completions]
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="code-exec") as threads:
        return list(threads.map(_score, programs, suites))


def program_of(text: str) -> str | None:
    """The program of a response; None where it holds none."""
    fenced = [body for language, body in _FENCE.findall(text) if language.lower() in _PYTHON]
    if fenced:
        return str(fenced[-1])
    try:
        return text if ast.parse(text).body else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _suite(row: int, tests: Any, imports: str | None, setup: str | None, entry_point: str | None) -> Suite:
    cells = (tests,) if isinstance(tests, str) else tuple(tests or ())
    if not cells or not all(isinstance(test, str) and test.strip() for test in cells):
        raise RewardError(
            f"reward code_exec: the tests of row {row} must be a text or a list of texts, at least one; "
            f"got {str(tests)[:80]!r}"
        )
    return Suite(tests=cells, imports=imports or "", setup=setup or "", entry_point=entry_point or None)


def _score(program: str | None, suite: Suite) -> float:
    if program is None:
        return 0.0
    sandbox = _Shared.get()
    try:
        return float(grade(sandbox, program, suite, timeout=_TIMEOUT_S).all_passed)
    except SandboxError:
        return float(grade(_Shared.reopened(sandbox), program, suite, timeout=_TIMEOUT_S).all_passed)


class _Shared:
    """One sandbox a process, started by the first program that is scored."""

    _sandbox: Sandbox | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> Sandbox:
        with cls._lock:
            if cls._sandbox is None:
                cls._sandbox = Sandbox(workers=_WORKERS)
                atexit.register(cls._sandbox.close)
            return cls._sandbox

    @classmethod
    def reopened(cls, failed: Sandbox) -> Sandbox:
        """A new sandbox in the place of one that failed, however many threads saw it fail."""
        with cls._lock:
            if cls._sandbox is failed:
                cls._sandbox = None
        return cls.get()
