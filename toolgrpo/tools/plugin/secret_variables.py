"""Keep environment variables named like secrets from the tools, but for those a plugin asks for.

A plugin asks with a line of literals, `TOOL_SECRETS = ["MY_API_KEY"]`, in the file or module that
holds its tools. It is read without running the plugin, so that the variables are there while it is
imported. What nobody asked for never leaves the trainer. This is a guard against accidents: a tool
runs as the trainer's user, and can look for the trainer's memory.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolgrpo.errors import PluginError
from toolgrpo.tools.plugin.plugin_file import PluginSource, search_beside_the_command

_VARIABLE = "TOOL_SECRETS"
_PARTS = ("SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "APIKEY")
_WORDS = {"TOKEN", "TOKENS", "KEY", "KEYS"}  # as words only: TOKENIZERS_PARALLELISM is none, and a MONKEY has no key


def is_secret(name: str) -> bool:
    """Tell whether an environment variable is named like a secret, as HF_TOKEN, DB_PASSWORD."""
    upper = name.upper()
    return any(part in upper for part in _PARTS) or not _WORDS.isdisjoint(upper.split("_"))


def asked_for(source: PluginSource) -> tuple[str, ...]:
    """Return the names in the source's TOOL_SECRETS; PluginError where they are not written out."""
    if source.callables is not None:
        return tuple(source.secrets)
    path = Path(source.path) if source.path is not None else _file_of(source.module)
    try:
        tree = ast.parse(path.read_bytes()) if path is not None and path.suffix == ".py" else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()  # importing it says so better
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == _VARIABLE for target in targets):
                return _literal_names(node.value, source.label)
    return ()


def names_beside(functions: Sequence[Any]) -> tuple[str, ...]:
    """Return the TOOL_SECRETS of the modules that hold these functions or classes."""
    names: dict[str, None] = {}
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        value = getattr(module, _VARIABLE, ())
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
        f"Where the tools need it, write beside them: {_VARIABLE} = {named!r}"
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
        f"{_VARIABLE} in {label} must be a list of names of environment variables, written out, got {value!r:.80}. "
        f'Write it like this: {_VARIABLE} = ["MY_API_KEY"]'
    )
