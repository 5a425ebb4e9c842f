"""Runs tests in a process that never sees the model's code; calls of the solution are put to
whoever holds it.

The judge has no way to call the solution. Where a test calls it, the call's plain arguments go out
as a text, and what the solution's own process handed back comes in as one (`ask`). What comes in is
decoded here and nowhere else: it is a stranger's, and this process is as confined as the stranger's
own.

Invariants: an answer is data, so no value that reaches a test has behaviour of its own; nothing in
an answer makes a test count as one that cannot be split: it passes or it fails. Which suites cannot
be split is found by `explore`, which knows no solution at all.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Iterator
from typing import Any

from toolgrpo.sandbox.literals import NotPlainError, decode_text, encode, encode_text

__all__ = ["judge"]

Ask = Callable[[list[str]], dict[str, Any]]
"""A call `[function, arguments]` to what came of it: `{"answer": text}` or `{"error": text}`."""

_MOST_LOOKS = 20_000  # at answers, to find out whether a suite can be split


class _SolutionFailed(Exception):
    """The solution's own process reported an exception, or a value that is no plain literal."""


class _Unsplittable(BaseException):
    """A call that cannot be made in another process; no `except Exception` of a test may swallow
    it.
    """


class _Enough(BaseException):
    """More was done with answers than is followed."""


def judge(suite: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Run a suite and report on it.

    The suite: `prelude`, `tests`, `names`, and `explore` where no solution is to be asked.
    The report: `verdicts`, per test `["pass"]` or `["fail", why]`; `broken`, why the prelude
    cannot run; `unsplittable`, found by `explore`.
    """
    call = _exploring_stand_ins() if suite["explore"] else _asking_stand_ins(ask)
    namespace: dict[str, Any] = {"__name__": "__judge__", "__builtins__": builtins}
    namespace.update({name: call(name) for name in suite["names"]})
    report: dict[str, Any] = {"status": "ok", "exit_code": 0}
    try:
        exec(suite["prelude"], namespace)
    except BaseException as error:  # the row's
        return {**report, "broken": f"{type(error).__name__}: {error}"[:500]}
    try:
        return {**report, "verdicts": [_verdict(test, namespace) for test in suite["tests"]]}
    except _Unsplittable as found:
        return {**report, "unsplittable": str(found)[:500]}
    except _Enough:
        return {**report, "verdicts": []}


def _verdict(test: str, namespace: dict[str, Any]) -> list[str]:
    random.seed(0)
    try:
        exec(test, namespace)
    except (_Unsplittable, _Enough):
        raise
    except BaseException as error:  # of a test of any shape
        return ["fail", f"{type(error).__name__}: {error}"[:500]]
    return ["pass"]


def _asking_stand_ins(ask: Ask) -> Callable[[str], Callable[..., Any]]:
    """Return a maker of stand-ins that put each call to who holds the solution."""

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = encode_text([args, kwargs])
            except (NotPlainError, RecursionError) as error:
                raise _SolutionFailed(f"{name} would be called with more than plain literals: {error}") from None
            came = ask([name, arguments])
            if "answer" not in came:
                raise _SolutionFailed(came["error"])
            try:
                return decode_text(came["answer"])
            except (NotPlainError, RecursionError) as error:
                raise _SolutionFailed(f"{name} gave no plain literal: {error}") from None

        return call

    return stand_in


def _exploring_stand_ins() -> Callable[[str], Callable[..., Any]]:
    """Return a maker of stand-ins whose answer goes along with everything."""
    anything = _Anything(iter(range(_MOST_LOOKS)))

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _holds_anything([args, kwargs]):
                try:
                    encode([args, kwargs])
                except NotPlainError as error:
                    raise _Unsplittable(f"{name} is called with more than plain literals: {error}") from None
            return anything()

        return call

    return stand_in


def _holds_anything(value: Any, depth: int = 0) -> bool:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset) and depth < 100:
        return any(_holds_anything(item, depth + 1) for item in value)
    return isinstance(value, _Anything)


class _Anything:
    """An answer for a test that is only looked through: true, equal to all, and whatever else it
    has to be, for a while.
    """

    def __init__(self, looks: Iterator[int]) -> None:
        self._looks = looks

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        if next(self._looks, None) is None:
            raise _Enough
        return self

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):  # no protocol but those below
            raise AttributeError(name)
        return self()

    def __iter__(self) -> Iterator[_Anything]:
        return iter((self(), self))

    def __eq__(self, other: object) -> bool:
        return bool(self())

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 2

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __call__
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __call__
    __and__ = __or__ = __xor__ = __neg__ = __abs__ = __round__ = __getitem__ = __call__
