"""The packages lie in layers, imports point down, and no two packages need each other.

Every import counts: inside functions and under TYPE_CHECKING as well, for a reader follows those too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import toolgrpo

pytestmark = pytest.mark.lock

ROOT = Path(toolgrpo.__file__).parent
LAYERS = (
    {"errors", "drops", "calls", "trajectory", "ledger", "segments", "plain_text", "loopback"}
    | {"regex_budget", "named_files", "plugin_files", "settings_files", "processes"}
    | {"startup", "meeting", "storage", "folder_claim", "hub", "models"},
    {"chat", "tools", "sandbox", "rewards", "data"},
    {"engines", "shared_pass"},
    {"rollout"},
    {"learning"},
    {"options"},  # its choices are names of what lies below
    {"evaluation", "gateway", "observe", "trainer", "report", "build"},
    {"sft"},
    {"commands"},
    {"testing"},  # fakes of every layer and builders over them, so it may import all; nothing imports it
)
DOORS = {"__init__", "__main__"}  # what users name; `import toolgrpo` and the commands begin there
EXCEPTIONS: frozenset[tuple[str, str]] = frozenset()  # (from, to) that go upward nevertheless; may only shrink


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the parts of toolgrpo that a file imports, by their first name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "this test reads absolute imports only"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "toolgrpo" and rest:
                yield rest.partition(".")[0]


def imports_between(folder: Path, doors: set[str]) -> dict[tuple[str, str], list[str]]:
    """Return every pair (from, to) of parts with the files that make it."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        part = file.relative_to(folder).parts[0].removesuffix(".py")
        if part not in doors:
            for other in imported(ast.parse(file.read_text())):
                if other not in {part, "__version__"}:
                    found.setdefault((part, other), []).append(str(file.relative_to(folder)))
    return found


def upward(pairs: Mapping[tuple[str, str], list[str]]) -> dict[tuple[str, str], list[str]]:
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    return {pair: files for pair, files in pairs.items() if level[pair[0]] < level[pair[1]]}


def circle(pairs: Mapping[tuple[str, str], object]) -> list[str]:
    """Return parts that need each other in a ring, or nothing."""
    needs: dict[str, set[str]] = {}
    for part, other in pairs:
        needs.setdefault(part, set()).add(other)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_part_has_its_layer() -> None:
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - DOORS == set().union(*LAYERS)


def test_no_import_goes_upward() -> None:
    offenders = {pair: files for pair, files in upward(imports_between(ROOT, DOORS)).items() if pair not in EXCEPTIONS}
    assert offenders == {}, "move what is needed down, or pass it in"


def test_no_two_parts_need_each_other() -> None:
    assert circle(imports_between(ROOT, DOORS)) == []


def test_an_exception_that_is_mended_is_taken_off_the_list() -> None:
    assert set(upward(imports_between(ROOT, DOORS))) >= EXCEPTIONS


def test_an_upward_import_and_a_circle_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    files = {
        "chat/format.py": "def f():\n    from toolgrpo.trainer.config import ToolGRPOConfig\n",
        "trainer/trainer.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toolgrpo import sft\n",
        "sft/loop.py": "import toolgrpo.chat.format\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    pairs = imports_between(tmp_path, DOORS)
    assert set(upward(pairs)) == {("chat", "trainer"), ("trainer", "sft")}
    assert set(circle(pairs)) == {"chat", "trainer", "sft"}
