"""Text to ids, with control tokens only where the template put them.

A rendered conversation is made of two kinds of text: the template's own, in which `<|im_end|>` is a control token, and
content from users, tools and rows, in which it is twelve ordinary characters. Contents are rendered as placeholders, so
the two can be told apart afterwards; runs of plain text between control tokens are encoded whole, content and template
together, so that for harmless text the ids are those of the tokenizer's own call.

Not covered: templates that change a content before they print it (trim it, escape it); `TemplateRenderer` sees that the
placeholder went missing and says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

__all__ = ["Encoder", "Placeholders"]

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"  # private-use characters: no template, schema or ordinary text holds them


class Placeholders:
    """Stands in for contents while a template is rendered."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def put(self, text: str) -> str:
        """A placeholder for `text`; empty text stays empty, because templates ask for that."""
        if not text:
            return text
        self._texts.append(text)
        return f"{_OPEN}{len(self._texts) - 1}{_CLOSE}"

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The rendered text as (text, is_content) parts, placeholders filled in."""
        for part in re.split(f"({_OPEN}[0-9]+{_CLOSE})", rendered):
            if part.startswith(_OPEN) and part.endswith(_CLOSE):
                yield self._texts[int(part[1:-1])], True
            elif part:
                yield part, False


class Encoder:
    """Encodes (text, is_content) parts."""

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        description = json.loads(backend.to_str())
        self.control: dict[str, int] = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
        description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._plain = Tokenizer.from_str(json.dumps(description))
        longest_first = sorted(self.control, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair has no encoding
        ids: list[int] = self._plain.encode(clean, add_special_tokens=False).ids
        return ids

    def encode(self, parts: Iterator[tuple[str, bool]] | Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a rendered conversation."""
        ids: list[int] = []
        run: list[str] = []

        def flush() -> None:
            if run:
                ids.extend(self.plain("".join(run)))
                run.clear()

        for text, is_content in parts:
            pieces = [text] if is_content or self._pattern is None else self._pattern.split(text)
            for piece in pieces:
                if not is_content and piece in self.control:
                    flush()
                    ids.append(self.control[piece])
                elif piece:
                    run.append(piece)
        flush()
        return ids
