"""The packages lie in layers, imports point down, and no two packages need each other.

Every import counts: inside functions and under TYPE_CHECKING as well, for a reader follows those too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
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


def modules_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each module that a folder's files import or import from, with a file that does."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, "this test reads absolute imports only"
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from ((name, str(file.relative_to(folder))) for name in names)


def imports_between() -> dict[tuple[str, str], set[str]]:
    """Return every pair (from, to) of parts with the files that make it."""
    found = defaultdict[tuple[str, str], set[str]](set)
    for name, file in modules_of(ROOT):
        part, other = Path(file).parts[0].removesuffix(".py"), f"{name}.".split(".")[1]
        if name.startswith("toolgrpo.") and part not in DOORS and other not in {part, "__version__"}:
            found[part, other].add(file)
    return found


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


def test_parts_lie_in_layers_and_no_import_goes_upward_nor_round() -> None:
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - DOORS == set().union(*LAYERS)
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    pairs, needs = imports_between(), defaultdict[str, set[str]](set)
    for part, other in pairs:
        needs[part].add(other)
    assert {("commands", "trainer"), ("testing", "rollout")} <= pairs.keys(), "imports are found"
    upward = {pair: files for pair, files in pairs.items() if level[pair[0]] < level[pair[1]]}
    assert upward == {}, "move what is needed down, or pass it in"
    TopologicalSorter(needs).prepare()  # raises CycleError with the ring of parts that need each other
