"""Tests of a solution, read without running them: what they take from it, can they be split.

Understood: a list of asserts (MBPP) and a `check(candidate)` function with an entry point
(HumanEval). A suite is splittable when every name that it takes from the solution is only called:
so the call can be made in the solution's process and everything else outside.

Whose is a name? The tests', where they bind it; the solution's, where nobody else has it. A name of
Python's own (`sum`) is the solution's if it is the entry point, or if the tests call nothing else
of the solution and the reference defines it, or, without a reference, if it is the only one that
they call. A module of the standard library that the tests use without importing it is that module.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from toolgrpo.errors import DataError

_BUILT_IN = frozenset(dir(builtins)) | {"__name__"}


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
            raise DataError("a suite needs at least one test; got none")


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
    """Read the tests; DataError where they are no Python."""
    before, tests, body = f"{suite.imports}\n{suite.setup}", suite.tests, _parse("\n".join(suite.tests), "tests")
    about, aliases, own = suite.entry_point, {}, set()
    if about is not None and (check := _check_of(body)) is not None:
        before, tests, body = f"{before}\n{check.around}", check.tests, check.body
        aliases = {check.parameter: about}
    elif about is not None:
        own = {about}
        if about not in _called(body):
            raise DataError(
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
        return {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _meant(called: set[str], reference: str) -> set[str]:
    """Return those names of Python's own that are the solution's, where the tests call no other."""
    defined = _defined(reference)
    return called & defined if defined else called if len(called) == 1 else set()


def needs_more_than(imports: str, expression: ast.expr) -> bool:
    """Return whether an expression reads a name that neither it, imports nor Python give."""
    return bool(_loaded(expression) - _bound(_parse(imports, "imports")) - _bound(expression) - _BUILT_IN)


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
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the {what} of a code task are no Python ({error}): {source[:120]!r}. Mend the row") from None


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
