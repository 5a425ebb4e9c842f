"""The API page has an entry for each public name, and each name that a page uses is public."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

from tests.support.page_blocks import PAGES, page_blocks

API = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
ENTRIES = re.findall(r"^::: (\S+)$", API.read_text(), re.MULTILINE)
FACES = ("toolgrpo", "toolgrpo.tools", "toolgrpo.data", "toolgrpo.sandbox", "toolgrpo.testing")


def names_in(page: Path) -> set[str]:
    """Return the names of toolgrpo that the page's Python blocks import and its text mentions."""
    blocks = [ast.parse(block.text) for block in page_blocks(page) if block.language == "python"]
    imports = [node for tree in blocks for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    used = {f"{node.module}.{name.name}" for node in imports for name in node.names}
    mentioned = set(re.findall(r"`(toolgrpo(?:\.[a-z_]+)*\.[A-Z]\w+)", page.read_text()))
    return {name for name in used | mentioned if name.startswith("toolgrpo.")}


def test_an_entry_names_something_that_is_there() -> None:
    for module, _, name in (entry.rpartition(".") for entry in ENTRIES):
        assert hasattr(import_module(module), name), f"{module}.{name}"


def test_every_name_of_a_face_or_a_page_has_an_entry() -> None:
    public = {f"{face}.{name}" for face in FACES for name in import_module(face).__all__}
    used = {page.name: names_in(page) for page in PAGES}
    assert {where: names - set(ENTRIES) for where, names in used.items() if names - set(ENTRIES)} == {}
    assert any(used.values()) and public - set(ENTRIES) == set()
