"""The terminal: a console that never hides the cursor; warnings, and what a user's files print, as lines on it."""

from __future__ import annotations

import logging
import os
import re
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

_LONGEST = 2000  # characters of what is printed at a time
_PACKAGE = Path(__file__).parents[1]
_PRINTERS = {"logging", "traceback", "warnings", "wandb"}  # by which a file prints; wandb wraps the streams
LOGGERS = [logging.getLogger(name) for name in ("toolgrpo", "confined_python")]  # ours, and the sandbox's


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


def show_warnings(say: Callable[[str], None]) -> logging.Handler:
    """Pass this package's warnings to `say` from now on, and to no other `say`; return the handler that does it."""
    shown = _ShownWarnings(say)
    for logger in LOGGERS:
        for handler in [one for one in logger.handlers if isinstance(one, _ShownWarnings)]:
            logger.removeHandler(handler)
        logger.addHandler(shown)
    return shown


def show_tool_output(say: Callable[[str], None]) -> None:
    """Pass the first lines that tools print to `say`, too."""
    logger = logging.getLogger("toolgrpo.tools.output")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [WarningLines(say, logging.INFO)]


def are_shown(logger: logging.Logger) -> bool:
    """Return whether somebody set up logging, whose handlers show warnings: then they are not shown a second time."""
    return any(not isinstance(one, WarningLines) for name in (logger, logger.root) for one in name.handlers)


def plain_warnings() -> None:
    """Let Python's warnings be one line each from now on, of this package one sentence, and none be shown twice."""
    shown: set[str] = set()  # Python forgets what it showed when a library changes the filters

    def one_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = filename.startswith(str(_PACKAGE))
        text = f"warning   {message}\n" if ours else f"{filename}:{lineno}: {category.__name__}: {message}\n"
        if text in shown:
            return ""
        shown.add(text)
        return text

    warnings.formatwarning = one_line


def prints_for(frame: FrameType | None) -> str | None:
    """Return `user` if a user's file prints, logs or warns here, `ours` if this package warns, else None."""
    through: set[str] = set()
    while frame is not None and (module := _top_module(frame)) in _PRINTERS:
        through.add(module)
        frame = frame.f_back
    if frame is None:
        return None
    if "warnings" in through and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        return "ours"
    return "user" if _is_of_user(frame.f_code.co_filename) else None


def _top_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0].removeprefix("_py_")


@cache
def _is_of_user(file: str) -> bool:
    """Return whether a file is a user's plugin, and not Python's, a package's or ours."""
    place = os.path.realpath(file)
    installed = (sysconfig.get_path("stdlib"), str(_PACKAGE))
    return os.path.isfile(place) and "-packages/" not in place and not place.startswith(installed)


class FewLines:
    """Shows the first lines of what a user's files print, and then one that says where all of it is."""

    def __init__(self, show: Callable[[str], None], rest: Callable[[], str], most: int = 5) -> None:
        self._show, self._rest, self._left, self._half = show, rest, most, ""

    def __call__(self, text: str) -> None:
        *lines, self._half = (self._half + text)[:_LONGEST].split("\n")
        for line in lines if self._left >= 0 else ():
            if self._left >= 0:
                self._show(line if self._left else f"(what your files print from here on is in {self._rest()})")
            self._left -= 1

    def whole(self, text: str) -> None:
        """Show all of it."""
        self._show(text.rstrip("\n"))


class WarningLines(logging.Handler):
    """Pass the text of each warning to `say`, whose failure ends no run."""

    def __init__(self, say: Callable[[str], None], level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.getMessage())
        except Exception:  # a line that cannot be shown or written
            self.handleError(record)


class _ShownWarnings(WarningLines):
    """The one handler by which a person sees the warnings."""
