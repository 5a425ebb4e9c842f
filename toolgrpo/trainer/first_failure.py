"""When one process of a run fails, the others say so, instead of showing what it did to them.

The process that fails first leaves a note in the output folder. The others then fail inside a
collective call, because it is gone; each looks for the note and raises `PeerError`, which names the
process and its error. The launcher ends whoever is left. Nobody waits for a time-out.

Not covered: machines that do not share the output folder; there the others show the error of the
collective call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolgrpo.errors import PeerError, ToolGRPOError
from toolgrpo.storage import write_whole

_NOTE_S = 5.0  # a note is written before its process goes, so it is there almost at once


@contextmanager
def report_first_failure(output_dir: Path, accelerator: Any) -> Iterator[None]:
    """Run the collective part of a run; if it fails, say which process failed first."""
    if accelerator.num_processes == 1:
        yield
        return
    note = output_dir / "failure.json"
    if accelerator.is_main_process:
        note.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    try:
        yield
    except Exception as error:
        if not _lost_a_peer(error):
            _leave(note, accelerator.process_index, error)
            raise
        first = _wait_for(note)
        if first is None or first["process"] == accelerator.process_index:
            raise
        raise PeerError(
            f"process {first['process']} failed first, so this one cannot go on: {first['error']}"
        ) from error


def _lost_a_peer(error: BaseException) -> bool:
    """Return whether a collective call failed, as it does in every process but the one to blame."""
    if isinstance(error, ToolGRPOError):
        return False
    distributed = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    )
    return distributed or (error.__cause__ is not None and _lost_a_peer(error.__cause__))


def _leave(note: Path, process: int, error: Exception) -> None:
    written = note.with_suffix(f".{process}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(written, json.dumps({"process": process, "error": f"{type(error).__name__}: {error}"}))
        if not note.exists():
            written.replace(note)
    except OSError:
        return  # the error itself matters more than the note
    finally:
        written.unlink(missing_ok=True)


def _wait_for(note: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + _NOTE_S
    while time.monotonic() < deadline:
        if note.exists():
            content: dict[str, Any] = json.loads(note.read_text())
            return content
        time.sleep(0.1)
    return None
