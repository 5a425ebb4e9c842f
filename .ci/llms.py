"""Make llms.txt, a list of the pages for a language model, and llms-full.txt, all of them in one file.

The site has both (`.ci/site.py`), and so has the wheel, beside `docs` (`.ci/wheel.py`). It needs the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_ABOUT = "Teach a language model to use your tools by reinforcement learning: a Python package over TRL's GRPOTrainer."


def pages() -> dict[str, list[str]]:
    """Return the pages of the site by the heading that `mkdocs.yml` has them under."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].splitlines():
        entry = re.fullmatch(r"\s*- (?:(.+?):)?\s*(\S+\.md)?", line)
        assert entry is not None, f"mkdocs.yml: {line!r} is no entry of the nav"
        if entry[2] is None:
            heading = entry[1]
        elif (ROOT / "docs" / entry[2]).is_file():  # not the two READMEs; ours begins the files
            found.setdefault(heading or "Start", []).append(entry[2])
    return found


def _plain(page: Path) -> str:
    """Return a page without pictures and without the comments for tests."""
    return re.sub(r"<!--.*?-->\n|^!\[.*?\]\(.*?\)\n+", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def _entry(page: str, link: Callable[[str], str]) -> str:
    title, _, text = _plain(ROOT / "docs" / page).partition("\n")
    first = re.split(r"(?<=\.)\s|\n\n", text.strip(), maxsplit=1)[0].replace("\n", " ")
    first = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    first = first.replace("**", "")
    said = f": {first}" if first.endswith(".") and len(first) < 250 else ""
    return f"- [{title.removeprefix('# ')}]({link(page)}){said}"


def files(link: Callable[[str], str] = "docs/{}".format) -> dict[str, str]:
    """Return both files by name; `link` says where a page of docs/ is, seen from them."""
    lists = [
        f"## {heading}\n\n" + "\n".join(_entry(page, link) for page in names) for heading, names in pages().items()
    ]
    whole = [("README.md", ROOT / "README.md")]
    whole += [(f"docs/{page}", ROOT / "docs" / page) for names in pages().values() for page in names]
    return {
        "llms.txt": "\n\n".join(["# toolgrpo", f"> {_ABOUT}", *lists]) + "\n",
        "llms-full.txt": "\n".join(f"<!-- {name} -->\n\n{_plain(page)}" for name, page in whole),
    }
