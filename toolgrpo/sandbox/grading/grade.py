"""Does a solution pass its tests? Answered so that the solution has no say in it.

Two processes: the solution's own only receives calls with literal arguments, after its code was loaded, and hands back
plain literals; the judge (judge.py) runs the tests on those and never sees the solution. Whatever the solution does to
`==`, to `print`, to builtins or to the frames it runs in happens in its own process, which holds no expected value.

Invariants: no answer is a fail, and so is a value that is no plain literal; how a suite is graded depends on the tests alone,
never on what the solution does. A lost worker is a SandboxError, never a fail.
Not covered: suites that need objects of the solution (`Grade.forgeable`, see docs/sandbox.md): their expressions are
evaluated in the solution's process, so a value that lies about itself can pass; helpers the tests take from the solution.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from toolgrpo.errors import DataError
from toolgrpo.sandbox.client.pool import Sandbox, Session
from toolgrpo.sandbox.grading.split_plan import Plan, Suite, plan, taken_from_solution

__all__ = ["Grade", "grade"]

_MOST_CALLS = 500  # of one test; more cannot be replayed in reasonable time
_Answers = list[list[tuple[bool, Any]]]


@dataclass(frozen=True, slots=True)
class Grade:
    """One entry per test in `passed`; `why` is the first failure's reason, for people."""

    passed: tuple[bool, ...]
    why: str = ""
    forgeable: bool = False

    @property
    def all_passed(self) -> bool:
        return bool(self.passed) and all(self.passed)


def grade(sandbox: Sandbox, program: str, suite: Suite, *, timeout: float | None = None) -> Grade:
    """Run `program` against its tests; `timeout` is for each of: loading it, a round of calls, a round of judging."""
    todo = plan(suite)
    with sandbox.session() as session:
        loaded = session.run(f"{suite.imports}\n{program}" if suite.imports else program, timeout=timeout)
        if not loaded.ok or loaded.state_lost:
            return Grade((False,) * len(todo.tests), why=(loaded.stderr.strip() or str(loaded.status))[-500:])
        split = _grade_split(sandbox, session, todo, timeout) if todo.splittable else None
        return split or _grade_forgeable(sandbox, session, suite, todo, timeout)


def _grade_split(sandbox: Sandbox, session: Session, todo: Plan, timeout: float | None) -> Grade | None:
    """Judge, answer the calls it asks for, judge again; None where a test turns out not to be splittable."""
    answers: _Answers = [[] for _ in todo.tests]
    while True:
        verdicts = _judge(sandbox, todo.prelude, todo.tests, todo.names, answers, timeout)
        if any(verdict[0] == "refuse" for verdict in verdicts) or max(map(len, answers)) > _MOST_CALLS:
            return None
        asked = [number for number, verdict in enumerate(verdicts) if verdict[0] == "need"]
        if not asked:
            return _grade(verdicts)
        calls = [_call_source(*verdicts[number][1:]) for number in asked]
        given = session.evaluate(calls, timeout=timeout)
        for number, answer in zip(asked, given, strict=True):
            answers[number].append(answer)


def _grade_forgeable(sandbox: Sandbox, session: Session, suite: Suite, todo: Plan, timeout: float | None) -> Grade:
    """The solution's process evaluates the expressions; the judge compares where the other side can be had without it."""
    if suite.setup.strip():
        ready = session.run(suite.setup, timeout=timeout)
        if not ready.ok:
            return Grade((False,) * len(todo.tests), why=ready.stderr[-500:], forgeable=True)
    comparisons = []
    for test in todo.tests:
        source, expected = _sides(test, todo.names)
        if source is None:
            ran = session.run(test, timeout=timeout)
            comparisons.append("pass" if ran.ok and not ran.state_lost else "assert False, 'the test failed'")
            continue
        ok, value = session.evaluate([source], timeout=timeout)[0]
        comparisons.append(f"assert ({_source(value)}) == ({expected})" if ok else f"assert False, {str(value)!r}")
    verdicts = _judge(sandbox, suite.imports, tuple(comparisons), (), [[] for _ in comparisons], timeout)
    return _grade(verdicts, forgeable=True)


def _sides(test: str, names: tuple[str, ...]) -> tuple[str | None, str]:
    """An expression for the solution's process, and one for the judge that must equal it; (None, "") for no single assert."""
    body = ast.parse(test).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return None, ""
    claim = body[0].test
    if isinstance(claim, ast.Compare) and len(claim.ops) == 1 and isinstance(claim.ops[0], ast.Eq):
        (right,) = claim.comparators
        if not taken_from_solution(right, names):
            return ast.unparse(claim.left), ast.unparse(right)
    return f"not not ({ast.unparse(claim)})", "True"


def _judge(
    sandbox: Sandbox,
    prelude: str,
    tests: tuple[str, ...],
    names: tuple[str, ...],
    answers: _Answers,
    timeout: float | None,
) -> list[list[Any]]:
    arguments = ", ".join(_source(value) for value in (prelude, list(tests), list(names), answers))
    judged = sandbox.run(f"from toolgrpo.sandbox.inside.judge import judge\njudge({arguments})", timeout=timeout)
    if judged.ok and judged.value_is_plain:
        verdicts: list[list[Any]] = judged.value
        if verdicts[0][0] == "broken":
            raise DataError(
                f"the imports or the set-up of a code task cannot run in the sandbox: {verdicts[0][1]}. Mend the row"
            )
        return verdicts
    return [["fail", f"the tests ended with status {judged.status}"] for _ in tests]


def _grade(verdicts: list[list[Any]], *, forgeable: bool = False) -> Grade:
    failures = [str(verdict[1]) for verdict in verdicts if verdict[0] == "fail"]
    return Grade(
        tuple(verdict[0] == "pass" for verdict in verdicts), why=failures[0] if failures else "", forgeable=forgeable
    )


def _call_source(name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    parts = [_source(value) for value in args] + [f"{key}={_source(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(parts)})"


def _source(value: Any) -> str:
    """Python for a plain value; unlike repr also for nan, inf and integers of any length."""
    match value:
        case bool() | None | str() | bytes():
            return repr(value)
        case int():
            return hex(value) if value.bit_length() > 10_000 else f"({value})" if value < 0 else repr(value)
        case float():
            return repr(value) if value - value == 0 else f"float('{value}')"
        case complex():
            return f"complex({_source(value.real)}, {_source(value.imag)})"
        case list():
            return f"[{', '.join(map(_source, value))}]"
        case tuple():
            return f"({''.join(f'{_source(item)}, ' for item in value)})"
        case set():
            return f"set([{', '.join(map(_source, value))}])"
        case frozenset():
            return f"frozenset([{', '.join(map(_source, value))}])"
        case dict():
            return f"{{{', '.join(f'{_source(key)}: {_source(item)}' for key, item in value.items())}}}"
        case _:
            raise TypeError(f"a {type(value).__name__} is not a plain literal")
