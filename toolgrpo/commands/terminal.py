"""Display of a run: our own lines, and nothing of the libraries' chatter.

`Terminal.of_command(name)` is what a recipe opens, before anything heavy is imported.
`Terminal.open(log_file)` sends the process's standard output and error to a log file (`RunLog`),
C++ libraries included, and keeps the real terminal for `Terminal.console`. Errors are never hidden:
an exception that ends the program is shown on the real terminal (one clear paragraph for an error
of ours, the whole traceback for any other), and so is a crash of the interpreter.

Invariants: the terminal is told before the log; neither ever ends the run (a full disk, a terminal
that went away, a plugin that closes or replaces standard output); what others wrote into an error
steers no terminal.

Not covered: subprocesses that were started before; processes of other ranks (each opens its own log
file and shows nothing but its errors).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import io
import locale
import os
import select
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.live import Live
from rich.spinner import Spinner

from toolgrpo.errors import ToolGRPOError, UserError
from toolgrpo.observe.console import FewLines, SteadyConsole, show_tool_output, show_warnings
from toolgrpo.support.plain_text import plain
from toolgrpo.support.run_lock import claim_folder
from toolgrpo.support.storage import opened_to_append

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOADING = "toolgrpo: loading PyTorch, TRL and the engine (about 20 s, longer on a busy machine)"
"""What is said before the imports."""


# The log of a command:
# where the standard output and error of this process go, C++ libraries included.
#
# Invariants: writing to it raises nothing, whatever the disk does; it never takes much more than
# twice its limit, because at the limit the file is set aside as `NAME.log.1`, in place of the one
# that was set aside before, and a new one is begun. So the end of a run is always in it.
#
# Not covered: what is written within one second goes beyond the limit; other programs that were
# started with this output go on writing to the file that they got.

_LIMIT_BYTES = 64 << 20
_LOOK_EVERY_S = 1.0
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PRINTERS = ("logging", "traceback", "warnings", "_py_warnings", "wandb")  # by which files print; wandb wraps streams


class RunLog:
    """One log file; `path` changes when it moves."""

    def __init__(self, path: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit_bytes
        self._moving = threading.RLock()
        self.shows_printed: FewLines | None = None  # what a user's files print, and what this package warns of
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = opened_to_append(path)

    def take_standard_output(self) -> None:
        """Let everything that this process prints from now on go to the log, and keep the log within its limit."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, full, or None
                stream.flush()
        for number in (1, 2):
            os.dup2(self._descriptor, number)
        # On a descriptor of their own: a plugin that closes 1 and 2 gets these numbers for the
        # files it opens next.
        streams = [unfailing_stream(self._descriptor, "utf-8", lambda: self.shows_printed) for _ in (1, 2)]
        sys.stdout, sys.stderr = streams
        atexit.register(_put_back, *streams)
        threading.Thread(target=self._watch, name="log limit", daemon=True).start()

    def write(self, text: str) -> bool:
        """Append `text`; False if the disk did not take it."""
        return write_all(self._descriptor, text.encode("utf-8", "backslashreplace"))

    def move(self, path: Path, *, append: bool = False) -> None:
        """Go on in another file, with what was logged so far at its head; `append`: after what is
        in it.

        Raises OSError if it cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._moving:
            so_far = self.path
            taken = self._go_on_in(path, head=so_far.read_bytes(), append=append)
            self.path = path
            with contextlib.suppress(OSError):
                if not append:
                    _set_aside(path).unlink(missing_ok=True)  # of a run before
                if taken:
                    so_far.unlink()

    def keep_within_limit(self) -> None:
        """Begin a new file if this one has reached its limit."""
        with self._moving, contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size < self._limit or not self.path.is_file():
                return
            aside = _set_aside(self.path)
            self.path.replace(aside)
            said = f"[the log reached {self._limit} bytes; earlier output is in {aside.name}]\n"
            self._go_on_in(self.path, head=said.encode())

    def _go_on_in(self, path: Path, head: bytes, *, append: bool = False) -> bool:
        opened = opened_to_append(path)
        if not append:
            os.ftruncate(opened, 0)
        taken = write_all(opened, head)
        # A plugin may have closed 1 or 2, and another file may have the number now.
        still_ours = [number for number in (1, 2) if _same_file(number, self._descriptor)]
        for number in (self._descriptor, *still_ours):
            os.dup2(opened, number, inheritable=number in still_ours)
        os.close(opened)
        return taken

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(_LOOK_EVERY_S):
            self.keep_within_limit()


def _put_back(stdout: TextIO, stderr: TextIO) -> None:
    """Put the streams back: Python flushes both at its end, and exits with 120 if it cannot."""
    sys.stdout, sys.stderr = stdout, stderr


def _set_aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def _goes_into(stream: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except (OSError, ValueError):
        return False


class Terminal:
    """The real terminal of this process, while everything else goes to the log file.

    Without a log it is only shown.
    """

    def __init__(self, log: RunLog | None, stream: TextIO, *, quiet: bool) -> None:
        self._log = log
        self._log_is_named = False
        self.started_s = time.monotonic()
        self.stream = stream
        self.console = SteadyConsole(file=stream, quiet=quiet, highlight=False, soft_wrap=True)

    @classmethod
    def open(cls, log_file: Path, *, main_process: bool = True) -> Terminal:
        """Redirect this process's output to `log_file`; only the main process shows progress."""
        shown_on = _duplicate(2 if not os.isatty(1) and os.isatty(2) else 1)
        errors = unfailing_stream(_duplicate(2))
        log = RunLog(log_file)
        log.take_standard_output()
        faulthandler.enable(file=errors)
        terminal = cls(log, unfailing_stream(shown_on), quiet=not main_process)
        terminal._show_errors_on(errors)
        show_warnings(terminal.say)
        plain_warnings()
        show_tool_output(lambda text: terminal.say(f"prints    {text}"))
        log.shows_printed = FewLines(
            lambda line: terminal.console.print(plain(line), markup=False), lambda: str(terminal.log_file)
        )
        return terminal

    @classmethod
    def of_command(cls, name: str, *, quiet: bool = False, loads: bool = True) -> Terminal:
        """Open the terminal of the command `name`; a quiet one shows errors alone.

        It logs into a temporary file until `log_into` knows better; one that nobody was told of goes at the end.
        """
        folder, owner = Path(tempfile.mkdtemp(prefix="toolgrpo-")), os.getpid()
        terminal = cls.open(folder / f"{name}.log", main_process=cls.is_main_process() and not quiet)

        def forget() -> None:
            if not terminal._log_is_named and os.getpid() == owner:
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(forget)
        if loads:
            terminal.say(LOADING)
        return terminal

    @property
    def log_file(self) -> Path | None:
        """Return where the log is, to be shown to somebody: it stays."""
        self._log_is_named = True
        return None if self._log is None else self._log.path

    @staticmethod
    def rank() -> int:
        """Return this process's number, as launchers set it."""
        return int(os.environ.get("RANK", "0"))

    @classmethod
    def is_main_process(cls) -> bool:
        return cls.rank() == 0

    @contextlib.contextmanager
    def writing_into_folder(
        self, config: Any, *, dry_run: bool, begins: Callable[[], bool] = lambda: False
    ) -> Iterator[Any]:
        """Yield the config of a run, whose output folder is claimed and logged into; a dry run leaves nothing behind.

        `begins` as in `log_into`.
        """
        self.console.quiet = self.console.quiet or config.quiet
        if dry_run:
            with tempfile.TemporaryDirectory(prefix="toolgrpo-dry-") as folder:
                yield config.changed(output_dir=folder)
        else:
            self.log_into(Path(config.output_dir), begins)
            yield config

    def log_into(self, output_dir: Path, begins: Callable[[], bool] = lambda: False) -> None:
        """Claim the output folder for this run, let it begin, and go on logging there.

        `begins` returns whether the run goes on with the log that is there. Into `NAME.log`, and `NAME.rank1.log` and
        so on for the other processes. Raises ConfigError if another run has it.
        """
        assert self._log is not None
        claim = claim_folder(output_dir, self.rank())
        if claim.warning is not None:
            self.say(claim.warning)
        append = begins() or not self.is_main_process()  # of other processes nothing was set aside
        before = self._log.path
        log = output_dir / (f"{before.stem}.log" if self.is_main_process() else f"{before.stem}.rank{self.rank()}.log")
        try:
            if _goes_into(self.stream, log):  # both would write over each other
                raise FileExistsError(errno.EEXIST, f"what is shown goes into {log.name} there")
            self.move_log(log, append=append)
        except OSError as error:
            self._log_is_named = True
            self.say(f"the log stays in {before}, because it cannot be in {output_dir}: {error.strerror or error}")
            return
        with contextlib.suppress(OSError):  # somebody else's files are in it
            before.parent.rmdir()

    def move_log(self, log_file: Path, *, append: bool = False) -> None:
        """Go on logging in another file, with what was logged so far at its head."""
        assert self._log is not None
        self._log.move(log_file, append=append)

    def say(self, text: str) -> None:
        """Print one line of our own, on the terminal and in the log."""
        text = plain(text)
        self.console.print(text, markup=False)
        if self._log is not None:
            self._log.write(f"{text}\n")

    def busy(self, doing: str) -> contextlib.AbstractContextManager[object]:
        """Show on a terminal what is running; what libraries print meanwhile stays in the log."""
        if not self.console.is_terminal:
            return contextlib.nullcontext()
        shown = Spinner("dots", f"{doing} ...")
        return Live(shown, console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False)

    def say_objective(self, success: float) -> None:
        """Print the line that a sweep goes by; a command ends with it."""
        self.say(f"objective eval_success {success:.6g}")

    def in_log_only(self) -> Terminal:
        """Return a terminal whose lines go to the log alone."""
        return Terminal(self._log, self.stream, quiet=True)

    def _show_errors_on(self, errors: TextIO) -> None:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            whole = plain("".join(traceback.format_exception(kind, error, trace)))
            said = plain(f"{kind.__name__}: {error}\n") if isinstance(error, ToolGRPOError) else whole
            errors.write("interrupted\n" if kind is KeyboardInterrupt else said)
            logged = self._log is not None and self._log.write(whole)
            if isinstance(error, ToolGRPOError) and not (isinstance(error, UserError) and error.__cause__ is None):
                place = "is in" if logged else "could not be written into"
                errors.write(f"(the full traceback {place} {self.log_file})\n")

        sys.excepthook = hook


