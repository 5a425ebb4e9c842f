"""Write files whole, check those that a user names to write to, and say what a disk did not take."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolgrpo.errors import ConfigError, StorageError, ToolGRPOError

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


def opened_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file beside its place, then give it its name: it is whole, or as it was."""
    half = path.with_name(f"{path.name}.half")
    half.unlink(missing_ok=True)  # it would keep its own mode
    try:
        with open(half, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


# What a user names to write to. A file begins so, or it is something else, which is not overwritten.
A_REPORT = r"<!doctype html>.*toolgrpo report</title>"
CONVERSATIONS = r'\{"(?:messages|completion)": \['
AN_EVALUATION = r'\{\s*"data": '
_HEAD_BYTES = 8192


def check_output(path: Path, what: str, flag: str, begins: str) -> None:
    """Refuse a file to write that cannot be one, or that holds something else; make its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with suppress(FileNotFoundError):
            path.with_name(f"{path.name}.half").lstat()  # raises for a name that no file can have
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "permission denied")
        head = b""
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
        if head and not re.match(begins, head.decode("utf-8", "replace"), re.DOTALL):
            raise FileExistsError(errno.EEXIST, "that file holds something else, which would be lost")
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it, or none
        raise _no_output(path, what, flag, error) from error


def check_output_folder(path: Path, what: str, flag: str) -> None:
    """Refuse a folder to write that cannot be one, or that is not empty; make it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(errno.EEXIST, "it is there already and not empty")
    except (OSError, ValueError) as error:
        raise _no_output(path, what, flag, error) from error


def _no_output(path: Path, what: str, flag: str, error: OSError | ValueError) -> ConfigError:
    why = (error.strerror if isinstance(error, OSError) else None) or error
    return ConfigError(f"{what} cannot be written to {path}: {why}; give another place with {flag}")


def share_weights(folder: Path) -> None:
    """Give weights the mode of the configuration, which follows the umask; safetensors ignores that."""
    for name in ("config.json", "adapter_config.json"):
        config = folder / name
        if config.is_file():
            mode = stat.S_IMODE(config.stat().st_mode)
            for weights in folder.glob("*.safetensors"):
                if not weights.is_symlink():
                    weights.chmod(mode)
            return


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
