"""Every sentence of the package is in `sentences.txt`, so English is edited and reviewed in one place.

A sentence is a string of three or more words that is not a docstring; of an expression in it only a plain name is kept.
Other tests assert an error's class and its facts (the flag, the file, the value), never the words around them.
After an edit: `python tests/project/test_sentences.py --write`, and read the diff; it names the tests that quote words that went.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.lock

ROOT = Path(__file__).parents[2]
REVIEWED = Path(__file__).with_name("sentences.txt")
NAME = re.compile(r"[\w.]+")
WORD = re.compile(r"\b[A-Za-z]{2,}\b")


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            name = ast.unparse(part.value)
            parts.append(f"{{{name if NAME.fullmatch(name) else ''}}}")
        elif isinstance(part, ast.Constant):
            parts.append(str(part.value))
    return "".join(parts)


def sentences_of(module: Path) -> Iterator[str]:
    skipped = set[ast.AST]()  # docstrings, and the parts of what was read as a whole (`walk` meets a parent first)
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in skipped:
            if isinstance(node, ast.JoinedStr):
                skipped.update(node.values)
            text = text_of(node)
            if " " in text.strip() and len(WORD.findall(re.sub(r"\{[^}]*\}", "", text))) >= 3:
                yield text.replace("\n", "\\n").strip()


def snapshot() -> str:
    modules = {path: sorted(set(sentences_of(path))) for path in sorted((ROOT / "toolgrpo").rglob("*.py"))}
    return "\n".join(
        "\n    ".join([path.relative_to(ROOT).as_posix(), *found]) for path, found in modules.items() if found
    )


def phrases(text: str) -> set[str]:
    """Every four words in a row, of the words between two expressions."""
    rows = [part.split() for line in text.splitlines() for part in re.split(r"\{[^}]*\}", line)]
    return {" ".join(words[n : n + 4]) for words in rows for n in range(len(words) - 3)}


def write() -> None:
    reviewed, now = REVIEWED.read_text("utf-8") if REVIEWED.exists() else "", snapshot() + "\n"
    REVIEWED.write_text(now, "utf-8")
    gone = phrases(reviewed) - phrases(now)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if phrases(re.sub(r"[\"']", " ", line)) & gone:
                print(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")


def test_each_sentence_was_reviewed() -> None:
    reviewed, now = REVIEWED.read_text("utf-8").splitlines(), snapshot().splitlines()
    changed = "\n".join(difflib.unified_diff(reviewed, now, "reviewed", "now", lineterm="", n=0))
    assert not changed, f"{changed}\n\npython {Path(__file__).relative_to(ROOT)} --write"


if __name__ == "__main__":
    write() if "--write" in sys.argv else print(snapshot())
