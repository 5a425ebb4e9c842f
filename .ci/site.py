"""Fit the repository's Markdown to the site: two READMEs are pages of it, other files outside docs/ are named and not linked.

`llms.txt` and `llms-full.txt` are made beside it (`llms.py`).
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"README.md": "index.md", "confined-python/README.md": "background/confined_python.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are elsewhere."""
    for path, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
    return files


def on_post_build(config: Any) -> None:
    """Write llms.txt and llms-full.txt into the site."""
    made = runpy.run_path(str(ROOT / ".ci" / "llms.py"))["files"](lambda page: page.replace(".md", ".html"))
    for name, text in made.items():
        Path(config.site_dir, name).write_text(text, "utf-8")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links: seen from the site where they lead to a page, as a file's name where they do not."""
    source = next((path for path, uri in ELSEWHERE.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")
    folder = os.path.dirname(source)

    def seen_from_the_site(found: re.Match[str]) -> str:
        image, text, target, section = found.groups("")
        if re.match(r"[a-z]+:", target) or not target:
            return found[0]
        path = os.path.normpath(os.path.join(folder, target))
        assert (ROOT / path).exists(), f"{page.file.src_uri}: {target} does not exist"
        if path in ELSEWHERE:
            path = f"docs/{ELSEWHERE[path]}"
        if not path.startswith("docs/"):
            return f"{text} (`{path}`)" if path not in text else text
        return f"{image}[{text}]({os.path.relpath(path, os.path.dirname(f'docs/{page.file.src_uri}'))}{section})"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.M | re.S)  # code stays as it is
    link = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
    return "".join(part if n % 2 else link.sub(seen_from_the_site, part) for n, part in enumerate(parts))
