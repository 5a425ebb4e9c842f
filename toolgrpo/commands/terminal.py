"""What a person sees of a run: our own lines, and nothing of the libraries' chatter.

`Terminal.of_command(name)` is what a recipe opens, before anything heavy is imported. `Terminal.open(log_file)` sends the process's standard output and error to a log file, C++ libraries included, and keeps
the real terminal for `Terminal.console`. Errors are never hidden: an exception that ends the program is shown on the real
terminal (one clear paragraph for an error of ours, the whole traceback for any other), and so is a crash of the interpreter.

Not covered: subprocesses that were started before; processes of other ranks (each opens its own log file and shows nothing
but its errors).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console

from toolgrpo.errors import ToolGRPOError

__all__ = ["Terminal", "describe_error"]


def describe_error(error: BaseException, log_file: Path | None) -> str:
    """What the person at the terminal is told when `error` ends the program."""
    if isinstance(error, ToolGRPOError):
        where = f"\n(the full traceback is in {log_file})" if log_file is not None else ""
        return f"{type(error).__name__}: {error}{where}\n"
    return "".join(traceback.format_exception(error))


class Terminal:
    """The real terminal of this process, while everything else goes to the log file."""

    def __init__(self, log_file: Path | None, stream: IO[str], *, quiet: bool) -> None:
        self.log_file = log_file
        self.stream = stream
        self.console = Console(file=stream, quiet=quiet, highlight=False, soft_wrap=True)

    @classmethod
    def open(cls, log_file: Path, *, main_process: bool = True) -> Terminal:
        """Redirect this process's output to `log_file`; only the main process shows progress."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        stream = os.fdopen(os.dup(2 if not sys.stdout.isatty() and sys.stderr.isatty() else 1), "w", buffering=1)
        errors = os.fdopen(os.dup(2), "w", buffering=1)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.enable(file=errors)
        terminal = cls(log_file, stream, quiet=not main_process)
        terminal._show_errors_on(errors)
        return terminal

    @classmethod
    def of_command(cls, name: str) -> Terminal:
        """The terminal of the command `name`, which logs into a temporary file until `log_into` knows better."""
        folder = Path(tempfile.mkdtemp(prefix="toolgrpo-"))
        terminal = cls.open(folder / f"{name}.log", main_process=cls.is_main_process())
        terminal.say("toolgrpo: loading PyTorch, TRL and the engine (about 20 s)")
        return terminal

    @staticmethod
    def rank() -> int:
        """This process's number, as launchers set it."""
        return int(os.environ.get("RANK", "0"))

    @classmethod
    def is_main_process(cls) -> bool:
        return cls.rank() == 0

    def log_into(self, output_dir: Path) -> None:
        """Go on logging in the output folder: `NAME.log`, and `NAME.rank1.log` and so on for the other processes."""
        assert self.log_file is not None
        name, folder = self.log_file.stem, self.log_file.parent
        self.move_log(output_dir / (f"{name}.log" if self.is_main_process() else f"{name}.rank{self.rank()}.log"))
        with contextlib.suppress(OSError):  # somebody else's files are in it
            folder.rmdir()

    def move_log(self, log_file: Path) -> None:
        """Go on logging in another file, with what was logged so far at its head."""
        assert self.log_file is not None
        log_file.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        written, self.log_file = self.log_file, log_file
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(log, written.read_bytes())
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        written.unlink()

    def say(self, text: str) -> None:
        """One line of our own, on the terminal and in the log."""
        self.console.print(text, markup=False)
        print(text, flush=True)

    def _show_errors_on(self, errors: IO[str]) -> None:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            traceback.print_exception(kind, error, trace)  # into the log
            errors.write("interrupted\n" if kind is KeyboardInterrupt else describe_error(error, self.log_file))
            errors.flush()

        sys.excepthook = hook
