"""One run for one output folder: a second is refused, with the process and time of the first.

Each process of a run holds a lock on a file of its own in the folder (`.run.lock`,
`.run.rank1.lock` and so on), so the processes of one run never meet, and a second run meets the
first in each of its processes. The system drops a lock when its process ends, however it ends, so
none is ever stale, and the files stay where they are.

Invariants: what a process claimed it may claim again; a process that it forked does not keep the
folder from the next run.

Not covered: file systems that know no locks (some NFS mounts): there the claim says so, and the run
goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections import Counter
from pathlib import Path

from toolgrpo.errors import ConfigError

_PATIENCE_S = 3.0  # a run that was killed may take that long to be gone
_RETRY_S = 0.1

_descriptors: dict[Path, int] = {}  # of the files that this process has locked
_claims: Counter[Path] = Counter()


class FolderClaim:
    """Keeps a folder for this process until `release`, or until the process ends.

    `warning` is a sentence where no lock can be had, else None.
    """

    def __init__(self, path: Path, warning: str | None) -> None:
        self._path: Path | None = path
        self.warning = warning
        _claims[path] += 1

    def release(self) -> None:
        """Give this claim back; the folder is free when all claims of this process are."""
        path, self._path = self._path, None
        if path is None:
            return
        _claims[path] -= 1
        if _claims[path] <= 0 and path in _descriptors:
            os.close(_descriptors.pop(path))


def claim_folder(folder: Path, process_index: int = 0, *, patience_s: float = _PATIENCE_S) -> FolderClaim:
    """Keep `folder` for this process. Raises ConfigError if another run has it."""
    if "\0" in str(folder):
        raise ConfigError(f"the output folder {str(folder)!r} holds a NUL character; give another --output_dir")
    path = folder.resolve() / (".run.lock" if process_index == 0 else f".run.rank{process_index}.lock")
    if _claims[path] > 0:
        return FolderClaim(path, None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        return FolderClaim(path, _unguarded(folder, error))
    try:
        locked = _lock(descriptor, patience_s)
    except OSError as error:
        os.close(descriptor)
        return FolderClaim(path, _unguarded(folder, error))
    if not locked:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise ConfigError(
            f"another run writes into {folder} ({holder}), and two in one folder would mix their models, logs and "
            f"checkpoints. Give another --output_dir, or end that process first."
        )
    own = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with contextlib.suppress(OSError):  # on a full disk the lock alone has to do
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(own).encode(), 0)
    _descriptors[path] = descriptor
    return FolderClaim(path, None)


def other_run_in(folder: Path) -> str | None:
    """Return which other process runs in `folder` now, if one does."""
    path = folder.resolve() / ".run.lock"
    if path in _descriptors:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _lock(descriptor, 0.0) else _holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _lock(descriptor: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_S)


def _holder(descriptor: int) -> str:
    try:
        name = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(name['process'])} on {str(name['host'])[:100]}, since {str(name['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "which process it is cannot be read"


def _unguarded(folder: Path, error: OSError) -> str:
    return (
        f"{folder} cannot be locked ({error.strerror or error}): nothing keeps a second run from writing into it, so "
        f"give each run its own output folder"
    )


def _forget_in_child() -> None:
    """Close the file in a fork, which has the lock too as long as it has that open."""
    for descriptor in _descriptors.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    _claims.clear()


os.register_at_fork(after_in_child=_forget_in_child)
