"""`LineFile`: an append-only file of lines that survives a kill and is rotated past a size.

Invariants:

* every line that was written whole can be read; a line that a kill tore is cut off before the next
  one is written, and left out by readers until then;
* past `limit` bytes the file is set aside as `<name>.0001`, then gzipped in the background to
  `<name>.0001.gz`, which appears only when it is complete; a reader finds every line in one of the
  two, in order (`parts`);
* places (`sync`, `cut`) count the bytes of all lines ever written, set aside or not.

Not covered: two writers of one file.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from toolgrpo.errors import StorageError
from toolgrpo.support.plain_text import finite, plain_json

LIMIT = 256 << 20  # bytes; at this size lines of episodes shrink to about a sixth
LONGEST = 64 << 20  # bytes of a line; an episode of a million tokens has about 40
_CHUNK = 1 << 20


# A record is a tree of what JSON holds; looking for circles in it would cost a fifth of the writing.
_encode = json.JSONEncoder(ensure_ascii=False, default=str, check_circular=False, allow_nan=False).encode


class Line(NamedTuple):
    """A line of a file, or what is wrong with what stands there."""

    where: str  # its file and number
    text: str
    fault: str = ""


STEP_OF_LINE = re.compile(r'^\{(?:"schema": \d+, )?"step": (\d+), "mode": "(\w+)"')  # of a recorded episode


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON.

    It holds no character that a terminal obeys or that `str.splitlines` takes for an end: those
    stand there as escapes. A number that is none (a loss, say) is null: JSON has no NaN.
    """
    try:
        text = _encode(record)
    except ValueError:
        text = _encode(finite(record))
    return plain_json(text) + "\n"


def parts(path: Path) -> list[Path]:
    """Return the files that hold the lines of `path`, oldest first: those set aside, then itself."""
    aside = _set_aside(path)
    return [*(aside[number] for number in sorted(aside)), *([path] if path.is_file() else [])]


def lines_of(path: Path) -> Iterator[Line]:
    """Yield all complete lines; the last one of a part is left out if it was torn.

    A part ends at a line of more than `LONGEST` bytes, and where a gzipped one is damaged; the line
    there has a fault. Whoever writes may set the file aside meanwhile: it is opened first, and read
    last, when nothing was set aside since.
    """
    done: set[int] = set()
    while True:
        with path.open("rb") if path.is_file() else io.BytesIO() as current:
            aside = _set_aside(path)
            if aside.keys() <= done:
                yield from _whole_lines(current, path)
                return
        for number in sorted(aside.keys() - done):
            yield from _lines_of_part(aside[number])
            done.add(number)


def _set_aside(path: Path) -> dict[int, Path]:
    pattern = re.compile(re.escape(path.name) + r"\.(\d{4,})(\.gz)?")
    found: dict[int, Path] = {}
    if path.parent.is_dir():
        for name in sorted(os.listdir(path.parent)):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            for form in (name, f"{name}.gz"):  # it may have been gzipped since the folder was listed
                if path.with_name(form).is_file():
                    found[int(match[1])] = path.with_name(form)  # the gzipped one, where both were listed
                    break
    return found


def _lines_of_part(part: Path) -> Iterator[Line]:
    for form in (part, part.with_name(f"{part.name}.gz")):  # it may have been gzipped since it was found
        try:
            file: IO[bytes] = gzip.open(form, "rb") if form.suffix == ".gz" else form.open("rb")  # type: ignore[assignment]  # noqa: SIM115 - entered below
        except FileNotFoundError:
            continue
        with file:
            yield from _whole_lines(file, form)
        return


