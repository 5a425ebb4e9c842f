"""Text to ids, with control tokens only where the template put them.

A rendered conversation is made of two kinds of text: the template's own, in which `<|im_end|>` is a control token, and
text from users, tools, rows and schemas, in which it is ten ordinary characters. `Guard` marks the second kind before
the template sees it: inside every run of characters that spells a control token it puts one character that no text may
hold, so the template can trim it, escape it as JSON or look into it, and the token is still not spelled. The encoder
cuts at the control tokens that are left and then takes the marks out.

Invariants:

* A control token in the ids comes from the template's own text, never from a guarded string. This also holds where a
  guarded string ends with the beginning of a token and the template goes on with the rest of it.
* Runs of plain text between control tokens are encoded whole, so for harmless text the ids are those of the tokenizer's
  own call (`proof.py` compares them).
* The two reserved characters are noncharacters of Unicode; text that holds them gets U+FFFD in their place.

Not covered: added tokens that swallow the space beside them (`lstrip`, `rstrip`); the proof finds such a tokenizer out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from toolgrpo.errors import ChatFormatError

__all__ = ["MARK", "Encoder", "Guard", "is_guarded", "unguarded"]

_GUARD = "\ufdd0"
MARK = "\ufdd1"  # a place in a rendered text; no guarded text holds it
_RESERVED = str.maketrans({_GUARD: "\ufffd", MARK: "\ufffd"})


class Guard:
    """Makes text harmless: what it returns spells no control token, alone or beside a template's text."""

    def __init__(self, control: Iterable[str]) -> None:
        tokens = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._beginnings = {token[:cut] for token in tokens for cut in range(1, len(token))}
        self._endings = {token[cut:] for token in tokens for cut in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)
        self._edges = {edge for token in tokens for edge in (token[0], token[-1])}

    def text(self, text: str) -> str:
        """`text` with marks where it could be read as control; the encoder takes them out again."""
        if _GUARD in text or MARK in text:
            text = text.translate(_RESERVED)
        if not any(edge in text for edge in self._edges):
            return text  # it holds no token, no beginning of one and no end
        if self._pattern is not None:
            text = self._pattern.sub(lambda found: found[0][0] + _GUARD + found[0][1:], text)
        reach = range(1, min(len(text), self._longest) + 1)
        after = _GUARD if any(text[-length:] in self._beginnings for length in reach) else ""
        before = _GUARD if any(text[:length] in self._endings for length in reach) else ""
        return before + text + after

    def value(self, value: Any) -> Any:
        """The same for every string in a message or a schema, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def is_guarded(*texts: str) -> bool:
    """Whether there are marks in any of them."""
    return any(_GUARD in text for text in texts)


def unguarded(value: Any) -> Any:
    """The same without marks, keys included."""
    if isinstance(value, str):
        return value.replace(_GUARD, "")
    if isinstance(value, Mapping):
        return {unguarded(key): unguarded(item) for key, item in value.items()}
    return [unguarded(item) for item in value] if isinstance(value, list) else value


class Encoder:
    """Encodes rendered text, control tokens by their ids and everything else as plain text; and decodes ids."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatFormatError(
                f"a chat format needs a tokenizer of the `tokenizers` library, and {type(tokenizer).__name__} has none; "
                f"load it with transformers.AutoTokenizer"
            )
        self._backend = backend
        description = json.loads(backend.to_str())
        self.control: dict[str, int] = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
        description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._plain = Tokenizer.from_str(json.dumps(description))
        longest_first = sorted(self.control, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered conversation, or of a part of one that begins and ends between tokens."""
        ids: list[int] = []
        for piece in self._pattern.split(rendered) if self._pattern is not None else [rendered]:
            if piece in self.control:
                ids.append(self.control[piece])
            elif piece:
                ids.extend(self.plain(piece.replace(_GUARD, "")))
        return ids

    def plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair has no encoding
        ids: list[int] = self._plain.encode(clean, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens included; the tokenizer's own `decode` looks at each id first."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text
