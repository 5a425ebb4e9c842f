"""Runs tests in a process that never sees the model's code; calls of the solution are put to
whoever holds it.

The judge has no way to call the solution. Where a test calls it, the call's plain arguments go out
as a text, and what the solution's own process handed back comes in as one (`ask`). What comes in is
decoded here and nowhere else: it is a stranger's, and this process is as confined as the stranger's
own.

Invariants: an answer is data, so no value that reaches a test has behaviour of its own; nothing in
an answer makes a test count as one that cannot be split: it passes or it fails; a test that was
left without an answer fails, whatever it catches. Which suites cannot be split, and which pass
whatever is answered, is found by `explore`, which knows no solution at all.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Iterator
from typing import Any

from toolgrpo.sandbox.literals import NotPlainError, decode_text, encode, encode_text

Ask = Callable[[list[str]], dict[str, Any]]
"""A call `[function, arguments]` to what came of it: `{"answer": text}`, `{"error": text}`, `{"lost": text}`."""

Call = Callable[..., Any]

_MOST_LOOKS = 20_000  # at answers, to find out whether a suite can be split
_UNLIKELY = "3f1c0f6e an answer that no test expects"


class _SolutionFailed(Exception):
    """The solution's own process reported an exception."""


class _NoAnswer(BaseException):
    """The solution did not answer, or with a value that is no plain literal."""


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
    cannot run; and found by `explore` `unsplittable` and `useless`.
    """
    report = {"status": "ok", "exit_code": 0}
    return {**report, **(_explored(suite) if suite["explore"] else _run(suite, _Asking(ask)))}


class _Answers:
    """Gives the tests what they take from the solution; `missed` says what a test got no answer to."""

    missed: str | None = None

    def stand_in(self, function: str) -> Call:
        raise NotImplementedError


def _run(suite: dict[str, Any], answers: _Answers) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__judge__", "__builtins__": builtins}
    namespace.update({name: answers.stand_in(function) for name, function in suite["names"].items()})
    try:
        exec(suite["prelude"], namespace)
    except BaseException as error:  # the row's
        return {"broken": f"{type(error).__name__}: {error}"[:500]}
    return {"verdicts": [_verdict(test, namespace, answers) for test in suite["tests"]]}


def _verdict(test: str, namespace: dict[str, Any], answers: _Answers) -> list[str]:
    random.seed(0)
    answers.missed = None
    try:
        exec(test, namespace)
    except (_Unsplittable, _Enough):
        raise
    except BaseException as error:  # of a test of any shape
        return ["fail", f"{type(error).__name__}: {error}"[:500] if answers.missed is None else answers.missed]
    return ["pass"] if answers.missed is None else ["fail", answers.missed]


class _Asking(_Answers):
    """Puts each call to who holds the solution."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def stand_in(self, function: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = encode_text([args, kwargs])
            except (NotPlainError, RecursionError) as error:
                raise self._no_answer(f"{function} would be called with more than plain literals: {error}") from None
            came = self._ask([function, arguments])
            if "error" in came:
                raise _SolutionFailed(came["error"])
            if "answer" not in came:
                raise self._no_answer(came["lost"])
            try:
                return decode_text(came["answer"])
            except (NotPlainError, RecursionError) as error:
                raise self._no_answer(f"{function} gave no plain literal: {error}") from None

        return call

    def _no_answer(self, why: str) -> _NoAnswer:
        self.missed = why[:500]
        return _NoAnswer(why)


def _explored(suite: dict[str, Any]) -> dict[str, Any]:
    """Look through a suite with an answer that goes along with everything, then with two that fit nothing."""
    asked, passed = 0, True
    for answer in (_Anything(iter(range(_MOST_LOOKS))), None, _UNLIKELY):
        answers = _Exploring(answer)
        try:
            found = _run(suite, answers)
        except (_Unsplittable, _Enough) as ended:
            if isinstance(ended, _Unsplittable) and isinstance(answer, _Anything):
                return {"unsplittable": str(ended)[:500]}
            found = {"verdicts": [["fail"]]}
        if "broken" in found:
            return found
        asked += answers.asked
        passed = passed and (isinstance(answer, _Anything) or all(one == ["pass"] for one in found["verdicts"]))
    if not asked:
        return {"useless": "never ask the program: what they call is their own or Python's"}
    return {"useless": "pass whatever the program answers"} if passed else {}


class _Exploring(_Answers):
    """Has one answer to every call."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.asked = 0

    def stand_in(self, function: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _holds_anything([args, kwargs]):
                try:
                    encode([args, kwargs])
                except NotPlainError as error:
                    raise _Unsplittable(f"{function} is called with more than plain literals: {error}") from None
            self.asked += 1
            if self.asked > _MOST_LOOKS:
                raise _Enough
            return self._answer

        return call


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