def _duplicate(descriptor: int) -> int:
    """Return another number for the same place to write to; nowhere, if the process has none."""
    try:
        return os.dup(descriptor)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


# Text streams on which nothing raises: a full disk,
# a closed terminal or a plugin that closes them ends no run.
#
# What cannot be written is dropped. Nothing is buffered, so that a signal handler may write too and a
# killed process loses nothing that it wrote; characters that the encoding has not are written as
# escapes.

_WAIT_S = 1.0  # for a terminal that takes nothing at the moment


def unfailing_stream(
    descriptor: int, encoding: str | None = None, shows: Callable[[], FewLines | None] = lambda: None
) -> TextIO:
    """Return a stream over `descriptor`, which it does not own: closing it has no effect.

    What `shows` returns gets what a user's files print and this package warns of, and nothing of what libraries do.
    """
    stream = _Stream(
        _Descriptor(descriptor),  # as `python -u` does: raw, without a buffer
        encoding=encoding or locale.getpreferredencoding(False),
        errors="backslashreplace",
        newline="\n",
        write_through=True,
    )
    stream.shows = shows
    return stream


def write_all(descriptor: int, content: bytes | memoryview) -> bool:
    """Write everything; False if the system did not take it."""
    view = memoryview(content)
    try:
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], _WAIT_S)[1]:
                    return False
    except OSError:
        return False
    return True


