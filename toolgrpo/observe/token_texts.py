"""What one token is, for a reader without its tokenizer: its text, and its bytes where it is but a
part of a character.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HALF = "\ufffd"  # what a decoder writes for bytes that make no character


def token_texts(tokenizer: Any) -> Callable[[int], dict[str, Any]]:
    """Return a function from a token id to `text`, and `bytes` and `special` where they say more."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special |= {number for number, token in added.items() if getattr(token, "special", False)}

    def describe(number: int) -> dict[str, Any]:
        text = str(tokenizer.decode([number], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        found: dict[str, Any] = {"text": text}
        if number in special:
            found["special"] = True
        elif _HALF in text:
            raw = _bytes_of(str(tokenizer.convert_ids_to_tokens(number)))
            if raw is not None:
                found["bytes"] = raw.hex()
        return found

    return describe


def _bytes_of(token: str) -> bytes | None:
    """Return the bytes that a token of a vocabulary stands for, if it is written in a known way."""
    single = _BYTE_TOKEN.fullmatch(token)
    if single is not None:
        return bytes([int(single[1], 16)])
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return None


def _byte_letters() -> dict[str, int]:
    """Return the letter by which byte-level vocabularies write each byte, as GPT-2 chose them."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return {**letters, **{chr(256 + place): byte for place, byte in enumerate(hidden)}}


_BYTE_OF = _byte_letters()
