"""Links of README and docs lead to files and sections that exist, the files that they name are there, the names of toolgrpo
that they use are public, and the API page has an entry for each."""

from __future__ import annotations

import ast
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests.support.page_blocks import PAGES, page_blocks

ROOT = Path(__file__).parents[2]


def sections(page: Path) -> set[str]:
    """Return the names by which a page's sections are linked to."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    words = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", words):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, section = target.partition("#")
        led_to = (page.parent / file).resolve() if file else page
        assert led_to.exists(), f"{page.name}: {target}"
        assert not section or section in sections(led_to), f"{page.name}: {target}"
    named = r"(?<![\w/.-])((?:recipes|rewards|tools_funcs|toolgrpo|benchmarks|tests)/[\w./]+\.\w+)\b(?!` at commit)"
    for name in re.findall(named, page.read_text()):
        places = (ROOT, ROOT / "toolgrpo", page.parent)
        assert "CONFIG" in name or any((place / name).exists() for place in places), f"{page.name}: {name}"


def test_a_coding_agent_finds_every_skill_and_page() -> None:
    for folder in (ROOT / "skills").iterdir():
        text = (folder / "SKILL.md").read_text()
        head = yaml.safe_load(text.split("---\n")[1])
        assert head["name"] == folder.name and "Use " in head["description"] and len(text.splitlines()) < 120
    made = runpy.run_path(str(ROOT / ".ci" / "llms.py"))["files"]()
    named = set(re.findall(r"\]\((docs/\S+)\)", made["llms.txt"]))
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - named == {"docs/training_issues.md"}, "it only leads elsewhere"
    assert all(f"<!-- {name} -->" in made["llms-full.txt"] for name in named)


API = ROOT / "docs" / "reference" / "api.md"
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
