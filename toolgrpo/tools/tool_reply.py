"""What a worker, an environment or a server answered, before it becomes a `ToolResult`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolgrpo.calls import ToolErrorKind


@dataclass(frozen=True, slots=True)
class Reply:
    """The text of an answer, or an error and what it says. Times are of `time.monotonic`."""

    text: str
    error: ToolErrorKind | None = None
    left_out: int = 0  # characters that were cut out of the text
    started: float = 0.0
    ended: float = 0.0
    cached: bool = False
    silent: bool = False  # there was no text at all, as for an environment without a first observation

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Reply:
        """Read a worker's frame.

        What does not look like one is the tool's doing and counts as its death.
        """
        error, text, left_out = message.get("error"), message.get("text"), message.get("left_out", 0)
        if error is not None and error not in list(ToolErrorKind):
            return cls("the process of the tool answered nonsense", ToolErrorKind.DIED)
        return cls(
            text=text if isinstance(text, str) else "",
            error=None if error is None else ToolErrorKind(error),
            left_out=left_out if isinstance(left_out, int) and left_out > 0 else 0,
            silent=text is None,
        )

    def timed(self, started: float, ended: float) -> Reply:
        return replace(self, started=started or ended, ended=ended)
