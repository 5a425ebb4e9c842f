"""Load a user's Python file: tools, environments, rewards, in whichever process needs them.

A file is loaded under a name made from its path: two files of one name live side by side,
`if __name__ == "__main__"` blocks do not run, and the file's folder is a package for it, so that
`from . import helper` and `import helper` both work. The name also holds what the file says, so a
file that was edited meanwhile is loaded anew. Every error names the file, its line, and what to do.
"""

from __future__ import annotations
import __future__

import hashlib
import importlib.util
import sys
import traceback
import typing
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from toolgrpo.errors import PluginError
from toolgrpo.support.shipped_files import PLUGINS, located, no_python_file

_IMPORTS = {  # of names that files use most, beside modules and those of typing
    **{"np": "import numpy as np", "pd": "import pandas as pd", "Path": "from pathlib import Path"},
    **{"Decimal": "from decimal import Decimal", "dataclass": "from dataclasses import dataclass"},
}


_FOLDERS: list[str] = []  # of plugins, at the end of sys.path
_ASIDE: dict[str, dict[str, ModuleType]] = {}  # helpers of a folder that have the names of another's
_PACKAGE = "_toolgrpo_plugin_"  # so begins the name of a plugin's folder among the modules


def import_file(path: Path, *, needs_annotations: bool = False) -> ModuleType:
    """Return the module of a plugin file; `PluginError` if there is none, or if it fails.

    A name that is missing in annotations alone is no failure, unless the caller `needs_annotations`.
    """
    path = python_file(path)
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    package = f"{_PACKAGE}{digest}"
    name = f"{package}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    folder = ModuleType(package)
    folder.__path__ = [str(path.parent)]  # makes relative imports beside the file work
    sys.modules[package] = folder
    try:
        with _helpers_of(path.parent):
            try:
                return _run(name, path)
            except NameError:
                if needs_annotations:
                    raise
                return _run(name, path, as_text=True)
    except BaseException as error:  # a plugin may raise anything, SystemExit included
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginError(import_failed(str(path), error)) from error


@contextmanager
def _helpers_of(folder: Path) -> Iterator[None]:
    """Let `import helper` find the helper of this folder, and not one of another plugin's that has its name.

    Those of the others are there again afterwards: what they import when they are called is theirs, and stays one module.
    """
    own = str(folder)
    elsewhere = [one for one in sys.path if one not in _FOLDERS]
    others = [one for one in _FOLDERS if one != own]
    names = {one.stem for one in folder.glob("*.py")} | {one.parent.name for one in folder.glob("*/__init__.py")}
    theirs = {name: module for name, module in _helpers(names).items() if _home(module, [*others, own]) in others}
    for name in theirs:
        del sys.modules[name]
    sys.modules.update(_ASIDE.pop(own, {}))
    sys.path[:] = [*elsewhere, *([] if own in elsewhere else [own]), *others]
    try:
        yield
    finally:
        roots = {name.partition(".")[0] for name in theirs}
        _ASIDE[own] = {name: module for name, module in _helpers(roots).items() if _home(module, [*others, own]) == own}
        for name in _ASIDE[own]:
            del sys.modules[name]
        sys.modules.update(theirs)
        if own not in elsewhere and own not in _FOLDERS:
            _FOLDERS.append(own)
        sys.path[:] = [*(one for one in sys.path if one not in _FOLDERS), *_FOLDERS]


def _helpers(names: Collection[str]) -> dict[str, ModuleType]:
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in names}


def _home(module: ModuleType, folders: Iterable[str]) -> str | None:
    """Return the one of these folders that a module was found in."""
    file = getattr(module, "__file__", None)
    return max((one for one in folders if file and Path(file).is_relative_to(one)), key=len, default=None)


def check_python(path: Path) -> None:
    """Raise `PluginError` where a file is no Python, in the words of `import_file`; nothing of it runs."""
    path = python_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # they come again where it is imported
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a NUL in it, parentheses without end
        raise PluginError(import_failed(str(path), error)) from error


def _run(name: str, path: Path, *, as_text: bool = False) -> ModuleType:
    """Run a file as the module `name`; `as_text`: its annotations stay text, as PEP 563 has it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up
    if as_text:
        flag = __future__.annotations.compiler_flag
        exec(compile(path.read_bytes(), str(path), "exec", flag, dont_inherit=True), vars(module))
    else:
        spec.loader.exec_module(module)
    return module


def python_file(path: Path) -> Path:
    """Return the whole path of a Python file; `PluginError` if it is none."""
    path = located(path.expanduser(), PLUGINS).resolve()
    if path.is_dir():
        raise PluginError(f"{path} is a folder; give the .py file in it.")
    if not path.is_file():
        raise PluginError(no_python_file(path))
    if path.suffix != ".py":
        raise PluginError(f"{path} is not a Python file: its name must end with .py")
    return path


def import_failed(label: str, error: BaseException) -> str:
    """Return what to say about a plugin that cannot be imported."""
    if isinstance(error, NameError) and not isinstance(error, UnboundLocalError) and error.name:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cure = missing_import(error.name) or "import it, or define it above that line."
        return f"{label} cannot be imported: {frame.filename}, line {frame.lineno} uses {error.name!r}, which it does not have; {cure}"
    missing = ""
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.startswith(_PACKAGE):
        missing = f"\nThere is no {error.name.rpartition('.')[2]}.py beside the file; copy it there too."
    elif isinstance(error, ModuleNotFoundError) and error.name:
        missing = (
            f"\nIf {error.name.partition('.')[0]} is a package, install it into the environment of this run: "
            f"{sys.executable} -m pip install ..."
        )
    return f"{label} cannot be imported; fix this error in it:\n{user_traceback(error)}{missing}"


def missing_import(name: str) -> str | None:
    """Return which import line a file lacks that uses `name`, or None if that is not known."""
    line = _IMPORTS.get(name)
    if name in typing.__all__:
        line = f"from typing import {name}"
    elif name in sys.stdlib_module_names:
        line = f"import {name}"
    return None if line is None else f"add this line at its top: {line}"


def user_traceback(error: BaseException) -> str:
    """Return the traceback without our own frames and importlib's."""
    trimmed = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parents[1])
    trimmed.stack = traceback.StackSummary.from_list(
        [frame for frame in trimmed.stack if not frame.filename.startswith(("<frozen", ours))]
    )
    return "".join(trimmed.format(chain=False)).rstrip()
