"""The scratch folders of runs: made, measured, emptied. Runs in trusted processes, on what a
stranger left behind.

A sandbox's folder in the temporary directory is locked by the process that made it, for as long as
that lives; the next sandbox to start removes those that nobody holds any more (both processes that
would have removed them were killed).

Invariants: symbolic links are removed, never followed; no depth of nesting, no name and no mode
defeats `empty`, and `holds_more_than` always answers: folders are opened one below the other, so no
path is longer than one name; a folder that is locked, or another user's, is never swept.
Not covered: a folder that is written to while it is emptied (the caller waits for the writer's end,
or tries again); a temporary directory that several machines share on a file system whose locks hold
on one machine only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from contextlib import suppress

_PREFIX = "confined-python-"
_ENTRY_BYTES = 4096  # what a file costs at least, so that a million empty ones are not free
_DEEPEST = 100  # each level costs a descriptor while it is measured
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # removed, or replaced by a file or a link meanwhile
_REMOVE_S = 5.0


def claim(parent: str) -> tuple[str, int | None]:
    """Make a new folder for one sandbox, and return it with the descriptor that locks it.

    None on a file system without locks. First removes what killed sandboxes of this user have
    left.
    """
    _sweep(parent)
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            return path, _lock(path)
        except (BlockingIOError, FileNotFoundError):  # swept by somebody who found it before it was locked
            continue
        except OSError:
            return path, None


def make(path: str, owner: int | None) -> None:
    """Make a folder for one run at a time, of `owner` where the run is to become another user."""
    os.mkdir(path, 0o700)
    if owner is not None:
        os.chown(path, owner, owner)


def prefix_of(pid: int) -> str:
    """Return how the names of a worker's folders begin."""
    return f"w{pid}-"


def remove_of(pid: int, parent: str) -> None:
    """Remove the folders of a worker that has ended, which it could not if it was killed.

    One that is still written to stays until the sandbox ends.
    """
    for name in os.listdir(parent):
        if name.startswith(prefix_of(pid)):
            with suppress(OSError):
                remove(os.path.join(parent, name), patience_s=0.0)


def empty(folder: str) -> None:
    """Remove everything in a folder; the folder stays, since the rules of the next run name it."""
    top = _open_folder(folder, None)
    try:
        while entries := _entries(top):
            for name, is_folder in entries:
                if is_folder:
                    _remove_folder(name, top)
                else:
                    os.unlink(name, dir_fd=top)
    finally:
        os.close(top)


def _remove_folder(name: str, top: int) -> None:
    """Remove a folder of `top`, after moving the folders in it up to `top`.

    So nothing is ever deep.
    """
    fd = _open_folder(name, top)
    try:
        for inner, is_folder in _entries(fd):
            if is_folder:
                _move_up(inner, fd, top)
            else:
                os.unlink(inner, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=top)


def _move_up(name: str, parent: int, top: int) -> None:
    new = secrets.token_hex(16)
    try:
        os.rename(name, new, src_dir_fd=parent, dst_dir_fd=top)
    except PermissionError:  # a folder that moves has to be writable itself
        os.chmod(name, 0o700, dir_fd=parent)
        os.rename(name, new, src_dir_fd=parent, dst_dir_fd=top)


def _open_folder(name: str, parent: int | None) -> int:
    """Open a folder to read and change it; code that nothing confines can have shut it."""
    if stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode) & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def remove(folder: str, patience_s: float = _REMOVE_S) -> None:
    """Remove a folder whose writers have just been killed."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            empty(folder)
            os.rmdir(folder)
            return
        except FileNotFoundError:
            if not os.path.exists(folder):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def holds_more_than(folder: str, most: int) -> bool:
    """Return whether what is below a folder takes more than `most` bytes.

    Folders nested very deeply, and what cannot be looked into, count as too much; a file that goes
    away meanwhile counts nothing. Takes a bounded time, whatever is there.
    """
    try:
        return _used(folder, None, most, _DEEPEST) > most
    except OSError:  # no descriptors left, a folder that is shut, a disk that fails
        return True


def _used(name: str, parent: int | None, most: int, deepest: int) -> int:
    """Return the bytes below a folder, or more than `most` as soon as they are too many."""
    if deepest < 0:
        return most + 1
    used, folders = 0, []
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in _GONE:
            return 0
        raise
    try:
        with os.scandir(fd) as found:
            for entry in found:
                used += _size(entry)
                if used > most:
                    return used
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
        for inner in folders:
            used += _used(inner, fd, most - used, deepest - 1)
            if used > most:
                break
        return used
    finally:
        os.close(fd)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return max(_ENTRY_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
    except FileNotFoundError:
        return 0


def _sweep(parent: str) -> None:
    """Remove the folders whose owners were killed before they could."""
    with os.scandir(parent) as found:
        folders = [entry.path for entry in found if entry.name.startswith(_PREFIX)]
    for path in folders:
        try:
            lock = _lock(path)
        except OSError:  # held, another's, or no folder
            continue
        try:
            remove(path, patience_s=0.0)
        except OSError:  # something still writes to it; the next start will see
            continue
        finally:
            os.close(lock)


def _lock(path: str) -> int:
    """Lock a folder of this user's; OSError where that cannot be had.

    FileNotFoundError where it has gone meanwhile.
    """
    fd = os.open(path, _FOLDER)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            raise FileNotFoundError(path)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _entries(fd: int) -> list[tuple[str, bool]]:
    """Return the names in an open folder, and which are folders themselves."""
    with os.scandir(fd) as found:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
