"""`code_exec`: 1.0 if the program of the final response passes all of its row's tests in the
sandbox, else 0.0.

The program is the last fenced block of Python that defines what the tests ask for, with earlier blocks that it needs;
or the whole response where that is Python itself. So an example, an output or an explanation may follow it.
Columns: `tests` (a list of asserts, or a text with `def check(candidate)`), and where a row has
them `test_imports`, `test_setup_code`, `entry_point`, `answer` (a program that is right; where its
own does not pass, a row is refused and its episodes dropped), and
`allow_forgeable`: true for a row whose tests give the solution objects of theirs or compare objects
of it, which scores 0 otherwise.

Invariants: grading cannot be forged by the program (confined_python/grading.py says how) but
in rows that allow it; a sandbox that fails is opened anew once, then the error stops the training:
it is never a score. A program that takes two workers down, on a machine whose sandbox runs others,
scores 0. Logged are the shares of rows with such tests (`code_exec/forgeable`), of programs that did
that (`code_exec/worker_lost`), of those that failed since a test would compare an object of theirs
(`code_exec/compared`), and of episodes in refused rows (`code_exec/refused`).
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

from confined_python import SHARED_WORKERS, Sandbox, SharedSandbox, parse_python
from confined_python.grading import Suite, forgeable_because, grade, is_program, plan
from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.episode.trajectory import Message, final_answer
from toolgrpo.errors import RewardError, SandboxError, UserError, WorkerLostError
from toolgrpo.rewards.base import Score, row_name

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0  # of one grade
_SHARED = SharedSandbox()  # one per process, started by the first program that is scored
_OPENING = re.compile(r"[ \t]*```[ \t]*([\w+-]*)")
_CLOSING = re.compile(r"[ \t]*```[ \t]*")
_INDENT = re.compile(r"(?m)^([ \t]*)\S")  # of the first line that says anything
_MOST_PARSED = 10_000  # characters; Python's own parser takes quadratic time for some texts
_COLUMNS = ("tests", "test_imports", "test_setup_code", "entry_point", "answer", "allow_forgeable")
_PYTHON = ("python", "py", "python3", "")


@dataclass(frozen=True, slots=True)
class _Score:
    """Result of a graded program.

    `forgeable`: its tests are; `worker_lost`: it took its worker down, twice; `compared`: a test would
    compare an object of it; `refused`: its row is.
    """

    value: Score
    forgeable: bool = False
    worker_lost: bool = False
    compared: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """Plan for grading programs of a row, or the reason why there is none: as it says, or as `_settled` found."""

    suite: Suite
    allow_forgeable: bool
    refused: str | None = None


def code_exec(
    completions: Sequence[Sequence[Message]],
    tests: Sequence[str | Sequence[str]],
    answer: Sequence[Any] | None = None,
    test_imports: Sequence[str | None] | None = None,
    test_setup_code: Sequence[str | None] | None = None,
    entry_point: Sequence[str | None] | None = None,
    allow_forgeable: Sequence[bool | None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[Score]:
    nothing: Sequence[Any] = [None] * len(completions)
    columns = zip(
        tests,
        test_imports or nothing,
        test_setup_code or nothing,
        entry_point or nothing,
        answer or nothing,
        allow_forgeable or nothing,
        strict=True,
    )
    asked = [_read(row, *cells) for row, cells in enumerate(columns)]
    first = list(dict.fromkeys(asked))
    with ThreadPoolExecutor(SHARED_WORKERS, thread_name_prefix="code-exec") as threads:
        settled = dict(zip(first, threads.map(_settled_or_refused, first), strict=True))
        plans = [settled[row] for row in asked]
        programs = [
            program_of(final_answer(completion), _wanted(row.suite))
            for completion, row in zip(completions, plans, strict=True)
        ]
        scores = list(threads.map(_score, programs, plans))
    if log_metric is not None and scores:
        for name in ("forgeable", "worker_lost", "compared", "refused"):
            log_metric(f"code_exec/{name}", sum(getattr(score, name) for score in scores) / len(scores))
    return [score.value for score in scores]


def program_of(text: str, wanted: Collection[str] = ()) -> str | None:
    """Return the program of a response that is to define these names; None where it holds none."""
    blocks = _fenced(f"{text}\n```")  # one that is never closed too
    if (program := _defining(blocks, wanted)) is not None:
        return program
    if rest := _fenced(text) or [block for block in blocks if block.strip()]:
        return rest[-1]
    if len(text) > _MOST_PARSED:  # the sandbox will find out, and has a deadline
        return text
    tree = _parsed(text)
    return text if tree is not None and tree.body else None


def _fenced(text: str) -> list[str]:
    """Return the blocks of Python between two fences, found line by line."""
    blocks: list[str] = []
    begins: int | None = None  # where the body of the open block does
    is_python = False
    here = 0
    for line in text.split("\n"):
        if begins is None:
            opening = _OPENING.match(line)
            if opening is not None:
                is_python = opening.group(1).lower() in _PYTHON
                begins = here + len(line) + 1
        elif _CLOSING.fullmatch(line):
            blocks += [_outdented(text[begins:here])] if is_python else []
            begins = None
        here += len(line) + 1
    return blocks


def _outdented(block: str) -> str:
    """Return a block without the indentation of its first line, as one that stands in a list has it."""
    first = _INDENT.search(block)
    return re.sub(rf"(?m)^[ \t]{{1,{len(first[1])}}}", "", block) if first and first[1] else block


def _defining(blocks: Sequence[str], wanted: Collection[str]) -> str | None:
    """Return the last blocks that define these names, and what they need of earlier ones; None where none do."""
    missing, needed, chosen = set(wanted), set(wanted), list[str]()
    for block in reversed(blocks) if len(blocks) > 1 else ():
        tree = _parsed(block) if len(block) <= _MOST_PARSED else None
        defined: set[str] = set() if tree is None else {name for node in tree.body for name in _defined_by(node)}
        if tree is not None and defined & needed:
            chosen.insert(0, block)
            missing -= defined
            needed = (needed | _free(tree)) - defined
    future = sorted({name for block in chosen for name in _future_of(block)})  # which comes first in a file
    text = "\n".join(
        [*([f"from __future__ import {', '.join(future)}"] if future and len(chosen) > 1 else []), *chosen]
    )
    return text if chosen and not missing else None


def _future_of(block: str) -> set[str]:
    """Return what a block imports from `__future__`."""
    body = () if (tree := _parsed(block)) is None else tree.body
    asked = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    return {alias.name for node in asked for alias in node.names}


def _defined_by(node: ast.stmt | ast.ExceptHandler) -> set[str]:
    """Return the names that a statement of a module defines; what an example imports from a made-up module it does not."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.ImportFrom() if (node.module or "").partition(".")[0] not in sys.stdlib_module_names:
            return set()
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
            inside = (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.ExceptHandler))
            return {name for one in inside for name in _defined_by(one)}
        case _:
            stored = (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            return {one.id for one in stored}


def _free(tree: ast.Module) -> set[str]:
    """Return the names that a block takes from elsewhere."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - own


def _parsed(text: str) -> ast.Module | None:
    try:
        tree: ast.Module = parse_python(text)
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _wanted(suite: Suite) -> frozenset[str]:
    """Return the names that the tests take from a program."""
    try:
        return frozenset(name for _, name in plan(suite).names)
    except UserError:  # said where the row is read
        return frozenset()


def _read(
    row: int,
    tests: Any,
    imports: str | Sequence[str] | None,
    setup: str | Sequence[str] | None,
    entry_point: str | None,
    answer: Any,
    allow_forgeable: bool | None,
) -> _Row:
    cells = (tests,) if isinstance(tests, str) else tuple(tests or ())
    if not cells or not all(isinstance(test, str) and test.strip() for test in cells):
        raise RewardError(
            f"reward code_exec: the tests of {row_name.get()(row)} must be a text or a list of texts, at least one; "
            f"got {str(tests)[:80]!r}"
        )
    if allow_forgeable is not None and not isinstance(allow_forgeable, bool):
        raise RewardError(
            f"reward code_exec: allow_forgeable of {row_name.get()(row)} must be true, false or absent; got {allow_forgeable!r}"
        )
    suite = Suite(cells, _lines(imports), _lines(setup), entry_point or None)
    reference = program_of(answer, _wanted(suite)) if isinstance(answer, str) else None
    return _Row(replace(suite, reference=reference or ""), bool(allow_forgeable))


def _lines(cell: str | Sequence[str] | None) -> str:
    return "\n".join(cell) if isinstance(cell, list | tuple) else str(cell or "")  # MBPP has a list of imports


def rows_refused(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return which rows of a data set cannot be graded, and why."""

    def why(number: int) -> str | None:
        columns = [rows[number].get(name) for name in _COLUMNS]
        try:
            row = _settled(_read(number, *columns))
            reason = row.refused or _SHARED.use(lambda sandbox: forgeable_because(sandbox, row.suite))
        except UserError as error:
            return str(error)
        if row.refused or reason is None or row.allow_forgeable:
            return row.refused
        return f"{reason}, which a program can forge; `allow_forgeable: true` in the row grades it anyway"

    with ThreadPoolExecutor(SHARED_WORKERS, thread_name_prefix="code-exec") as threads:
        found = dict(enumerate(threads.map(why, range(len(rows)))))
    return {number: reason for number, reason in found.items() if reason is not None}


def _settled_or_refused(row: _Row) -> _Row:
    """Settle a row in the middle of a training, which one of no use must not end: `rows_refused` is asked before it."""
    try:
        return _settled(row)
    except UserError as error:
        return replace(row, refused=str(error))


@lru_cache(maxsize=4096)
def _settled(row: _Row) -> _Row:
    """Find out how a row is graded: as it stands, or as its own answer passes."""
    suite = row.suite
    forgeable = _SHARED.use(lambda sandbox: forgeable_because(sandbox, suite))
    if not is_program(suite.reference) or (forgeable and not row.allow_forgeable):
        return row
    in_place, objects = replace(suite, in_place=True), [replace(suite, forgeable=True)] if row.allow_forgeable else []
    why = ""
    for tried in (suite, in_place, *objects, suite):  # again: on a busy machine it may have had no time
        graded = _SHARED.use(partial(grade, program=suite.reference, suite=tried, timeout=_TIMEOUT_S))
        if graded.all_passed:
            return replace(row, suite=tried)
        why = graded.why.strip()[-200:]
    return replace(row, refused=f"its own answer does not pass its tests ({why})")


def _score(program: str | None, row: _Row) -> _Score:
    if row.refused is not None:
        return _Score(DropEpisode(f"code_exec refuses the row: {row.refused}"), refused=True)
    if program is None:
        return _Score(0.0)
    with suppress(SandboxError), _SHARED.lent() as sandbox:
        return _graded(sandbox, program, row)
    with _SHARED.lent() as sandbox:
        try:
            return _graded(sandbox, program, row)
        except WorkerLostError:
            if sandbox.run("1 + 1").value != 2:
                raise
            return _Score(0.0, worker_lost=True)  # the sandbox is well: it is this program that ends its worker


def _graded(sandbox: Sandbox, program: str, row: _Row) -> _Score:
    graded = grade(sandbox, program, row.suite, timeout=_TIMEOUT_S, refuse_forgeable=not row.allow_forgeable)
    if graded.forgeable and not row.allow_forgeable:
        _say_that_rows_are_refused()
    return _Score(float(graded.all_passed), graded.forgeable, compared=graded.compared and not graded.all_passed)


@cache
def _say_that_rows_are_refused() -> None:
    """Warn once per process; the metric has the rest."""
    logger.warning(
        "code_exec scores 0 in rows whose tests pass their own objects (such as functions) to the solution or compare its objects, "
        "since a program can forge these; code_exec/forgeable counts them. Set `allow_forgeable: true` in a row to grade it"
    )
