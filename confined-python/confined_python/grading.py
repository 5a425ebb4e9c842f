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
(`SuiteGrade.forgeable`, see README.md): their expressions are evaluated in the solution's
process, so a value that lies about itself can pass; helpers the tests take from the solution.
Runs in the client's process; what it judges and what judges are confined processes.
"""

from __future__ import annotations

import ast
import builtins
import secrets
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from confined_python.client.pool import Sandbox, Session
from confined_python.errors import UserError
from confined_python.literals import encode_text
from confined_python.parsing import parse_python

_BUILT_IN = frozenset(dir(builtins)) | {"__name__"}
_WIND_UP_S = 1.0  # for the judge to finish once the solution's time is over
_LEAST_S = 0.01  # a run needs some time, also where none is left
_MOST_EXPLORED = 4096  # suites
# As tests import a program: what stands under `if __name__ == "__main__":` is not run.
_AS_MODULE = "__name__ = 'program'\n__import__('sys').modules[__name__] = __import__('sys').modules['__main__']"
_NO_ANSWER = {"lost": "the solution's process has ended, or its time is over"}

_explored: dict[Suite, dict[str, Any]] = {}  # what a judge found out about a suite
Answered = Callable[[str, str], dict[str, str]]
"""A function's name and the text of its arguments, to `{"answer": text}`, `{"error": text}` for an exception
of it, or `{"lost": text}` where there is neither."""


# Tests of a solution, read without running them: what they take from it, can they be split.
#
# Understood: a list of asserts (MBPP) and a `check(candidate)` function with an entry point
# (HumanEval). A suite is splittable when every name that it takes from the solution is only called:
# so the call can be made in the solution's process and everything else outside.
#
# Whose is a name? The tests', where they bind it; the solution's, where nobody else has it. A name of
# Python's own (`sum`) is the solution's if it is the entry point, or if the tests call nothing else
# of the solution and the reference defines it, or, without a reference, if it is the only one that
# they call. A module of the standard library that the tests use without importing it is that module.


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one task.

    `imports` run before the solution, `setup` after it and before the tests.
    """

    tests: tuple[str, ...]
    imports: str = ""
    setup: str = ""
    entry_point: str | None = None  # the function that the tests are about; `check(candidate)` needs it
    reference: str = ""  # a solution that is right, where there is one
    in_place: bool = False  # its functions change their arguments; found where a test drops a result
    forgeable: bool = False  # the tests compare objects of the solution; found for any other object

    def __post_init__(self) -> None:
        if not self.tests:
            raise UserError("a suite needs at least one test; got none")


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for running a suite: `tests` one by one after `prelude`.

    `names` come from the solution: what the tests call each, and what the solution does.
    """

    prelude: str
    tests: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    splittable: bool
    in_place: bool = False  # what a call makes of its arguments reaches the tests


@lru_cache(maxsize=4096)
def plan(suite: Suite) -> Plan:
    """Read the tests; UserError where they are no Python."""
    before, tests, body = f"{suite.imports}\n{suite.setup}", suite.tests, _parse("\n".join(suite.tests), "tests")
    about, aliases, own = suite.entry_point, {}, set()
    if about is not None and (check := _check_of(body)) is not None:
        before, tests, body = f"{before}\n{check.around}", check.tests, check.body
        aliases = {check.parameter: about}
    elif about is not None:
        own = {about}
        if about not in _called(body):
            raise UserError(
                f"the tests of {about} neither call it nor hold a `def check(candidate):`; write one of the two"
            )
    setup = _parse(before, "setup")
    bound, called = _bound(setup) | _bound(body), _called(body)
    free = (_loaded(setup) | _loaded(body)) - bound - aliases.keys() - _BUILT_IN
    modules = {name for name in free & sys.stdlib_module_names if not _used_otherwise(body, name)}
    free -= modules
    free |= own - bound
    if not free and not aliases:
        free = _meant(called & _BUILT_IN - bound, suite.reference)
    names = {**{name: name for name in free}, **aliases}
    splittable = not suite.forgeable and not any(_uncalled(tree, names.keys()) for tree in (setup, body))
    prelude = "\n".join([*(f"import {name}" for name in sorted(modules)), before])
    in_place = suite.in_place or any(_drops_a_result(tree, names.keys()) for tree in (setup, body))
    return Plan(prelude, tests, tuple(sorted(names.items())), splittable, in_place)


def is_program(text: str) -> bool:
    """Return whether a text is Python that defines a function or a class."""
    return bool(_defined(text))


def _defined(program: str) -> set[str]:
    try:
        return {node.name for node in parse_python(program).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _meant(called: set[str], reference: str) -> set[str]:
    """Return those names of Python's own that are the solution's, where the tests call no other."""
    defined = _defined(reference)
    return called & defined if defined else called if len(called) == 1 else set()


@dataclass(frozen=True, slots=True)
class _Check:
    """A `check(candidate)`: what stands around it, its tests, and what it calls the solution."""

    around: str
    tests: tuple[str, ...]
    body: ast.Module
    parameter: str


def _check_of(tree: ast.Module) -> _Check | None:
    """Return the check; its asserts are tests of their own, one with more than asserts is one test."""
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        return None
    calls_check = {id(node) for node in tree.body if isinstance(node, ast.Expr) and "check" in _loaded(node)}
    around = [node for node in tree.body if node is not check and id(node) not in calls_check]
    parameter = check.args.args[0].arg
    tests = tuple(ast.unparse(node) for node in check.body)
    if not all(isinstance(node, ast.Assert) for node in check.body):
        tests = (f"{ast.unparse(check)}\ncheck({parameter})",)
    return _Check(ast.unparse(ast.Module(around, [])), tests, ast.Module(check.body, []), parameter)


def _parse(source: str, what: str) -> ast.Module:
    try:
        tree: ast.Module = parse_python(source)
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"the {what} of a code task are no Python ({error}): {source[:120]!r}. Mend the row") from None


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                bound.add(node.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(node.name)
            case ast.arg():
                bound.add(node.arg)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return bound


def _called(tree: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def _used_otherwise(tree: ast.AST, name: str) -> bool:
    """Return whether a name stands anywhere but before a dot."""
    dotted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return any(isinstance(n, ast.Name) and n.id == name and id(n) not in dotted for n in ast.walk(tree))


def _drops_a_result(tree: ast.AST, names: Collection[str]) -> bool:
    """Return whether a function of the solution is called for what it does alone."""
    calls = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id in names for call in calls)


def _uncalled(tree: ast.AST, names: Collection[str]) -> set[str]:
    """Return the names of the solution that stand anywhere but before a call's brackets."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {node.id for node in loaded if node.id in names and id(node) not in called}


