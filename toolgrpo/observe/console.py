"""The terminal: a console that never hides the cursor, and the engines' warnings as lines on it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console


class SteadyConsole(Console):
    """Rich's console, with a cursor that is always shown.

    A live bar hides it and shows it again when it stops. A process that is killed meanwhile (a
    second Ctrl-C, a crash in native code) cannot, and leaves a terminal without a cursor.
    In a pipe no line ends in spaces.
    """

    def print(self, *objects: Any, **how: Any) -> None:
        if self.is_terminal:
            super().print(*objects, **how)
            return
        with self.capture() as shown:
            super().print(*objects, **how)
        self.file.write(re.sub(" +$", "", shown.get(), flags=re.MULTILINE))
        self.file.flush()

    def show_cursor(self, show: bool = True) -> bool:
        return False


def show_engine_lines(say: Callable[[str], None]) -> None:
    """Pass the engines' warnings to `say` from now on: a server is waited for, or its answer cannot be used.

    Whoever was told of them before is not any more.
    """
    logger = logging.getLogger("toolgrpo.engines")
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
