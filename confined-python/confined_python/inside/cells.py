"""Inside the confined process: run the code as a notebook cell, hand back plain
literals.

The same process can be a judge's, and then runs a task's tests instead (judge.py).

Nothing here is trusted once the model's code has run beside it: the worker reads what is written on
the result pipe as a stranger's text.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import io
import json
import operator
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from types import CodeType, ModuleType
from typing import Any, NoReturn

from confined_python.base import shown
from confined_python.inside import judge
from confined_python.literals import NotPlainError, decode_text, encode, encode_text, form_of_python, python_of_form
from confined_python.processes.wire import pack, read_frame

_REPR_CHARS = 2000
_MOST_OF_A_VALUE = 1 << 20  # characters of its repr; the form may have twice as many
_NAME = "<cell>"


def fresh_namespace() -> dict[str, Any]:
    """Return the names of an empty module `__main__`, which is the process's from now on: classes are looked up there."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    return vars(module)


_streams: list[io.TextIOWrapper] = []


def prepare_streams() -> None:
    """Make text streams over the descriptors 0, 1 and 2, for pipes as each run's are.

    Done once, in the host.
    """
    kept = [os.dup(fd) for fd in range(3)]
    ours, theirs = os.pipe()
    os.dup2(ours, 0)
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)
    reader = io.BufferedReader(io.FileIO(0, "r", closefd=False))
    _streams.append(io.TextIOWrapper(reader, encoding="utf-8", errors="replace"))
    for fd in (1, 2):
        writer = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        _streams.append(io.TextIOWrapper(writer, encoding="utf-8", errors="replace", line_buffering=True))
    for fd, old in enumerate(kept):
        os.dup2(old, fd)
        os.close(old)
    os.close(ours)
    os.close(theirs)


