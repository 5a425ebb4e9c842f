"""Cut a long tool result in the middle, counted in tokens, and say so in the text."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Cut", "TokenCutter"]

_LONGEST_TOKEN_CHARS = 128  # no vocabulary of the supported families has a longer entry that matters here


class Cut(NamedTuple):
    text: str
    truncated: bool


class TokenCutter:
    """Keeps the first and last tokens of a text that is longer than `max_tokens`."""

    def __init__(self, tokenizer: Any, max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def __call__(self, text: str) -> Cut:
        limit = self._max_tokens
        if limit is None or len(text) <= limit:  # a token is at least one character
            return Cut(text, False)
        # Only the ends can survive, so only they are tokenized: a megabyte of output costs no more than a page.
        window = limit * _LONGEST_TOKEN_CHARS
        head_ids = self._encode(text[:window])
        if len(text) <= window and len(head_ids) <= limit:
            return Cut(text, False)
        tail_ids = self._encode(text[-window:])
        half = limit // 2
        head, tail = self._decode(head_ids[: limit - half]), self._decode(tail_ids[-half:] if half else [])
        dropped = len(text) - len(head) - len(tail)
        return Cut(f"{head}\n[... {dropped} characters left out ...]\n{tail}", True)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text
