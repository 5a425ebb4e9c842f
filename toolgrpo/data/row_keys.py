"""A name for a row that stays the same in every selection and order of the data: its prompt's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def row_key(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of a prompt, text or messages; what a data set fills up with None is no part."""
    said = (
        prompt
        if isinstance(prompt, str)
        else [{key: value for key, value in message.items() if value is not None} for message in prompt]
    )
    text = json.dumps(said, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
