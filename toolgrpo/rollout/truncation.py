"""Cut a long tool result in the middle, counted in tokens, and say so in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from toolgrpo.tools.render import RenderedText, ends_of, joined

_LONGEST_TOKEN_CHARS = 128  # no vocabulary of the supported families has a longer entry that matters here
_HALF_A_CHARACTER = "\ufffd"  # what a cut between the tokens of one character leaves on both sides


class TextTokenizer(Protocol):
    """The two sides of a tokenizer, and how many ids it has."""

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


class TokenCutter:
    """Keeps the first and last tokens of a text longer than `max_tokens`; None keeps all."""

    def __init__(self, tokenizer: TextTokenizer, max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def __call__(self, text: str, left_out: int = 0) -> RenderedText:
        """Cut a text; a notice in it that counts `left_out` characters becomes one of all."""
        limit = self._max_tokens
        # A token is a byte at least, and some tokenizers begin every text with one more.
        if limit is None or len(text.encode(errors="replace")) < limit:
            return RenderedText(text, left_out)
        # Only the ends can survive, so only they are tokenized: a megabyte of output costs no more
        # than a page.
        window = limit * _LONGEST_TOKEN_CHARS
        if len(text) <= window and len(self._encode(text)) <= limit:
            return RenderedText(text, left_out)
        ends = ends_of(text, left_out)
        half = limit // 2
        head = self._tokenizer.decode(self._encode(ends.first[:window])[: limit - half])
        tail = self._tokenizer.decode(self._encode(ends.last[-window:])[-half:]) if half else ""
        return joined(head.removesuffix(_HALF_A_CHARACTER), tail.removeprefix(_HALF_A_CHARACTER), ends.n_chars)

    def _encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
