"""Write the page: one HTML file that needs nothing else, and may do nothing else.

The content security policy allows the one style and the one script of this file by their hashes,
and no network. Data stands in blocks that no browser runs, as base64 of compressed JSON: none of it
is ever parsed as HTML, and the script shows it as text only.

The blocks are written as they come, so the page of a long run needs no more memory than that of a
short one; the file appears under its name when it is whole.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import zlib
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

__all__ = ["PageWriter", "page_parts"]

# In this order: each may use what stands before it.
SCRIPTS = (
    *("data.js", "dom.js", "charts.js", "overview.js", "groups.js", "tokens.js", "episode.js"),
    *("timeline.js", "find.js", "compare.js", "reinforced.js", "findings.js", "main.js"),
)


def page_parts() -> tuple[str, str]:
    """Return the style and the script of the page."""
    folder = files("toolgrpo.report").joinpath("page")
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    bodies = [f"// {name}\n{folder.joinpath(name).read_text(encoding='utf-8')}" for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(bodies) + "\n})();\n"
    return f"\n{style}", f"\n{script}"


class PageWriter:
    """Writes one page: `chunk` for each piece of data, then `finish` with the index."""

    def __init__(self, path: Path, title: str, *, live: bool = False) -> None:
        self.path = path
        self._half = path.with_name(f"{path.name}.half")
        self._style, self._script = page_parts()
        self._n_chunks = 0
        self._live = live
        self._file: IO[str] = self._half.open("w", encoding="utf-8", newline="\n")
        self._file.write(self._head(title))

    def chunk(self, value: dict[str, Any]) -> int:
        """Write a piece of data; returns its number, by which the page finds it."""
        number = self._n_chunks
        self._n_chunks += 1
        self._block(f"c{number}", value)
        return number

    def finish(self, index: dict[str, Any]) -> None:
        """Write the index and the script, and give the file its name."""
        self._block("index", {**index, "live": self._live})
        self._file.write(f"<script>{self._script}</script>\n</body>\n</html>\n")
        self._file.close()
        self._half.replace(self.path)

    def abandon(self) -> None:
        """Leave no half page behind."""
        self._file.close()
        self._half.unlink(missing_ok=True)

    def _block(self, name: str, value: dict[str, Any]) -> None:
        packed = base64.b64encode(zlib.compress(_as_json(value).encode(), 6)).decode()
        self._file.write(f'<script type="text/plain" id="{name}">{packed}</script>\n')

    def _head(self, title: str) -> str:
        connect = "connect-src 'self'; " if self._live else ""
        policy = (
            f"default-src 'none'; script-src '{_hash(self._script)}'; style-src '{_hash(self._style)}'; {connect}"
            f"img-src data:; base-uri 'none'; form-action 'none'"
        )
        return (
            "<!doctype html>\n"
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            '<meta name="referrer" content="no-referrer">\n'
            f"<title>{html.escape(title)}</title>\n"
            f"<style>{self._style}</style>\n</head>\n<body>\n"
            '<div id="app"><p class="loading">Reading the report ...</p>'
            "<noscript><p>This report is drawn by a script that stands inside it. Allow scripts for this "
            "file to see it.</p></noscript></div>\n"
        )


def _as_json(value: Any) -> str:
    """Return JSON that a browser reads: it knows no NaN and no infinity."""
    try:
        return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _hash(text: str) -> str:
    """Return what a content security policy calls an inline block."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