# The grade of one solution.


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


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), _LEAST_S)


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
    deadline = time.monotonic() + most_s
    with sandbox.session() as session:
        # Imports apart, for a `from __future__` line of the program comes first; its last value is nobody's to see.
        loaded = session.run(f"{suite.imports}\n{_AS_MODULE}\nNone", timeout=_left_s(deadline))
        if loaded.ok and not loaded.state_lost:
            loaded = session.run(f"{program}\nNone", timeout=_left_s(deadline))
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

    def __init__(self, session: Session, deadline: float) -> None:
        self._session = session
        self._deadline = deadline
        self._lost = False

    def answered(self, function: str, arguments: str) -> dict[str, str]:
        if self._lost or time.monotonic() >= self._deadline:
            return _NO_ANSWER
        said = self._session.exchange({"call": [function, arguments]}, timeout=_left_s(self._deadline))
        if said is None:
            self._lost = True
            return _NO_ANSWER
        told = {key: said[key] for key in ("answer", "error", "raised", "lost") if type(said.get(key)) is str}
        return told or {"lost": "no answer"}

    def reaches_the_end_of(self, statement: str) -> bool:
        """Return whether what comes after a statement is reached.

        What comes after is a word drawn now, so that no exit passes for it.
        """
        if self._lost or time.monotonic() >= self._deadline:
            return False
        word = secrets.token_hex(16)
        ran = self._session.run(f"{statement}\n{word!r}", timeout=_left_s(self._deadline))
        self._lost = ran.state_lost
        return ran.ok and not ran.state_lost and ran.value == word


