"""Text to ids, with control tokens only where the template put them.

A rendered conversation is made of two kinds of text: the template's own, in which `<|im_end|>` is a control token, and
text from users, tools, rows and schemas, in which it is ten ordinary characters. `TextGuard` marks the second kind before
the template sees it: inside every run of characters that spells a control token it puts one character that no text may
hold, so the template can trim it, escape it as JSON or look into it, and the token is still not spelled. The encoder
cuts at the control tokens that are left and then takes the marks out. Where a template has written a mark in letters, as
Python's `repr` and an ASCII-only JSON do, the letters are taken for the mark; text that holds these letters is marked too.

Invariants:

* A control token in the ids comes from the template's own text, never from a guarded string. This also holds where a
  guarded string ends with the beginning of a token and the template goes on with the rest of it.
* Runs of plain text between control tokens are encoded whole, so for harmless text the ids are those of the tokenizer's
  own call (`bridge_proof.py` compares them).
* The two reserved characters are noncharacters of Unicode; text that holds them gets U+FFFD in their place.
* A token that swallows the space beside it (`lstrip`, `rstrip`) does so here too.
* An added token of nothing but white space, or of an element of HTML, that is not special is a way to write text, not control:
  Gemma has one for every run of line breaks, and one for `<table>`.

Hermes' markers can be *spelled*: their tokens get names that no text has, so a marker is written and read as ordinary pieces.
All ids stay, and a saved tokenizer says it by itself, so whoever loads it (a server, its parser) does the same.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from toolgrpo.errors import ChatFormatError

_GUARD = "\ufdd0"
MARK = "\ufdd1"  # a place in a rendered text; no guarded text holds it
_RESERVED = str.maketrans({_GUARD: "\ufffd", MARK: "\ufffd"})
_ELEMENT = re.compile(
    r"</?(?:a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|ol|s|span|strong|sub|sup|table|"
    r"tbody|td|tfoot|th|thead|tr|u|ul)>"
)
_LONG_TEXT = 16_384  # characters: `encode` keeps Python's lock, which a longer text would hold for too long
_MARKER = re.compile(r"</?tool_(?:call|response)>")
_SPELLED = re.compile(r"<\|spelled:(/?tool_(?:call|response))\|>")
_IN_LETTERS = {"\\ufdd0": _GUARD, "\\ufdd1": MARK}  # as repr and JSON write them


def control_tokens(tokenizer: Any) -> list[str]:
    """Return the added tokens that mean something, unlike those that are a way to write text."""
    written = _written(tokenizer)
    return [token.content for number, token in tokenizer.added_tokens_decoder.items() if number not in written]


def _written(tokenizer: Any) -> dict[int, Any]:
    """Added tokens that are a way to write text: white space and the elements of HTML, where the template prints none."""
    special, template = set(tokenizer.all_special_tokens), str(tokenizer.chat_template)
    return {
        number: token
        for number, token in tokenizer.added_tokens_decoder.items()
        if not (token.special or token.content in special)
        and (
            not token.content.replace("▁", "").strip()
            or (_ELEMENT.fullmatch(token.content) and token.content not in template)
        )
    }


def marker_tokens(tokenizer: Any) -> dict[str, int]:
    """Return Hermes' markers that are single tokens here, with their ids."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: number for number, token in added if _MARKER.fullmatch(token.content)}


def spelled_markers(tokenizer: Any) -> dict[str, int]:
    """Return the markers that this tokenizer spells, with the ids that they had."""
    named = ((_SPELLED.fullmatch(token.content), number) for number, token in tokenizer.added_tokens_decoder.items())
    return {f"<{found[1]}>": number for found, number in named if found is not None}