def _whole_lines(file: IO[bytes], path: Path) -> Iterator[Line]:
    for number in itertools.count(1):
        where = f"{path}, line {number}"
        try:
            line = file.readline(LONGEST + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Line(where, "", f"the file is damaged here, and is not read further ({error})")
            return
        if len(line) > LONGEST:
            yield Line(where, "", f"it has more than {LONGEST:,} bytes, and the file is not read further")
            return
        if not line.endswith(b"\n"):
            return
        try:
            yield Line(where, line.decode())
        except UnicodeDecodeError as error:
            yield Line(where, "", f"it is not UTF-8 text (byte {error.start})")


class LineFile:
    """Append lines to one file, which the first line creates."""

    def __init__(self, path: Path, *, what: str, remedy: str, limit: int = LIMIT) -> None:
        self.path = path
        self._what, self._remedy = what, remedy  # of errors: what could not be written, and what to do
        self._limit = limit
        self._file: IO[bytes] | None = None
        self._set_aside_bytes = 0
        self._zipping: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, lines: Sequence[str]) -> int:
        """Append lines, each with its newline, and flush; returns how many bytes that were."""
        encoded = "".join(lines).encode()
        try:
            file = self._opened()
            file.write(encoded)
            file.flush()
            if file.tell() >= self._limit:
                self._begin_anew()
        except OSError as error:
            self._drop()
            raise self._not_written(error) from error
        return len(encoded)

    def sync(self) -> int:
        """Bring everything to the disk, and return how many bytes of lines there are."""
        try:
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
            return self.size()
        except OSError as error:
            self._drop()
            raise self._not_written(error) from error

    def size(self) -> int:
        """Return how many bytes of lines there are, on the disk or on their way."""
        if self._file is not None:
            return self._set_aside_bytes + self._file.tell()
        return sum(map(_n_bytes, parts(self.path)))

    def start_anew(self) -> None:
        """Set aside, as `<name>.previous`, what an earlier run left under this name."""
        if self._file is not None:
            return
        previous = self.path.with_name(f"{self.path.name}.previous")
        try:
            found = parts(self.path)
            for part in parts(previous) if found else []:
                _remove(part)
            for part in found:
                part.replace(part.with_name(part.name.replace(self.path.name, previous.name, 1)))
        except OSError as error:
            raise self._not_written(error) from error

    def cut(self, n_bytes: int) -> str | None:
        """Forget all lines after the first `n_bytes`.

        Returns what is wrong with the file up to there, or None. A line that was torn there is
        given up.
        """
        self.close()
        try:
            return self._cut(n_bytes)
        except OSError as error:
            raise self._not_written(error) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._zipping is not None:
            self._zipping.join()
            self._zipping = None

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self.path)
            self._set_aside_bytes = sum(map(_n_bytes, _set_aside(self.path).values()))
            self._file = self.path.open("ab")
            self._file.seek(0, os.SEEK_END)
        return self._file

    def _begin_anew(self) -> None:
        """Set the full file aside, and gzip it in the background."""
        assert self._file is not None
        self._set_aside_bytes += self._file.tell()
        self.close()
        aside = self.path.with_name(f"{self.path.name}.{max(_set_aside(self.path), default=0) + 1:04d}")
        self.path.replace(aside)
        self._file = self.path.open("ab")
        self._zipping = threading.Thread(target=_gzip, args=(aside,), name="toolgrpo-gzip")
        self._zipping.start()

    def _cut(self, n_bytes: int) -> str | None:
        """Cut the part in which the place lies, and remove those after it."""
        found = parts(self.path)
        if not found:
            return f"{self.path} is missing; it had {n_bytes} bytes" if n_bytes else None
        size = sum(map(_n_bytes, found))
        if size < n_bytes:
            return f"{self.path} has {size} of {n_bytes} bytes, so episodes are missing at its end"
        for part in found:
            own = _n_bytes(part)
            if n_bytes <= own and (n_bytes < own or part == found[-1]):
                break
            n_bytes -= own
        for later in found[found.index(part) + 1 :]:
            _remove(later)
        if part != self.path:
            _unpack(part, self.path)
        with self.path.open("rb+") as file:
            file.truncate(n_bytes)
            file.seek(max(0, n_bytes - 1))
            whole = file.read(1) in (b"", b"\n")
        return None if whole else f"{self.path} was changed: no line ends after {n_bytes} bytes any more"

    def _drop(self) -> None:
        """Close the file after a failure, ignoring that the rest cannot be written either."""
        with contextlib.suppress(OSError):
            self.close()
        self._file = None

    def _not_written(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._what} could not be recorded in {self.path}: {error.strerror or error}. {self._remedy}"
        )


def _n_bytes(part: Path) -> int:
    """Return how many bytes of lines a part has; a gzipped one says so in its last four bytes."""
    if part.suffix != ".gz":
        return part.stat().st_size
    with part.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def _gzip(aside: Path) -> None:
    """Gzip a file that was set aside; if that fails it stays as it is, which readers take too."""
    half = aside.with_name(f"{aside.name}.gz.half")
    with contextlib.suppress(OSError):
        with (
            aside.open("rb") as source,
            half.open("wb") as file,
            gzip.GzipFile(aside.name, "wb", 5, file) as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)
        half.replace(aside.with_name(f"{aside.name}.gz"))
        aside.unlink()
    half.unlink(missing_ok=True)


def _remove(part: Path) -> None:
    """Remove a part, and its other form, where a kill left both."""
    part.unlink()
    if part.suffix == ".gz":
        part.with_suffix("").unlink(missing_ok=True)


def _unpack(part: Path, to: Path) -> None:
    if part.suffix != ".gz":
        part.replace(to)
        return
    with gzip.open(part, "rb") as source, to.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)
    _remove(part)


def _cut_torn_line(path: Path) -> None:
    """Cut off the half line that a killed run may have left: nothing may be appended to it."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                break
            end = start
        whole = start + newline + 1 if end > 0 else 0
        file.truncate(whole)
