"""Which errors mean that a disk did not take what was written, by whatever name it is raised."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolgrpo.errors import StorageError, ToolGRPOError

__all__ = ["storage_errors", "storage_failure"]

_FULL, _QUOTA, _TOO_LARGE = "the disk is full", "the quota is used up", "a file became larger than the system allows"
_REASONS = {errno.ENOSPC: _FULL, errno.EDQUOT: _QUOTA, errno.EFBIG: _TOO_LARGE}
_SAID_BY_LIBRARIES = {  # safetensors, pyarrow and others tell it in words alone
    "No space left on device": _FULL,
    "StorageFull": _FULL,
    "Disk quota exceeded": _QUOTA,
    "QuotaExceeded": _QUOTA,
    "File too large": _TOO_LARGE,
    "FileTooLarge": _TOO_LARGE,
}
_BROKEN = (errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE)
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")  # PyTorch says what failed, but not why
_NEARLY_NOTHING_BYTES = 16 << 20


@contextmanager
def storage_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn an error that means a full or failing disk into one sentence about `what`.

    Every other error passes.
    """
    try:
        yield
    except ToolGRPOError:
        raise
    except Exception as error:  # libraries raise their own kinds; what is not the disk's fault goes on
        reason = storage_failure(error, folder)
        if reason is None:
            raise
        raise StorageError(
            f"{what} could not be written: {reason}. Free some space, or write to another disk."
        ) from error


def storage_failure(error: BaseException, folder: Path) -> str | None:
    """Return why the disk did not take what was written, or None if something else went wrong."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in _REASONS:
            return _REASONS[cause.errno]
        for words, reason in _SAID_BY_LIBRARIES.items():
            if words in str(cause):
                return reason
        if isinstance(cause, OSError) and cause.errno in _BROKEN:
            return str(cause)
        if any(words in str(cause) for words in _TORCH_WRITER):
            return _of_torch(cause, folder)
    return None


def _of_torch(cause: BaseException, folder: Path) -> str:
    try:
        nearly_full = shutil.disk_usage(folder).free < _NEARLY_NOTHING_BYTES
    except OSError:
        nearly_full = False
    return _FULL if nearly_full else f"{_FULL}, or failed ({str(cause).splitlines()[0]})"


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