def with_spelled(tokenizer: Any, ids: Collection[int]) -> Any:
    """Return this tokenizer, as saving and loading it gives it, with these markers spelled."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        path = Path(folder, "tokenizer.json")
        saved = json.loads(path.read_text(encoding="utf-8"))
        for token in saved["added_tokens"]:
            if token["id"] in ids:
                token["content"] = f"<|spelled:{token['content'][1:-1]}|>"
        path.write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")
        spelled = type(tokenizer).from_pretrained(folder)
    spelled.name_or_path = tokenizer.name_or_path
    if set(spelled.added_tokens_decoder) != set(tokenizer.added_tokens_decoder) or set(ids) & set(
        marker_tokens(spelled).values()
    ):
        raise ChatFormatError(
            f"the tokenizer of {tokenizer.name_or_path} cannot spell its markers: renaming their tokens moves others. Set "
            f"--call_markers tokens"
        )
    return spelled


def with_marks(rendered: str) -> str:
    """Return what a template printed, with marks where it wrote them in letters."""
    for letters, mark in _IN_LETTERS.items():
        if letters in rendered:
            rendered = rendered.replace(letters, mark)
    return rendered


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return the longest of these texts that stands at a place, in a group; None if there are no texts.

    Its branches part where the texts do: some tokenizers have thousands of tokens that begin alike, and a place is looked at
    no longer than the longest of them.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(f"({_branches(tree)})") if tree else None


def _branches(tree: Mapping[str, Any]) -> str:
    further = [re.escape(letter) + _branches(rest) for letter, rest in tree.items() if letter]
    if not further:
        return ""
    one = further[0] if len(further) == 1 and "" not in tree else f"(?:{'|'.join(further)})"
    return one + ("?" if "" in tree else "")


class TextGuard:
    """Makes text harmless: what it returns spells no control token, alone or beside a template's text."""

    def __init__(self, control: Iterable[str], *, for_template: bool = False) -> None:
        """`for_template`: what is guarded may come out of a template with its marks in letters."""
        tokens = list(control)
        letters = tuple(_IN_LETTERS) if for_template else ()
        self._pattern = _any_of([*tokens, *letters])
        self._beginnings = {token[:cut] for token in tokens for cut in range(1, len(token))}
        self._endings = {token[cut:] for token in tokens for cut in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)
        self._edges = {edge for token in tokens for edge in (token[0], token[-1])} | {text[:5] for text in letters}

    def text(self, text: str) -> str:
        """Return `text` with marks where it could be read as control; the encoder takes them out again."""
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
        """Return the same for every string in a message or a schema, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def is_guarded(*texts: str) -> bool:
    """Return whether there are marks in any of them."""
    return any(_GUARD in text for text in texts)


def unguarded(value: Any) -> Any:
    """Return the same without marks, keys included."""
    if isinstance(value, str):
        return value.replace(_GUARD, "")
    if isinstance(value, Mapping):
        return {unguarded(key): unguarded(item) for key, item in value.items()}
    return [unguarded(item) for item in value] if isinstance(value, list) else value


def _within_text(splitter: Any) -> Any:
    """Return a pre-tokenizer that adds no space before a text's first word: each piece here follows a control token."""
    within = copy.deepcopy(splitter)
    state = within.__getstate__()
    if b'"prepend_scheme":"first"' in state:
        within.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
    return within


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
        added, written = dict(tokenizer.added_tokens_decoder), _written(tokenizer)
        self.control = {token.content: number for number, token in added.items() if number not in written}
        self._plain = Tokenizer(backend.model)  # the same vocabulary, not a copy
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = _within_text(backend.pre_tokenizer)
        self._plain.add_tokens(list(written.values()))
        # Without the tokens before them these may have other ids here than the tokenizer gives them.
        moved = {self._plain.token_to_id(token.content): number for number, token in written.items()}
        self._moved = {here: there for here, there in moved.items() if here != there}
        self._pattern = _any_of(self.control)
        self._swallows_after = {token.content for token in added.values() if token.rstrip}
        self._swallows_before = {token.content for token in added.values() if token.lstrip}

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of a rendered conversation, or of a part of one that begins and ends between tokens."""
        ids: list[int] = []
        pieces = self._pattern.split(rendered) if self._pattern is not None else [rendered]
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self.control[piece])
                continue
            text = piece.replace(_GUARD, "")
            if place and pieces[place - 1] in self._swallows_after:
                text = text.lstrip()
            if place + 1 < len(pieces) and pieces[place + 1] in self._swallows_before:
                text = text.rstrip()
            if text:
                ids.extend(self.plain(text))
        return ids

    def plain(self, text: str) -> list[int]:
        """Return the ids of text in which nothing is a control token."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair has no encoding
        if len(clean) < _LONG_TEXT:
            ids: list[int] = self._plain.encode(clean, add_special_tokens=False).ids
        else:
            ids = self._plain.encode_batch_fast([clean], add_special_tokens=False)[0].ids
        return [self._moved.get(number, number) for number in ids] if self._moved else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return what ids say, control tokens included; the tokenizer's own `decode` looks at each id first."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text
