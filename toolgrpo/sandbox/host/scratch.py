"""The scratch folders of runs: made, measured, emptied. Runs in trusted processes, on what a stranger left behind.

A sandbox's folder in the temporary directory is locked by the process that made it, for as long as that lives; the next
sandbox to start removes those that nobody holds any more (both processes that would have removed them were killed).

Invariants: symbolic links are removed, never followed; no depth of nesting and no name defeats `empty`; a folder that is
locked, or another user's, is never swept.
Not covered: a folder that is written to while it is emptied (the caller waits for the writer's end, or tries again); a
temporary directory that several machines share on a file system whose locks hold on one machine only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time

__all__ = ["claim", "empty", "holds_more_than", "make", "remove"]

_PREFIX = "toolgrpo-scratch-"
_ENTRY_BYTES = 4096  # what a file costs at least, so that a million empty ones are not free
_DEEPEST = 200
_REMOVE_S = 5.0


def claim(parent: str) -> tuple[str, int | None]:
    """A new folder for one sandbox, and the descriptor that locks it (None on a file system without locks).

    First removes what killed sandboxes of this user have left.
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
    """A folder for one run at a time; it belongs to `owner` where the run is to become another user."""
    os.mkdir(path, 0o700)
    if owner is not None:
        os.chown(path, owner, owner)


def empty(folder: str) -> None:
    """Remove everything in a folder; the folder stays, since the rules of the next run name it."""
    try:
        _empty(folder)
    except PermissionError:  # code that nothing confines can shut its folders
        _open_up(folder)
        _empty(folder)


def _empty(folder: str) -> None:
    while entries := _entries(folder):
        for path, is_folder in entries:
            if not is_folder:
                os.unlink(path)
                continue
            # Folders are lifted to the top one by one, so that paths stay short however deep the nest.
            for inner, inner_is_folder in _entries(path):
                if inner_is_folder:
                    os.rename(inner, os.path.join(folder, secrets.token_hex(16)))
                else:
                    os.unlink(inner)
            os.rmdir(path)


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
    """Whether what is below a folder takes more than `most` bytes; folders nested very deeply count as too much.

    Takes a bounded time, whatever is there; a file that goes away meanwhile counts nothing.
    """
    used, waiting = 0, [(folder, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as found:
                for entry in found:
                    used += max(_ENTRY_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if used > most:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except FileNotFoundError:
            continue
        if depth > _DEEPEST:
            return True
    return False


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
    """Lock a folder of this user's; OSError where that cannot be had, FileNotFoundError where it has gone meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
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


def _open_up(folder: str) -> None:
    """Make a folder and all below it its owner's to change again."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        os.chmod(path, 0o700)
        waiting += [inner for inner, is_folder in _entries(path) if is_folder]


def _entries(folder: str) -> list[tuple[str, bool]]:
    with os.scandir(folder) as found:
        return [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
