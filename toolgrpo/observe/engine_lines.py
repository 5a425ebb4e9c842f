"""What engines log as a warning, on the terminal too: that a server is waited for,
or gave an answer that cannot be used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_ENGINES = "toolgrpo.engines"


def show_engine_lines(say: Callable[[str], None]) -> None:
    """Pass the engines' warnings to `say` from now on, and to nobody who was told of before."""
    logger = logging.getLogger(_ENGINES)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Saying)]:
        logger.removeHandler(handler)
    logger.addHandler(_Saying(say))


class _Saying(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.getMessage())
        except Exception:  # a line that cannot be shown ends no run
            self.handleError(record)
