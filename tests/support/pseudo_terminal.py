"""Run a program on a pseudo-terminal, and tell what a person would have on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["WIDTH", "Session", "on_terminal", "screen_of"]

WIDTH, HEIGHT = 100, 40
_PIECE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n|\x07|\x08|\x1b.|[^\x1b\r\n\x07\x08]+")


@dataclass(frozen=True)
class Session:
    """What a program wrote to its terminal, how it ended, and the terminal's settings before and after."""

    stream: str
    code: int
    before: list[Any]
    after: list[Any]

    @property
    def screen(self) -> list[str]:
        return screen_of(self.stream)


def screen_of(stream: str, width: int = WIDTH) -> list[str]:
    """The lines that stand on a terminal after this stream, those that were scrolled away included.

    It knows what rich writes for a live display; anything else is an error of the test.
    """
    lines: list[list[str]] = [[]]
    row = column = 0
    for piece in _PIECE.finditer(stream):
        text, arguments, command = piece[0], piece[1], piece[2]
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
        elif command == "A":
            row = max(0, row - int(arguments or 1))
        elif command == "K":
            assert arguments == "2", f"unknown sequence {text!r}"
            lines[row] = []
        elif command in ("m", "l", "h"):
            continue
        else:
            assert "\x1b" not in text, f"unknown sequence {text!r}"
            for letter in text:
                if column == width:
                    row, column = row + 1, 0
                    if row == len(lines):
                        lines.append([])
                lines[row].extend(" " * (column + 1 - len(lines[row])))
                lines[row][column] = letter
                column += 1
    return ["".join(line).rstrip() for line in lines]


def on_terminal(
    script: str,
    *arguments: str | Path,
    during: Callable[[str, int], None] = lambda stream, pid: None,
    limit_s: float = 300.0,
) -> Session:
    """Run this Python on a terminal; `during` hears the stream so far, as often as something comes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    program = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
    )
    seen, deadline = b"", time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 65536)
                during(seen.decode(errors="replace"), program.pid)
            elif program.poll() is not None:
                break
        else:
            raise AssertionError(
                f"it did not end in {limit_s:g} s; the terminal has:\n" + seen.decode(errors="replace")
            )
        return Session(seen.decode(errors="replace"), program.wait(), before, termios.tcgetattr(theirs))
    finally:
        program.kill()
        program.wait()
        os.close(ours)
        os.close(theirs)
