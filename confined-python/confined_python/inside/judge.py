"""Runs tests in a process that never sees the model's code; calls of the solution are put to
whoever holds it.

The judge has no way to call the solution. Where a test calls it, the call's plain arguments go out
as a text, and what the solution's own process handed back comes in as one (`ask`). What comes in is
decoded here and nowhere else: it is a stranger's, and this process is as confined as the stranger's
own. What is no plain literal (an object of a class, a generator) stays there and has a number here;
its attributes, calls and items are asked for like any call, and nothing compares it.

Invariants: an answer is data, so no value that reaches a test has behaviour of its own; nothing in
an answer makes a test count as one that cannot be split: it passes or it fails; a test that was
left without an answer fails, whatever it catches. Which suites cannot be split, and which pass
whatever is answered, is found by `explore`, which knows no solution at all.
"""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from confined_python.literals import NotPlainError, decode_text, encode, encode_text, form_of_python, python_of_form

Ask = Callable[[list[str]], dict[str, Any]]
"""A call `[function, arguments]` to what came of it: `{"answer": text}`, `{"error": text, "raised": text}` for an
exception, `{"lost": text}` for neither."""

ON_ARGUMENTS = ".on_arguments"
"""Calls the function that the first argument names; the answer is its value, and its arguments as they are then."""

Call = Callable[..., Any]

_MOST_LOOKS = 20_000  # at answers, to find out whether a suite can be split
_MOST_ITEMS = 256  # of an iterator, asked for at a time; fewer of its first, for who wants no more
_STANDARD = sys.stdlib_module_names
_UNLIKELY = "3f1c0f6e an answer that no test expects"


class _NoAnswer(BaseException):
    """The solution did not answer, or with what the tests cannot be told."""


class _Unsplittable(BaseException):
    """A call that cannot be made in another process; no `except Exception` of a test may swallow
    it.
    """


class _Enough(BaseException):
    """More was done with answers than is followed."""


