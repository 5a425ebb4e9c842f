"""Write the page: one self-contained HTML file that may load and run nothing else.

The content security policy allows the one style and the one script of this file by their hashes,
and no network. Data stands in blocks that no browser runs, as base64 of compressed JSON: none of it
is ever parsed as HTML, and the script shows it as text only.

The blocks are written as they come, so the page of a long run needs no more memory than that of a
short one; the file appears under its name when it is whole.

A piece is read when somebody looks at it, by its number; a line when the page opens. A block holds
one piece, or several small ones that are read together, or many lines: a browser takes about a
millisecond to begin with a block, which a search through all steps would pay for each.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from toolgrpo.support.plain_text import finite, plain

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


_PER_BLOCK = 1000  # pieces; piece 2003 is the fourth of block c2 (`page/data.js` counts so, too)
_ENOUGH = 200_000  # characters in a block that several pieces, or lines, share


class PageWriter:
    """Writes one page: `piece` and `line` for its data, then `finish` with the index."""

    def __init__(self, path: Path, title: str, *, live: str = "") -> None:
        self.path = path
        self._half = path.with_name(f"{path.name}.half")
        self._style, self._script = page_parts()
        self._n_blocks = 0
        self._shared: list[str] = []  # pieces of the block that is being filled
        self._shared_number = 0
        self._lines: list[str] = []  # of the block that is being filled
        self._n_line_blocks = 0
        self._live = live
        self._file: IO[str] = self._half.open("w", encoding="utf-8", newline="\n")
        self._file.write(self._head(title))

    def piece(self, value: dict[str, Any], *, alone: bool = True) -> int:
        """Write a piece of data, `alone` in its block; return its number, by which the page finds it."""
        text = _as_json(value)
        if alone:
            self._n_blocks += 1
            self._block(f"c{self._n_blocks - 1}", [text])
            return (self._n_blocks - 1) * _PER_BLOCK
        if not self._shared:
            self._shared_number = self._n_blocks
            self._n_blocks += 1
        self._shared.append(text)
        number = self._shared_number * _PER_BLOCK + len(self._shared) - 1
        if _is_full(self._shared):
            self._write_shared()
        return number

    def line(self, value: dict[str, Any]) -> None:
        """Write a line; the page reads lines in this order."""
        self._lines.append(_as_json(value))
        if _is_full(self._lines):
            self._write_lines()

    def finish(self, index: dict[str, Any]) -> None:
        """Write the index and the script, and give the file its name."""
        self._write_shared()
        self._write_lines()
        self._block("index", [_as_json({**index, "live": self._live})])
        self._file.write(f"<script>{self._script}</script>\n</body>\n</html>\n")
        self._file.close()
        self._half.replace(self.path)

    def _write_shared(self) -> None:
        if self._shared:
            self._block(f"c{self._shared_number}", self._shared)
        self._shared = []

    def _write_lines(self) -> None:
        if self._lines:
            self._block(f"lines{self._n_line_blocks}", self._lines)
            self._n_line_blocks += 1
        self._lines = []

    def abandon(self) -> None:
        """Leave no half page behind."""
        self._file.close()
        self._half.unlink(missing_ok=True)

    def _block(self, name: str, values: list[str]) -> None:
        text = values[0] if name == "index" else f"[{','.join(values)}]"
        packed = base64.b64encode(zlib.compress(text.encode(), 6)).decode()
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
            f"<title>{html.escape(plain(title))}</title>\n"
            f"<style>{self._style}</style>\n</head>\n<body>\n"
            '<div id="app"><p class="loading">Reading the report ...</p>'
            "<noscript><p>A script inside this report draws it. Allow scripts for this "
            "file to see it.</p></noscript></div>\n"
        )


def _is_full(texts: list[str]) -> bool:
    return len(texts) == _PER_BLOCK or sum(map(len, texts)) >= _ENOUGH


def _as_json(value: Any) -> str:
    """Return JSON that a browser reads: it knows no NaN and no infinity."""
    try:
        return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), separators=(",", ":"), default=str, allow_nan=False)


def _hash(text: str) -> str:
    """Return the hash by which a content security policy allows an inline block."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
