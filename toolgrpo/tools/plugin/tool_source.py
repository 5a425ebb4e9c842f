"""Turn what a user gives as tools into a source that a worker can load by itself, and say which secrets it sees.

A file and a module are loaded again in the workers. Callables travel by cloudpickle: those of
importable modules by name, those of scripts, notebooks and closures by value, and so those of
modules that import PyTorch and the like, as training scripts do, where they can be.
"""

from __future__ import annotations

import ast
import base64
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from confined_python import parse_python
from toolgrpo.errors import PluginError
from toolgrpo.support.shipped_files import PLUGINS, located
from toolgrpo.tools.plugin.plugin_file import PluginSource, search_beside_the_command

HEAVY = frozenset(  # what a training script imports and tools seldom need
    {"torch", "transformers", "trl", "vllm", "peft", "datasets", "accelerate", "deepspeed", "tensorflow", "jax"}
)
_OURS = ("toolgrpo.trainer", "toolgrpo.commands", "toolgrpo.evaluation")
_MAX_BY_VALUE = 10 << 20
_SECRETS = "TOOL_SECRETS"


def source_of(spec: str | Path | ModuleType | Sequence[Callable[..., Any]]) -> PluginSource:
    """Return a path, a module name, a module, or callables, as a source."""
    if isinstance(spec, Path):
        return PluginSource(path=str(located(spec, PLUGINS)))
    if isinstance(spec, str):
        is_package = spec.isidentifier() and Path(spec, "__init__.py").is_file()
        looks_like_path = spec.endswith(".py") or os.sep in spec or (Path(spec).exists() and not is_package)
        return PluginSource(path=str(located(spec))) if looks_like_path else PluginSource(module=spec)
    if isinstance(spec, ModuleType):
        return _module_source(spec)
    if isinstance(spec, list | tuple):
        for index, member in enumerate(spec):
            if not callable(member):
                raise PluginError(
                    f"tools[{index}] is not callable: it is {member!r:.80} (a {type(member).__name__}). "
                    "Give the functions themselves."
                )
        if not spec:
            raise PluginError("the list of tools is empty. Give at least one function, or no tools at all.")
        return callables_source(spec)
    raise PluginError(
        f"tools must be a path, a module or a list of functions, got a {type(spec).__name__}: {spec!r:.80}"
    )


def environment_source(spec: str | Path | Callable[..., Any]) -> PluginSource:
    """Return the source of an environment.

    Given as `path.py`, `path.py:Class`, `package.module:Class`, or the class itself.
    """
    if isinstance(spec, str | Path):
        where, _, attribute = str(spec).rpartition(":") if ":" in str(spec) else (str(spec), "", "")
        is_path = where.endswith(".py") or os.sep in where
        return PluginSource(
            path=str(located(where)) if is_path else None,
            module=None if is_path else where,
            attribute=attribute or None,
        )
    if callable(spec):
        return callables_source([spec])
    raise PluginError(f"an environment must be a path like file.py:Class or a class, got {spec!r:.80}")


def callables_source(functions: Sequence[Callable[..., Any]]) -> PluginSource:
    """Pack functions or classes as a blob for the workers."""
    import cloudpickle  # type: ignore[import-untyped]  # it ships no types; only tools given as callables need it

    with suppress(Exception), _by_value(functions, cloudpickle, heavy=True):
        blob = cloudpickle.dumps(list(functions))
        if len(blob) <= _MAX_BY_VALUE:  # not with all the data that a script holds
            return _packed(blob, functions)
    with _by_value(functions, cloudpickle):
        try:
            blob = cloudpickle.dumps(list(functions))
        except Exception as error:  # pickling calls user code and raises many kinds
            names = ", ".join(getattr(f, "__name__", repr(f)) for f in functions)
            raise PluginError(
                f"these tools cannot be sent to a tool worker ({type(error).__name__}: {error}): {names}. "
                "Put them into a file and give its path, or mark the one that holds live objects with "
                "@tool(in_process=True)."
            ) from error
    return _packed(blob, functions)


def _packed(blob: bytes, functions: Sequence[Callable[..., Any]]) -> PluginSource:
    return PluginSource(callables=base64.b64encode(blob).decode("ascii"), secrets=names_beside(functions))