def judge(suite: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Run a suite and report on it.

    The suite: `prelude`, `tests`, `names`, `in_place` where functions change their arguments, and
    `explore` where no solution is to be asked.
    The report: `verdicts`, per test `["pass"]` or `["fail", why]`; `compared`, whether an object of
    the solution would have been; `broken`, why the prelude cannot run; and found by `explore`
    `unsplittable` and `useless`.
    """
    report = {"status": "ok", "exit_code": 0}
    if suite["explore"]:
        return {**report, **_explored(suite)}
    answers = _Asking(ask, suite["in_place"])
    return {**report, **_run(suite, answers), "compared": answers.compared}


class _Answers:
    """Gives the tests what they take from the solution; `missed` says what a test got no answer to."""

    asked = 0
    missed: str | None = None

    def stand_in(self, function: str) -> Call:
        raise NotImplementedError


def _run(suite: dict[str, Any], answers: _Answers) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__judge__", "__builtins__": builtins}
    namespace.update({name: answers.stand_in(function) for name, function in suite["names"].items()})
    set_up = _verdict(suite["prelude"], namespace, answers)
    if set_up != ["pass"]:
        return {"verdicts": [set_up] * len(suite["tests"])} if answers.asked else {"broken": set_up[1]}
    return {"verdicts": [_verdict(test, namespace, answers) for test in suite["tests"]]}


def _verdict(test: str, namespace: dict[str, Any], answers: _Answers) -> list[str]:
    random.seed(0)
    answers.missed = None
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
    except (_Unsplittable, _Enough):
        raise
    except BaseException as error:  # of a test of any shape
        return ["fail", answers.missed or error_text(error)]
    return ["pass"] if answers.missed is None else ["fail", answers.missed]


def error_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # its text is made by an object of the solution
        return f"{type(error).__name__}, which could not be printed"


class _Asking(_Answers):
    """Puts each call to who holds the solution."""

    def __init__(self, ask: Ask, in_place: bool) -> None:
        self._ask = ask
        self._in_place = in_place
        self.compared = False
        self._objects: dict[int, _Object] = {}

    def stand_in(self, function: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._in_place:
                return self.ask(function, *args, **kwargs)
            came = self.ask(ON_ARGUMENTS, function, *args, **kwargs)
            try:
                value, args_after, kwargs_after = came
                _write_back([*args, kwargs], [*args_after, kwargs_after])
            except (TypeError, ValueError):
                raise self.no_answer(f"{function} gave its arguments back in another form") from None
            return value

        return call

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        try:
            arguments = encode_text([list(args), kwargs], _form)
        except (NotPlainError, RecursionError) as error:
            raise self.no_answer(f"{function} would be called with more than plain literals: {error}") from None
        came = self._ask([function, arguments])
        try:
            if "answer" in came:
                return decode_text(came["answer"], self._by_form)
            raised = _exception(*decode_text(came["raised"])) if "raised" in came else None
        except (NotPlainError, RecursionError, TypeError, ValueError) as error:
            raise self.no_answer(f"{function} gave no plain literal: {error}") from None
        asked = args[0] if function == ON_ARGUMENTS else function
        if isinstance(raised, StopIteration) and not asked.startswith("."):
            raise self.no_answer(f"{asked} raised StopIteration")  # which would end a loop of the tests, and pass
        if raised is not None:
            raise raised
        raise self.no_answer(came.get("lost") or came.get("error") or "no answer")

    def no_answer(self, why: str) -> _NoAnswer:
        self.missed = why[:500]
        return _NoAnswer(why)

    def _by_form(self, tag: str, body: Any) -> Any:
        if tag != "o" or type(body) is not int:
            return python_of_form(tag, body)
        return self._objects.setdefault(body, _Object(self, body))


def _form(value: Any) -> dict[str, Any]:
    """Return the form of what is no plain literal, where the solution's process knows it."""
    return {"o": value._Object__number} if type(value) is _Object else form_of_python(value)


class _Object:
    """An object of the solution, which stays in its process: what a test does with it is asked there.

    The answers are plain or such objects again. Not compared: it would be its own judge.
    """

    __slots__ = ("__answers", "__number")
    __hash__ = None  # type: ignore[assignment]  # a set compares

    def __init__(self, answers: _Asking, number: int) -> None:
        object.__setattr__(self, "_Object__answers", answers)
        object.__setattr__(self, "_Object__number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__answers.ask(".call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # no protocol but those below
            raise AttributeError(name)
        return self.__answers.ask(".get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__answers.ask(".set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__answers.ask(".item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__answers.ask(".put", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.__answers.ask(".del", self, key)

    def __contains__(self, item: Any) -> bool:
        """Look through what it iterates over: asked itself, it could say yes to everything."""
        try:
            return any(one is item or one == item for one in self)
        except TypeError:
            self.__answers.compared = True
            raise self.__answers.no_answer(
                "the tests ask what is in an object of the program that cannot be iterated over"
            ) from None

    def __enter__(self) -> Any:
        return self.__answers.ask(".enter", self)

    def __exit__(self, *raised: object) -> None:
        self.__answers.ask(".exit", self)  # an exception of the test's own stays here

    def __iter__(self) -> Iterator[Any]:
        iterator, most = self.__answers.ask(".iter", self), 1
        while True:
            items = self.__answers.ask(".take", iterator, most)
            yield from items
            if len(items) < most:
                return
            most = min(2 * most, _MOST_ITEMS)

    def __next__(self) -> Any:
        return self.__answers.ask(".next", self)

    def __len__(self) -> int:
        return self.__answers.ask(".len", self)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return self.__answers.ask(".bool", self)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return self.__answers.ask(".str", self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.__answers.ask(".repr", self)  # type: ignore[no-any-return]

    def __eq__(self, *_: object) -> bool:
        self.__answers.compared = True
        raise self.__answers.no_answer("the tests compare an object of the program, which is no plain literal")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __eq__
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __eq__
    __and__ = __or__ = __xor__ = __eq__


def _exception(classes: Any, args: Any) -> BaseException | None:
    """Return the exception that these classes name: the first that Python has itself."""
    for module, name in classes:
        known = _known(module, name)
        if isinstance(known, type) and issubclass(known, BaseException):
            try:
                return known(*args)
            except Exception:  # its class takes others than it keeps
                with suppress(TypeError):
                    error = known.__new__(known)
                    error.args = tuple(args)
                    return error
    return None


def _known(module: str, name: str) -> Any:
    """Return what a module of the standard library that is loaded calls so."""
    if module.partition(".")[0] not in _STANDARD or module not in sys.modules:
        return None
    return vars(sys.modules[module]).get(name)


def _write_back(old: Any, new: Any) -> Any:
    """Make an argument what the solution made of it, in place; return what stands for it now."""
    if type(old) is not type(new) or not isinstance(old, list | dict | set | bytearray):
        return new
    if isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, list):
        old[:] = [*map(_write_back, old, new), *new[len(old) :]]
    elif isinstance(old, dict):
        merged = {key: _write_back(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
    else:
        old.clear()
        old.update(new)
    return old


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

    def stand_in(self, function: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _holds_anything([args, kwargs]):
                try:
                    encode([args, kwargs], 0, _form)
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

    def __setitem__(self, key: Any, value: Any) -> None:
        self()

    def __delitem__(self, key: Any) -> None:
        self()

    def __enter__(self) -> _Anything:
        return self()

    def __exit__(self, *raised: object) -> None:
        self()

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
