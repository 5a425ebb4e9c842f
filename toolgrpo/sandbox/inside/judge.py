"""Runs tests in a process that never sees the model's code; calls of the solution are answered from a list.

The judge has no way to call the solution. Where a test calls it, the answer is taken from what the solution's own
process gave for that call earlier; where there is none yet, the test stops and the call is asked for, and the next
judge, a new process, replays the test with one answer more. So the tests are plain Python (loops, helpers, `check(candidate)`)
and still nothing but plain literals passes between the two interpreters.

Invariants: a replay is deterministic (random is seeded); answers are used in the order of the calls.
Not covered: a solution that is to change its arguments in place; tests that give it functions or objects.
"""

from __future__ import annotations

import builtins
import copy
import random
from collections.abc import Callable
from typing import Any

from toolgrpo.sandbox.literals import NotPlainError, encode

__all__ = ["judge"]


class _Need(BaseException):
    """A call without an answer; no `except Exception` of a test may swallow it."""

    def __init__(self, call: list[Any]) -> None:
        self.call = call


class _Refused(BaseException):
    """The test cannot be split."""


class _SolutionFailed(Exception):
    """What the solution's own process reported: an exception, or a value that is no plain literal."""


class _Answers:
    """The answers for the test that runs."""

    def __init__(self) -> None:
        self._left: list[tuple[bool, Any]] = []

    def begin(self, answers: list[tuple[bool, Any]]) -> None:
        self._left = list(answers)

    def stand_in(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._left:
                try:
                    encode([list(args), kwargs])
                except NotPlainError as error:
                    raise _Refused(f"{name} is called with more than plain literals: {error}") from None
                raise _Need(["need", name, list(args), kwargs])
            ok, value = self._left.pop(0)
            if not ok:
                raise _SolutionFailed(value)
            return copy.deepcopy(value)

        return call


def judge(prelude: str, tests: list[str], names: list[str], answers: list[list[tuple[bool, Any]]]) -> list[list[Any]]:
    """Per test `["pass"]`, `["fail", why]`, `["need", name, args, kwargs]` or `["refuse", why]`; `[["broken", why]]` for a bad prelude."""
    held = _Answers()
    namespace: dict[str, Any] = {"__name__": "__judge__", "__builtins__": builtins}
    namespace.update({name: held.stand_in(name) for name in names})
    try:
        exec(prelude, namespace)
    except Exception as error:
        return [["broken", f"{type(error).__name__}: {error}"[:500]]]
    verdicts: list[list[Any]] = []
    for test, given in zip(tests, answers, strict=True):
        held.begin(given)
        random.seed(0)
        verdicts.append(_verdict(test, namespace))
    return verdicts


def _verdict(test: str, namespace: dict[str, Any]) -> list[Any]:
    try:
        exec(test, namespace)
    except _Need as need:
        return need.call
    except _Refused as refused:
        return ["refuse", str(refused)]
    except Exception as error:  # of a test of any shape
        return ["fail", f"{type(error).__name__}: {error}"[:500]]
    return ["pass"]
