"""The packages lie in layers, imports point down, and no two packages need each other.

Every import counts: inside functions and under TYPE_CHECKING as well, for a reader follows those too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import toolgrpo

pytestmark = pytest.mark.lock

ROOT = Path(toolgrpo.__file__).parent
SANDBOX = ROOT.parent / "confined-python" / "confined_python"
FACE = {
    *("confined_python", "confined_python.errors", "confined_python.grading"),
    *(f"confined_python.processes{name}" for name in ("", ".linux", ".wire")),
}
LAYERS = (
    {"errors", "support", "episode", "sandbox", "models"},
    {"chat", "tools", "rewards", "data"},
    {"engines", "shared_pass"},
    {"rollout"},
    {"learning"},
    {"options"},  # its choices are names of what lies below
    {"draw", "evaluation", "gateway", "observe", "trainer", "report", "build"},
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


def modules_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each module that a folder's files import or import from, with a file that does."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from ((name, str(file.relative_to(folder))) for name in names)


def test_the_sandbox_imports_nothing_of_toolgrpo_nor_of_training() -> None:
    roots = {name.partition(".")[0] for name, _ in modules_of(SANDBOX)}
    assert roots - sys.stdlib_module_names == {"confined_python", "landlockpy", "seccompy"}


def test_toolgrpo_imports_only_the_face_of_the_sandbox_and_its_helpers_of_processes() -> None:
    inner = {
        ".".join(file.relative_to(SANDBOX.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in SANDBOX.rglob("*.py")
    }
    used = {name: file for name, file in modules_of(ROOT) if name in inner}
    assert used.keys() - FACE == set(), f"take it from {FACE}, or give it a name there: {used}"
    public = import_module("confined_python").__all__
    named = {
        name for name, _ in modules_of(ROOT) if name.startswith("confined_python.") and name.count(".") == 1
    } - inner
    assert {name.partition(".")[2] for name in named} <= {*public}


def test_the_two_distributions_have_one_version() -> None:
    needed = re.findall(r'"confined-python==(.*?)"', (ROOT.parent / "pyproject.toml").read_text())
    assert needed == [import_module("confined_python").__version__] == [toolgrpo.__version__]


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
