"""The scratch folders of runs: made, measured, emptied. Runs in trusted processes, on what a stranger left behind.

Invariants: symbolic links are removed, never followed; no depth of nesting and no name defeats `empty`.
Not covered: a folder that is written to while it is emptied (the caller waits for the writer's end, or tries again).
"""

from __future__ import annotations

import os
import secrets
import time

from toolgrpo.sandbox.base import NOBODY

__all__ = ["empty", "holds_more_than", "make", "remove"]

_ENTRY_BYTES = 4096  # what a file costs at least, so that a million empty ones are not free
_DEEPEST = 200
_REMOVE_S = 5.0


def make(path: str) -> None:
    """A folder for one run at a time; as root it belongs to the user that runs become."""
    os.mkdir(path, 0o700)
    if os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)


def empty(folder: str) -> None:
    """Remove everything in a folder; the folder stays, since the rules of the next run name it."""
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


def remove(folder: str) -> None:
    """Remove a folder whose writers have just been killed."""
    deadline = time.monotonic() + _REMOVE_S
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


def _entries(folder: str) -> list[tuple[str, bool]]:
    with os.scandir(folder) as found:
        return [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
