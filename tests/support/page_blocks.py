"""The fenced blocks of a page of Markdown, and what is done with each to keep it true.

An HTML comment on the line before a block says what it is:

    <!-- file: NAME -->              the block is this file; later blocks find it
    <!-- file: NAME, of FOLDER -->   and it is, to the letter, the one in this folder of the clone
    <!-- run -->                     it runs as it stands, after the blocks before it
    <!-- not run: WHY -->            it is only read: its syntax, and the flags of its commands

`run` may be followed by conditions, each after a bar: `slowly` (in the long tests only), `OLD => NEW` (a text that is
replaced first; it must be there), `adding WORDS` (behind the last command).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
_READMES = [ROOT / folder / "README.md" for folder in ("", "recipes", "confined-python")]
PAGES = sorted([*_READMES, *(page for name in ("docs", "skills") for page in (ROOT / name).rglob("*.md"))])
SHELL = frozenset({"", "bash", "console", "sh"})
Doing = Literal["file", "run", "not run", "unsaid"]


@dataclass(frozen=True, slots=True)
class Block:
    """One block, where it stands, and what its comment says."""

    page: Path
    line: int
    language: str
    text: str
    doing: Doing
    about: str = ""  # the file's name, or why it is not run
    of: str | None = None  # the folder of the clone that has the same file
    slowly: bool = False

    @property
    def where(self) -> str:
        return f"{self.page.parent.name}/{self.page.name}:{self.line}"


def page_blocks(page: Path) -> list[Block]:
    """Return every fenced block of a page, in order."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    said = ""
    rest = iter(enumerate(page.read_text("utf-8").splitlines(), start=1))
    for number, line in rest:
        fence = re.match(r"^(\s*)(`{3,})\s*(\w*)\s*$", line)
        if fence is None:
            comment = re.match(r"^\s*<!-- (.*) -->\s*$", line)
            said = comment[1] if comment else said if not line.strip() else ""
            continue
        indent, ticks, language = fence.groups()
        text = []
        for _, inside in rest:
            if inside.strip() == ticks:
                break
            text.append(inside.removeprefix(indent))
        else:
            raise ValueError(f"{page}:{number}: this block has no end")
        yield _told(page, number, language, "\n".join(text) + "\n", said)
        said = ""


def _told(page: Path, line: int, language: str, text: str, said: str) -> Block:
    """Return the block as its comment wants it."""
    if said.startswith("file: "):
        name, _, folder = said.removeprefix("file: ").partition(", of ")
        return Block(page, line, language, text, "file", name, of=folder or None)
    if said.startswith("not run: "):
        return Block(page, line, language, text, "not run", said.removeprefix("not run: "))
    first, *conditions = [part.strip() for part in said.split(" | ")]
    if first != "run":
        return Block(page, line, language, text, "unsaid", said)
    slowly = False
    for condition in conditions:
        old, arrow, new = condition.partition(" => ")
        if condition == "slowly":
            slowly = True
        elif condition.startswith("adding "):
            text = text.rstrip("\n") + condition.removeprefix("adding") + "\n"
        elif not arrow or old not in text:
            raise ValueError(
                f"{page}:{line}: {condition!r} is no condition of a block, or replaces what it does not have"
            )
        else:
            text = text.replace(old, new)
    return Block(page, line, language, text, "run", slowly=slowly)


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]