def plain_warnings() -> None:
    """Let Python show each warning once, in one line: it forgets what it showed when a library changes its filters."""
    shown: set[str] = set()

    def one_line(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        ours = filename.startswith(_PACKAGE)
        text = f"warning   {message}\n" if ours else f"{filename}:{lineno}: {category.__name__}: {message}\n"
        if text in shown:
            return ""
        shown.add(text)
        return text

    warnings.formatwarning = one_line


def prints_for(frame: FrameType | None) -> str | None:
    """Return `user` if a user's file prints, logs or warns here, `ours` if this package warns, else None."""
    warns = False
    while frame is not None and (module := str(frame.f_globals.get("__name__")).partition(".")[0]) in _PRINTERS:
        warns, frame = warns or "warnings" in module, frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    if warns and file.startswith(_PACKAGE):
        return "ours"
    return "user" if _is_of_user(file) else None


@cache
def _is_of_user(file: str) -> bool:
    """Return whether a file is a user's plugin, and not Python's, a package's or ours."""
    place = os.path.realpath(file)
    installed = (sysconfig.get_path("stdlib"), _PACKAGE)
    return os.path.isfile(place) and "-packages/" not in place and not place.startswith(installed)


class _Descriptor(io.FileIO):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, content: ReadableBuffer, /) -> int:
        with memoryview(content) as view:
            write_all(self.fileno(), view.cast("B"))
            return view.nbytes

    def close(self) -> None:
        """Stay open, for those who write later."""


class _Stream(io.TextIOWrapper):
    shows: Callable[[], FewLines | None]

    def write(self, text: str, /) -> int:
        written = super().write(text)
        shown = self.shows()
        if shown is not None and (who := prints_for(sys._getframe(1))) is not None:
            with contextlib.suppress(Exception):  # the log has it
                (shown if who == "user" else shown.whole)(text)
        return written

    def close(self) -> None:
        """Stay open, for those who write later."""

    def detach(self) -> io.BufferedIOBase:  # type: ignore[override]
        """Give the raw stream away and stay attached to it."""
        return self.buffer  # type: ignore[return-value]
