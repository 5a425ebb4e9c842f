"""A budget of size: growth is a decision. Raise a number only in a commit that says what was gained.

A line that is all comment is not counted: saying why is no growth.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from pathlib import Path

import pytest
from trl import GRPOConfig

from toolgrpo import ToolGRPOConfig

pytestmark = pytest.mark.lock

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "toolgrpo"

# Of each package, when this was written, rounded up to 50.
LINES = {
    "chat": 2950,
    "commands": 6742,
    "data": 1710,
    "draw": 1569,
    "engines": 3980,
    "episode": 841,
    "evaluation": 1558,
    "gateway": 2375,
    "learning": 786,
    "models": 436,
    "observe": 3343,
    "report": 991,
    "rewards": 2170,
    "rollout": 2651,
    "sft": 532,
    "shared_pass": 1334,
    "support": 1440,
    "testing": 967,
    "tools": 5472,
    "trainer": 5344,
    "(itself)": 809,
}
MOST = {
    "modules": 235,
    "modules with one importer": 41,
    "modules that a trainer imports": 127,
    "lines that a trainer imports": 24_120,
    "files that import TRL": 5,
    "fields of our own": 39,
    "lines of tests": 40_119,
    "lines of benchmarks": 6_083,
    "lines of pages": 4_093,
    "words of pages": 30_900,
}
SANDBOX = {"lines": 4_035, "lines of tests": 2_976}  # of confined-python, which is counted by itself


def lines_of(path: Path) -> int:
    return sum(not line.lstrip().startswith("#") for line in path.read_text(encoding="utf-8").splitlines())


def n_lines(folder: Path) -> int:
    return sum(lines_of(path) for path in folder.rglob("*.py"))


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def importers() -> dict[str, set[str]]:
    """Each module, with the modules that import it."""
    known = modules()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    imported = inner if inner in known else node.module
                    if imported in known and imported != name:
                        found[imported].add(name)
    return found


def imported_with(start: str) -> set[str]:
    """Every module that importing this one imports."""
    known, found, names = modules(), set[str](), [start]
    while names:
        name = names.pop()
        if name in known and name not in found:
            found.add(name)
            names.append(name.rpartition(".")[0])
            for node in ast.parse(known[name].read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def packages() -> dict[str, int]:
    sizes = {folder.name: n_lines(folder) for folder in sorted(PACKAGE.iterdir()) if (folder / "__init__.py").exists()}
    sizes["(itself)"] = sum(lines_of(path) for path in PACKAGE.glob("*.py"))
    return sizes


def counts() -> dict[str, int]:
    known = modules()
    alone = [
        name for name, by in importers().items() if len(by) == 1 and name in known and known[name].name != "__init__.py"
    ]
    needed = imported_with("toolgrpo.trainer.trainer")
    trl = [path for path in known.values() if re.search(r"^\s*(from|import) trl\b", path.read_text(), re.MULTILINE)]
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    pages = [page.read_text("utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    return {
        "modules": len(known),
        "modules with one importer": len(alone),
        "modules that a trainer imports": len(needed),
        "lines that a trainer imports": sum(lines_of(known[name]) for name in needed),
        "files that import TRL": len(trl),
        "fields of our own": len({field.name for field in dataclasses.fields(ToolGRPOConfig)} - theirs),
        "lines of tests": n_lines(ROOT / "tests"),
        "lines of benchmarks": n_lines(ROOT / "benchmarks"),
        "lines of pages": sum(len(text.splitlines()) for text in pages),
        "words of pages": sum(1 for text in pages for word in text.split() if re.search(r"\w", word)),
    }


def test_no_package_is_larger_than_its_budget() -> None:
    over = {name: lines for name, lines in packages().items() if lines > LINES.get(name, 0)}
    assert not over, f"larger than their budgets: {over}; remove something, or say in a commit what was gained"


def test_no_count_is_above_its_budget() -> None:
    over = {name: (number, MOST[name]) for name, number in counts().items() if number > MOST[name]}
    assert not over, f"above their budgets: {over}; remove something, or say in a commit what was gained"


def sandbox() -> dict[str, int]:
    folder = ROOT / "confined-python"
    return {"lines": n_lines(folder / "confined_python"), "lines of tests": n_lines(folder / "tests")}


def test_the_sandbox_is_within_its_budget() -> None:
    over = {name: (number, SANDBOX[name]) for name, number in sandbox().items() if number > SANDBOX[name]}
    assert not over, f"above their budgets: {over}; remove something, or say in a commit what was gained"


if __name__ == "__main__":
    print(packages(), counts(), sandbox(), sep="\n")