def _judged(
    sandbox: Sandbox, todo: Plan, answered: Answered, deadline: float, *, forgeable: bool = False
) -> SuiteGrade:
    """Have the tests run in a judge's process, and put the calls that they make to the solution."""
    last = deadline + _WIND_UP_S
    with sandbox.judging() as judging:
        said = judging.exchange(_suite_job(todo, explore=False), timeout=_left_s(last))
        while said is not None and (need := said.get("need")) is not None:
            function, arguments = need
            came = answered(function, arguments)
            said = None if time.monotonic() >= last else judging.exchange({"came": came}, timeout=_left_s(last))
    said = _checked(said or {})
    verdicts: list[list[str]] = said.get("verdicts", [])
    if len(verdicts) != len(todo.tests):
        verdicts = [["fail", "the tests did not come to an end in their time and memory"]] * len(todo.tests)
    passed = tuple(verdict[0] == "pass" for verdict in verdicts)
    why = next((verdict[1] for verdict in verdicts if verdict[0] != "pass"), "")
    return SuiteGrade(passed, why=why, forgeable=forgeable, compared=said.get("compared") is True)


def _suite_job(todo: Plan, *, explore: bool) -> dict[str, Any]:
    suite = {"prelude": todo.prelude, "tests": list(todo.tests), "names": dict(todo.names), "in_place": todo.in_place}
    return {"suite": {**suite, "explore": explore}}


def forgeable_because(sandbox: Sandbox, suite: Suite) -> str | None:
    """Return why the tests of a suite are forgeable, None where they are not.

    It is found with no solution to ask. UserError where the tests are of no use.
    """
    todo = plan(suite)
    if not todo.splittable:
        return "the tests use a function or class of the program otherwise than by calling it"
    found = _explored.get(suite)
    for _ in range(2):  # it may come to no end on a busy machine
        if found is None:
            with sandbox.judging() as judging:
                found = judging.exchange(_suite_job(todo, explore=True), timeout=sandbox.limits.timeout_s)
    if len(_explored) >= _MOST_EXPLORED:
        _explored.clear()
    _explored[suite] = found or {}
    reason: str | None = _checked(found or {}).get("unsplittable")
    return reason


def _checked(said: dict[str, Any]) -> dict[str, Any]:
    """Return what a judge said; UserError where it says that the row is of no use."""
    if "broken" in said:
        raise UserError(
            f"the imports or the set-up of a code task cannot run in the sandbox: {said['broken']}. Mend the row"
        )
    if "useless" in said:
        raise UserError(f"the tests of a code task {said['useless']}. Mend the row")
    return said


def _grade_forgeable(sandbox: Sandbox, solution: _Solution, suite: Suite, todo: Plan, deadline: float) -> SuiteGrade:
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
            return solution.answered(f"lambda: ({source})", encode_text([[], {}]))
        return {"answer": encode_text(solution.reaches_the_end_of(todo.tests[number]))}

    tests = tuple(f"assert {name}() == ({side.judges})" for name, side in zip(names, sides, strict=True))
    compared = Plan(prelude=suite.imports, tests=tests, names=tuple(zip(names, names, strict=True)), splittable=True)
    return _judged(sandbox, compared, answered, deadline, forgeable=True)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Expression for the solution's process (None for a statement), and the value that is expected."""

    solutions: str | None
    judges: str


def _sides(test: str, imports: str) -> _Sides:
    body = parse_python(test).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return _Sides(None, "True")
    claim = body[0].test
    if isinstance(claim, ast.Compare) and len(claim.ops) == 1 and isinstance(claim.ops[0], ast.Eq):
        (right,) = claim.comparators
        if not _loaded(right) - _bound(_parse(imports, "imports")) - _bound(right) - _BUILT_IN:
            return _Sides(ast.unparse(claim.left), ast.unparse(right))
    return _Sides(f"not not ({ast.unparse(claim)})", "True")
