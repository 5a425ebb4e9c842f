"""Links of README and docs lead to files and sections that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.page_blocks import PAGES

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


def test_the_walk_of_one_question_names_functions_that_are_there() -> None:
    """`file.py` `name` on the page is a function or a class of that file, or a method of one."""
    package = ROOT / "toolgrpo"
    named = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", (ROOT / "docs/background/one_question.md").read_text())
    assert len(named) > 40
    for file, name in named:
        owner: ast.AST = ast.parse((package / file).read_text())
        for part in name.split("."):
            found = [one for one in ast.iter_child_nodes(owner) if getattr(one, "name", None) == part]
            assert found, f"{file} has no {name}; the page names another"
            owner = found[0]
