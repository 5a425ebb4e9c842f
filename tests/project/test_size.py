"""A budget of size, so that growth is a decision: raise a number only in a commit that says what was gained for it.

`python tests/project/test_size.py` prints today's numbers.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "toolgrpo"
pytestmark = pytest.mark.lock

LINES: dict[str, int] = {}
"""Most lines of Python per package of `toolgrpo/`; `top` are the modules beside them."""

MOST = {
    "lines": 0,
    "modules": 0,
    "modules with one importer": 0,
    "files that know TRL": 0,
    "fields of our own in ToolGRPOConfig": 0,
    "fields of our own in all commands": 0,
    "lines of generated files": 500,
    "lines of tests": 0,
    "lines of benchmarks": 0,
}


def lines_of(files: Iterator[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def lines_by_package() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        found[parts[0] if len(parts) > 1 else "top"] += lines_of(iter([file]))
    return dict(found)


def imported(file: Path) -> set[str]:
    """Return the full names of all that a file imports; `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def modules_with_one_importer() -> list[str]:
    """Return the modules, packages' faces apart, that exactly one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for name in imported(file):
            importers[name].add(str(file))
    modules = [file for file in PACKAGE.rglob("*.py") if file.name not in ("__init__.py", "__main__.py")]
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in modules)
    return sorted(name for name in names if len(importers[name]) == 1)


def files_that_know_trl() -> list[str]:
    return sorted(
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if any(name == "trl" or name.startswith("trl.") for name in imported(file))
    )


def own_fields(*classes: Any) -> int:
    """Count the fields that these dataclasses have beyond those of TRL and Transformers."""
    from transformers import TrainingArguments
    from trl import GRPOConfig, ModelConfig, SFTConfig

    foreign = {
        f.name for cls in (TrainingArguments, GRPOConfig, SFTConfig, ModelConfig) for f in dataclasses.fields(cls)
    }
    return len({f.name for cls in classes for f in dataclasses.fields(cls)} - foreign)


def measured() -> dict[str, int]:
    from toolgrpo.commands.arguments import ScriptArguments
    from toolgrpo.commands.check import CheckArguments
    from toolgrpo.commands.evaluate import EvaluationArguments
    from toolgrpo.commands.gateway import GatewayArguments
    from toolgrpo.commands.replay import ReplayArguments
    from toolgrpo.commands.sft import SFTArguments, ToolSFTConfig
    from toolgrpo.trainer.config import ToolGRPOConfig

    modules = list(PACKAGE.rglob("*.py"))
    commands = (ScriptArguments, CheckArguments, EvaluationArguments, GatewayArguments, ReplayArguments)
    return {
        "lines": lines_of(iter(modules)),
        "modules": len(modules),
        "modules with one importer": len(modules_with_one_importer()),
        "files that know TRL": len(files_that_know_trl()),
        "fields of our own in ToolGRPOConfig": own_fields(ToolGRPOConfig),
        "fields of our own in all commands": own_fields(ToolGRPOConfig, *commands, SFTArguments, ToolSFTConfig),
        "lines of generated files": lines_of(PACKAGE.rglob("*.json")),
        "lines of tests": lines_of((ROOT / "tests").rglob("*.py")),
        "lines of benchmarks": lines_of((ROOT / "benchmarks").glob("*.py")),
    }


def test_no_package_has_grown() -> None:
    grown = {name: n for name, n in lines_by_package().items() if n > LINES.get(name, 0)}
    assert grown == {}, (
        f"more lines than the budget: {grown}; take something away, or say in the commit what was gained"
    )


def test_the_whole_has_not_grown() -> None:
    grown = {name: n for name, n in measured().items() if n > MOST[name]}
    assert grown == {}, f"more than the budget: {grown}; take something away, or say in the commit what was gained"


if __name__ == "__main__":
    print(lines_by_package())
    print(measured())
    print(*modules_with_one_importer(), *files_that_know_trl(), sep="\n")
