"""Does a solution pass its tests? Answered so that the solution has no say in it.

Two processes: the solution's own only receives calls with literal arguments, after its code was
loaded, and hands back plain literals, or numbers of objects that it keeps; the judge (judge.py) runs
the tests on those and never sees the solution. Whatever the solution does to `==`, to `print`, to builtins or to the frames it runs
in happens in its own process, which holds no expected value. The judge's process belongs to workers
that run judges alone, so nothing of a task is ever in a process that hosts a program.

Invariants: no answer is a fail, and so is an object of the solution where a test compares it; how a suite is graded
depends on the tests alone, and is settled before the solution is run; answers pass through this
process as texts that it does not read; one deadline holds for one grade. A lost worker is a
WorkerLostError, never a fail.
Not covered: suites that give the solution objects of theirs, or compare objects of the solution
(`SuiteGrade.forgeable`, see docs/background/sandbox.md): their expressions are evaluated in the solution's
process, so a value that lies about itself can pass; helpers the tests take from the solution.
"""

from __future__ import annotations

import ast
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolgrpo.errors import DataError
from toolgrpo.sandbox.client.pool import Sandbox, Session
from toolgrpo.sandbox.grading.split_plan import Plan, Suite, needs_more_than, plan
from toolgrpo.sandbox.literals import encode_text

_WIND_UP_S = 1.0  # for the judge to finish once the solution's time is over
_LEAST_S = 0.01  # a run needs some time, also where none is left
_MOST_REMEMBERED = 4096  # suites
_NO_ANSWER = {"lost": "the solution's process has ended, or its time is over"}

Answered = Callable[[str, str], dict[str, str]]
"""A function's name and the text of its arguments, to `{"answer": text}`, `{"error": text}` for an exception
of it, or `{"lost": text}` where there is neither."""


@dataclass(frozen=True, slots=True)
class SuiteGrade:
    """One entry per test in `passed`; `why` is the first failure's reason, for people.

    `compared`: the tests compare what the solution gave, and it is no plain literal.
    """

    passed: tuple[bool, ...]
    why: str = ""
    forgeable: bool = False
    compared: bool = False

    @property
    def all_passed(self) -> bool:
        return bool(self.passed) and all(self.passed)


@dataclass(frozen=True, slots=True)
class _Deadline:
    """The end of a solution's time."""

    at: float

    def left_s(self) -> float:
        return max(self.at - time.monotonic(), _LEAST_S)

    def is_over(self) -> bool:
        return time.monotonic() >= self.at

    def later(self, by_s: float) -> _Deadline:
        return _Deadline(self.at + by_s)


def grade(
    sandbox: Sandbox, program: str, suite: Suite, *, timeout: float | None = None, refuse_forgeable: bool = False
) -> SuiteGrade:
    """Run `program` against its tests within `timeout`, by default the sandbox's `timeout_s`.

    `refuse_forgeable`: what a forgeable suite gets is a fail, and the program is not run.
    """
    todo = plan(suite)
    most_s = sandbox.limits.timeout_s if timeout is None else timeout
    reason = forgeable_because(sandbox, suite)
    if reason is not None and refuse_forgeable:
        return SuiteGrade((False,) * len(todo.tests), why=reason, forgeable=True)
    deadline = _Deadline(time.monotonic() + most_s)
    with sandbox.session() as session:
        source = f"{suite.imports}\n{program}" if suite.imports else program
        loaded = session.run(source, timeout=deadline.left_s())
        if not loaded.ok or loaded.state_lost:
            why = (loaded.stderr.strip() or str(loaded.status))[-500:]
            return SuiteGrade((False,) * len(todo.tests), why=why, forgeable=reason is not None)
        solution = _Solution(session, deadline)
        if reason is not None:
            return _grade_forgeable(sandbox, solution, suite, todo, deadline)
        return _judged(sandbox, todo, solution.answered, deadline)


class _Solution:
    """The process that holds the solution, asked for one call after the other.

    Once it is lost it gives no more answers.
    """

    def __init__(self, session: Session, deadline: _Deadline) -> None:
        self._session = session
        self._deadline = deadline
        self._lost = False

    def answered(self, function: str, arguments: str) -> dict[str, str]:
        if self._lost or self._deadline.is_over():
            return _NO_ANSWER
        said = self._session.exchange({"call": [function, arguments]}, timeout=self._deadline.left_s())
        if said is None:
            self._lost = True
            return _NO_ANSWER
        told = {key: said[key] for key in ("answer", "error", "raised", "lost") if type(said.get(key)) is str}
        return told or {"lost": "no answer"}

    def value_of(self, source: str) -> dict[str, str]:
        return self.answered(f"lambda: ({source})", encode_text([[], {}]))

    def reaches_the_end_of(self, statement: str) -> bool:
        """Return whether what comes after a statement is reached.

        What comes after is a word drawn now, so that no exit passes for it.
        """
        if self._lost or self._deadline.is_over():
            return False
        word = secrets.token_hex(16)
        ran = self._session.run(f"{statement}\n{word!r}", timeout=self._deadline.left_s())
        self._lost = ran.state_lost
        return ran.ok and not ran.state_lost and ran.value == word


