"""Tests of a solution, read without running them: what they take from it, can they be split.

Understood: a list of asserts (MBPP) and a `check(candidate)` function with an entry point
(HumanEval). A suite is splittable when every name that it takes from the solution is only called
(so the call can be made in the solution's process and everything else outside), and nothing before
the tests needs the solution.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from functools import lru_cache

from toolgrpo.errors import DataError

__all__ = ["Plan", "Suite", "needs_more_than", "plan"]

_BUILT_IN = frozenset(dir(builtins)) | {"__name__"}


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one task.

    `imports` run before the solution, `setup` after it and before the tests.
    """

    tests: tuple[str, ...]
    imports: str = ""
    setup: str = ""
    entry_point: str | None = None  # the function that a `check(candidate)` is about

    def __post_init__(self) -> None:
        if not self.tests:
            raise DataError("a suite needs at least one test; got none")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a suite is run: `tests` one by one after `prelude`; `names` come from the solution."""

    prelude: str
    tests: tuple[str, ...]
    names: tuple[str, ...]
    splittable: bool


@lru_cache(maxsize=4096)
def plan(suite: Suite) -> Plan:
    """Read the tests; DataError where they are no Python."""
    before = f"{suite.imports}\n{suite.setup}"
    tests = suite.tests
    if suite.entry_point is not None:
        defined, tests = _split_check("\n".join(suite.tests), suite.entry_point)
        before = f"{before}\n{defined}"
    setup, body = _parse(before, "setup"), _parse("\n".join(tests), "tests")
    own = _bound(setup) | _bound(body) | _BUILT_IN
    names = (_loaded(setup) | _loaded(body)) - own
    splittable = not (_loaded(setup) & names) and not _uncalled(body, names)
    return Plan(prelude=before, tests=tests, names=tuple(sorted(names)), splittable=splittable)


def needs_more_than(imports: str, expression: ast.expr) -> bool:
    """Return whether an expression reads a name that neither it, imports nor Python give."""
    return bool(_loaded(expression) - _bound(_parse(imports, "imports")) - _bound(expression) - _BUILT_IN)


def _split_check(source: str, entry_point: str) -> tuple[str, tuple[str, ...]]:
    """Return what stands around `check`, and its asserts as tests of their own.

    A `check` that has more than asserts is one test.
    """
    tree = _parse(source, "tests")
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None or len(check.args.args) != 1:
        raise DataError(f"the tests of {entry_point} hold no `def check(candidate):`; write one, or give asserts alone")
    calls_check = {id(node) for node in tree.body if isinstance(node, ast.Expr) and "check" in _loaded(node)}
    around = [node for node in tree.body if node is not check and id(node) not in calls_check]
    rename = _Rename(check.args.args[0].arg, entry_point)
    body = [ast.fix_missing_locations(rename.visit(node)) for node in check.body]
    outside = ast.unparse(ast.Module(around, []))
    if all(isinstance(node, ast.Assert) for node in body):
        return outside, tuple(ast.unparse(node) for node in body)
    return outside, (ast.unparse(ast.Module(body, [])),)


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self._new, node.ctx), node) if node.id == self._old else node


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


def _uncalled(tree: ast.AST, names: set[str]) -> set[str]:
    """Return the names of the solution that stand anywhere but before a call's brackets."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names and id(node) not in called
    }
