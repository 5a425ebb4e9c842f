"""The terminal: a console that never hides the cursor, and warnings as lines on it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rich.console import Console


class SteadyConsole(Console):
    """Rich's console, with a cursor that is always shown.

    A live bar hides it and shows it again when it stops. A process that is killed meanwhile (a
    second Ctrl-C, a crash in native code) cannot, and leaves a terminal without a cursor.
    """

    def show_cursor(self, show: bool = True) -> bool:
        return False


def show_warnings(say: Callable[[str], None]) -> None:
    """Pass warnings to `say` from now on, and to nobody who got them before.

    They are those of engines (a server is waited for) and of readers of recordings (a line is left out).
    """
    for name in ("toolgrpo.engines", "toolgrpo.observe.records"):
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if isinstance(handler, WarningLines)]:
            logger.removeHandler(handler)
        logger.addHandler(WarningLines(say))


class WarningLines(logging.Handler):
    """Pass the text of each warning to `say`, whose failure ends no run."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.getMessage())
        except Exception:  # a line that cannot be shown or written
            self.handleError(record)