def _judged(
    sandbox: Sandbox, todo: Plan, answered: Answered, deadline: _Deadline, *, forgeable: bool = False
) -> SuiteGrade:
    """Have the tests run in a judge's process, and put the calls that they make to the solution."""
    last = deadline.later(_WIND_UP_S)
    with sandbox.judging() as judging:
        said = judging.exchange(_suite_job(todo, explore=False), timeout=last.left_s())
        while said is not None and (need := said.get("need")) is not None:
            function, arguments = need
            came = answered(function, arguments)
            said = None if last.is_over() else judging.exchange({"came": came}, timeout=last.left_s())
    said = _checked(said or {})
    verdicts = _verdicts(said, todo)
    failures = [verdict[1] for verdict in verdicts if verdict[0] != "pass"]
    passed = tuple(verdict[0] == "pass" for verdict in verdicts)
    return SuiteGrade(
        passed, why=failures[0] if failures else "", forgeable=forgeable, compared=said.get("compared") is True
    )


def _verdicts(said: dict[str, Any], todo: Plan) -> list[list[str]]:
    verdicts: list[list[str]] = said.get("verdicts", [])
    if len(verdicts) != len(todo.tests):
        return [["fail", "the tests did not come to an end in their time and memory"]] * len(todo.tests)
    return verdicts


def _suite_job(todo: Plan, *, explore: bool) -> dict[str, Any]:
    suite = {"prelude": todo.prelude, "tests": list(todo.tests), "names": dict(todo.names), "in_place": todo.in_place}
    return {"suite": {**suite, "explore": explore}}


class _Remembered:
    """What was found out about suites, by suite."""

    def __init__(self) -> None:
        self._found: dict[Suite, dict[str, Any]] = {}
        self._unfinished: set[Suite] = set()
        self._lock = threading.Lock()

    def of(self, suite: Suite, explored: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Return what `explored` says of a suite, asked once.

        It is asked a second time where the first came to no end, as it may on a busy machine.
        """
        with self._lock:
            if suite in self._found:
                return self._found[suite]
        said = explored()
        with self._lock:
            if said is None and suite not in self._unfinished:
                self._unfinished.add(suite)
                return {}
            if len(self._found) >= _MOST_REMEMBERED:
                self._found.clear()
                self._unfinished.clear()
            return self._found.setdefault(suite, said or {})


_remembered = _Remembered()


def forgeable_because(sandbox: Sandbox, suite: Suite) -> str | None:
    """Return why the tests of a suite are forgeable, None where they are not.

    It is found with no solution to ask. DataError where the tests are of no use.
    """
    todo = plan(suite)
    if not todo.splittable:
        return "the tests use a function or class of the program otherwise than by calling it"

    def explored() -> dict[str, Any] | None:
        with sandbox.judging() as judging:
            return judging.exchange(_suite_job(todo, explore=True), timeout=sandbox.limits.timeout_s)

    reason: str | None = _checked(_remembered.of(suite, explored)).get("unsplittable")
    return reason


def _checked(said: dict[str, Any]) -> dict[str, Any]:
    """Return what a judge said; DataError where it says that the row is of no use."""
    if "broken" in said:
        raise DataError(
            f"the imports or the set-up of a code task cannot run in the sandbox: {said['broken']}. Mend the row"
        )
    if "useless" in said:
        raise DataError(f"the tests of a code task {said['useless']}. Mend the row")
    return said


def _grade_forgeable(
    sandbox: Sandbox, solution: _Solution, suite: Suite, todo: Plan, deadline: _Deadline
) -> SuiteGrade:
    """Have the solution's process evaluate the expressions, and a judge compare what it can.

    It can where the other side of a comparison can be had without the solution.
    """
    aliases = [f"{name} = globals()[{function!r}]" for name, function in todo.names if name != function]
    if not solution.reaches_the_end_of("\n".join([todo.prelude, *aliases])):
        why = "the set-up of the tests did not come to an end with this solution"
        return SuiteGrade((False,) * len(todo.tests), why=why, forgeable=True)
    sides = [_sides(test, suite.imports) for test in todo.tests]
    names = [f"_side_{number}" for number in range(len(sides))]

    def answered(name: str, _: str) -> dict[str, str]:
        number = names.index(name)
        source = sides[number].solutions
        if source is not None:
            return solution.value_of(source)
        return {"answer": encode_text(solution.reaches_the_end_of(todo.tests[number]))}

    tests = tuple(f"assert {name}() == ({side.judges})" for name, side in zip(names, sides, strict=True))
    compared = Plan(prelude=suite.imports, tests=tests, names=tuple(zip(names, names, strict=True)), splittable=True)
    return _judged(sandbox, compared, answered, deadline, forgeable=True)


@dataclass(frozen=True, slots=True)
class _Sides:
    """What the solution's process evaluates, None for a statement; what it is to equal."""

    solutions: str | None
    judges: str


def _sides(test: str, imports: str) -> _Sides:
    body = ast.parse(test).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return _Sides(None, "True")
    claim = body[0].test
    if isinstance(claim, ast.Compare) and len(claim.ops) == 1 and isinstance(claim.ops[0], ast.Eq):
        (right,) = claim.comparators
        if not needs_more_than(imports, right):
            return _Sides(ast.unparse(claim.left), ast.unparse(right))
    return _Sides(f"not not ({ast.unparse(claim)})", "True")