def serve(requests: int, results: int, begin: Callable[[float], None] = lambda timeout_s: None) -> NoReturn:
    """Answer one request after the other, over these descriptors; `begin` is called before each.

    The prepared streams are used: the descriptors 0, 1 and 2 are the process's own by now.
    """
    for name, stream in zip(("stdin", "stdout", "stderr"), _streams, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        warm_up()
        namespace = fresh_namespace()
        while (request := read_frame(requests)) is not None:
            begin(request["timeout_s"])
            _answer(request, namespace, requests, results)
    finally:
        os._exit(125)


def _answer(request: dict[str, Any], namespace: dict[str, Any], requests: int, results: int) -> None:
    """Do what a request asks for and report it; ends the process unless it is a session's."""
    if "suite" in request:
        outcome = judge.judge(request["suite"], lambda call: _ask_solution(call, requests, results))
    elif "call" in request:
        function, arguments = request["call"]
        outcome = answer_call(function, arguments, namespace)
    else:
        outcome = run_cell(request["code"], namespace)
        if not request["keep"]:
            _end_program()
    report(results, outcome)
    if not request["keep"]:
        os._exit(outcome["exit_code"])


def _end_program() -> None:
    """Do what an interpreter does at the end of a program: wait for its threads, run what it registered."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # private, and the only way
        atexit._run_exitfuncs()


def _ask_solution(call: list[str], requests: int, results: int) -> dict[str, Any]:
    """Report a judge's question and return the answer, which is its session's next request."""
    report(results, {"status": "ok", "exit_code": 0, "need": call})
    answer = read_frame(requests)
    if answer is None:
        os._exit(0)
    return dict(answer["came"])


def answer_call(function: str, arguments: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a function to one call, or what went wrong.

    Both cross as texts that only a judge reads. A function is one of the program's by its name, one
    of OPERATIONS, or an expression.
    """
    report: dict[str, Any] = {"status": "ok", "exit_code": 0}
    try:
        args, kwargs = decode_text(arguments, _objects.by_form)
        name, args = (args[0], args[1:]) if function == judge.ON_ARGUMENTS else (function, args)
        if name in OPERATIONS:
            called = OPERATIONS[name]
        elif name.isidentifier():
            if name not in namespace:  # Python's own of that name is no answer
                return {**report, "lost": f"the program defines no {name}"}
            called = namespace[name]
        else:
            called = eval(compile(name, _NAME, "eval", dont_inherit=True), namespace)
        value = called(*args, **kwargs)
        if function == judge.ON_ARGUMENTS:
            value = [value, args, kwargs]
        return {**report, "answer": encode_text(value, _objects.form)}
    except MemoryError:
        return {**report, "lost": "the program ran out of memory"}
    except BaseException as error:
        return {**report, "error": judge.error_text(error), "raised": _raised(error)}


OPERATIONS: dict[str, Any] = {
    ".call": lambda function, *args, **kwargs: function(*args, **kwargs),
    ".get": getattr,
    ".set": setattr,
    ".item": operator.getitem,
    ".put": operator.setitem,
    ".del": operator.delitem,
    ".enter": lambda manager: type(manager).__enter__(manager),
    ".exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    ".iter": iter,
    ".next": next,
    ".take": lambda iterator, most: list(islice(iterator, most)),
    ".len": len,
    ".bool": bool,
    ".str": str,
    ".repr": repr,
}
"""What a judge does with an object of the program."""


class _Objects:
    """Objects of the program that its judge knows by a number."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}

    def form(self, value: Any) -> dict[str, Any]:
        with suppress(NotPlainError):
            return form_of_python(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return {"o": self._numbers[id(value)]}

    def by_form(self, tag: str, body: Any) -> Any:
        return self._kept[body] if tag == "o" else python_of_form(tag, body)


_objects = _Objects()


def _raised(error: BaseException) -> str:
    """Return the classes of an exception, nearest first, and its arguments."""
    classes = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__]
    try:
        return encode_text([classes, list(error.args)])
    except BaseException:  # arguments of no plain kind
        return encode_text([classes, [judge.error_text(error).partition(": ")[2]]])


def run_cell(code: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute code; return what became of it as a JSON-ready dict."""
    try:
        body, last = _compile(code)
        exec(body, namespace)
        value = None if last is None else eval(last, namespace)
        return _value_report(value) if last is not None else {"status": "ok", "exit_code": 0}
    except SystemExit as leave:
        return _exit_report(leave)
    except MemoryError:
        print("MemoryError: the memory limit of this run is used up", file=sys.stderr)
        return {"status": "memory", "exit_code": 1}
    except BaseException as error:
        _print_error(error)
        return {"status": "error", "exit_code": 1}


def warm_up() -> None:
    """Do once, on code of ours, what a run does.

    So the pages that it touches are copied before there is a run to wait.
    """
    json.loads(pack(run_cell("def f(x):\n    return [x, 'x']\nf(1)", fresh_namespace()))[4:])


def report(fd: int, message: dict[str, Any]) -> None:
    """Flush what was printed, then say how it went."""
    for stream in (sys.stdout, sys.stderr, *_streams[1:]):  # a program may have put others in their places
        try:
            stream.flush()
        except Exception:
            continue
    frame = memoryview(pack(message))
    while frame:
        frame = frame[os.write(fd, frame) :]


def _compile(code: str) -> tuple[CodeType, CodeType | None]:
    """Compile the code, and its last expression apart, as a notebook shows it."""
    tree = ast.parse(code, _NAME)
    last: CodeType | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        shown = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined] # an Expr
        last = compile(shown, _NAME, "eval", _future_of(tree), dont_inherit=True)
    return compile(tree, _NAME, "exec", dont_inherit=True), last


def _future_of(tree: ast.Module) -> int:
    """Return the flags of the code's own `from __future__` lines."""
    asked = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    features = [getattr(__future__, alias.name, None) for node in asked for alias in node.names]
    return sum({feature.compiler_flag for feature in features if feature is not None})


def _value_report(value: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"status": "ok", "exit_code": 0}
    if value is None:
        return message
    text = repr(value)
    message["repr"] = shown(text, _REPR_CHARS)
    # the text of a large array is short; of another type a program answers whatever it likes
    size = getattr(value, "nbytes", 0) if type(value).__module__ == "numpy" else len(text)
    if size <= _MOST_OF_A_VALUE:
        with suppress(NotPlainError, RecursionError):
            form = encode(value)
            if len(json.dumps(form)) <= 2 * _MOST_OF_A_VALUE:
                message["value"] = form
    return message


def _exit_report(leave: SystemExit) -> dict[str, Any]:
    if leave.code is None or isinstance(leave.code, int):
        code = int(leave.code or 0) & 0xFF
    else:
        print(leave.code, file=sys.stderr)
        code = 1
    return {"status": "ok" if code == 0 else "error", "exit_code": code}


def _print_error(error: BaseException) -> None:
    """Print the traceback without our own frames."""
    try:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != _NAME:
            frames = frames.tb_next
        print("".join(traceback.format_exception(type(error), error, frames)), end="", file=sys.stderr)
    except BaseException:
        os.write(2, b"the code raised an exception that could not be printed\n")
