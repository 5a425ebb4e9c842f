"""Python that others wrote, read as Python from any thread. Standard library only."""

from __future__ import annotations

import ast
import threading
from typing import Any

_PARSING = threading.Lock()


def parse_python(source: str | bytes, mode: str = "exec") -> Any:
    """Do as `ast.parse`, one thread at a time: its counter of depth is the process's, and two at once are a SystemError."""
    with _PARSING:
        return ast.parse(source, mode=mode)