def _module_source(module: ModuleType) -> PluginSource:
    if module.__name__ != "__main__" and _importable(module.__name__):
        return PluginSource(module=module.__name__)
    if getattr(module, "__file__", None):
        return PluginSource(path=module.__file__)
    functions = getattr(module, "TOOL_FUNCTIONS", None)
    if not isinstance(functions, list | tuple) or not functions:
        raise PluginError(f"No TOOL_FUNCTIONS found in module {module.__name__}")
    return source_of(list(functions))


def _importable(name: str) -> bool:
    """Return whether a fresh interpreter with our sys.path would import this very module."""
    module = sys.modules.get(name)
    parent, _, _ = name.rpartition(".")
    if module is None or (parent and not _importable(parent)):
        return False
    if name in sys.builtin_module_names:
        return True
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    try:
        found = importlib.machinery.PathFinder.find_spec(name, path)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin == getattr(module, "__file__", None)


@contextmanager
def _by_value(functions: Sequence[Any], cloudpickle: Any, *, heavy: bool = False) -> Iterator[None]:
    """Let cloudpickle send by value what lives in modules that a worker could not import, or
    (`heavy`) would take long to import.
    """
    names = {getattr(member, "__module__", None) for function in functions for member in (function, type(function))}
    known = [sys.modules[n] for n in names if n and n in sys.modules and n != "__main__"]
    modules = [m for m in known if not _importable(m.__name__) or (heavy and _holds_heavy_modules(m))]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _holds_heavy_modules(module: ModuleType) -> bool:
    """Return whether a module's names show that importing it imports such a package."""
    for value in list(vars(module).values()):
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and (home.partition(".")[0] in HEAVY or home.startswith(_OURS)):
            return True
    return False


# Environment variables named like secrets (`is_secret_variable`) are kept from the tools, but for those a plugin asks for.
#
# A plugin asks with a line of literals, `TOOL_SECRETS = ["MY_API_KEY"]`, in the file or module that
# holds its tools. It is read without running the plugin, so that the variables are there while it is
# imported. What nobody asked for never leaves the trainer. This is a guard against accidents: a tool
# runs as the trainer's user, and can look for the trainer's memory.


def asked_for(source: PluginSource) -> tuple[str, ...]:
    """Return the names in the source's TOOL_SECRETS; PluginError where they are not written out."""
    if source.callables is not None:
        return tuple(source.secrets)
    path = Path(source.path) if source.path is not None else _file_of(source.module)
    try:
        tree = parse_python(path.read_bytes()) if path is not None and path.suffix == ".py" else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()  # importing it says so better
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == _SECRETS for target in targets):
                return _literal_names(node.value, source.label)
    return ()


def names_beside(functions: Sequence[Any]) -> tuple[str, ...]:
    """Return the TOOL_SECRETS of the modules that hold these functions or classes."""
    names: dict[str, None] = {}
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        value = getattr(module, _SECRETS, ())
        names.update(dict.fromkeys(_checked(value, getattr(module, "__name__", "the given callables"))))
    return tuple(names)


def withheld_hint(message: str, withheld: Mapping[str, str]) -> str:
    """Return what to do about an error that names a variable which was kept from the plugin.

    Nothing where it names none.
    """
    named = sorted(name for name in withheld if name in message)
    if not named:
        return ""
    return (
        f"\n{', '.join(named)} is set, but variables named like secrets are kept from tools. "
        f"Where the tools need it, write beside them: {_SECRETS} = {named!r}"
    )


def _file_of(module: str | None) -> Path | None:
    search_beside_the_command()
    try:
        found = importlib.util.find_spec(module or "")
    except BaseException:  # looking for it imports the packages above it; importing it will say what is wrong
        return None
    return Path(found.origin) if found is not None and found.origin is not None else None


def _literal_names(node: ast.expr | None, label: str) -> tuple[str, ...]:
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        value = ast.unparse(node) if node is not None else None
    return _checked(value, label)


def _checked(value: object, label: str) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise PluginError(
        f"{_SECRETS} in {label} must be a list of names of environment variables, written out, got {value!r:.80}. "
        f'Write it like this: {_SECRETS} = ["MY_API_KEY"]'
    )
