"""Checkpoints on disk: which are complete, which is the last, which may go.

A checkpoint is a folder `checkpoint-STEP` that Transformers and the backend fill, file after file, from all processes.
`begin` marks it as unfinished; when every process is done, `seal` adds one file that names each file with its size.

Invariants: a folder counts only if its seal is there and every file is as long as the seal says, so a process that is
killed at any moment while it saves or deletes leaves a folder that is passed over; the seal is written after all files
are on the disk, and appears whole or not at all; the last complete checkpoint is deleted only after a newer one is sealed;
from its first moment to its last an incomplete one has a mark, by which `rotate` knows it as ours.

"Last" is the one sealed last, not the one with the highest step: a folder may hold checkpoints of an older, longer run.
Not covered: bits that change on the disk afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Checkpoint", "begin", "checkpoint_folder", "complete_checkpoints", "flaw", "is_foreign", "rotate", "seal"]

_SEAL = "toolgrpo_complete.json"
_UNFINISHED = "toolgrpo_unfinished"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    n_processes: int
    sealed_at: float  # seconds since the epoch


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Where Transformers saves the checkpoint of a step."""
    return output_dir / f"checkpoint-{step}"


def begin(folder: Path) -> None:
    """An empty folder for a checkpoint; what a killed run left under this name is deleted."""
    if folder.exists():
        _delete(folder)
    folder.mkdir(parents=True)
    (folder / _UNFINISHED).touch()


def seal(folder: Path, *, step: int, n_processes: int) -> Checkpoint:
    """Declare a checkpoint complete, once everything in it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _UNFINISHED)
    for path in files:
        _sync(path)
    sealed_at = time.time()
    content = {
        "step": step,
        "n_processes": n_processes,
        "sealed_at": sealed_at,
        "bytes": {str(path.relative_to(folder)): path.stat().st_size for path in files},
    }
    written = folder / f"{_SEAL}.tmp"
    written.write_text(json.dumps(content, indent=1) + "\n")
    _sync(written)
    written.replace(folder / _SEAL)
    (folder / _UNFINISHED).unlink()  # at no moment is there neither a mark nor a seal
    _sync(folder)
    return Checkpoint(folder, step, n_processes, sealed_at)


def flaw(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words, or None if it is complete."""
    return _read(folder)[1]


def is_foreign(folder: Path) -> bool:
    """Whether Transformers or TRL alone saved it: no seal was ever meant for it."""
    ours = (folder / _SEAL).exists() or (folder / _UNFINISHED).exists()
    return not ours and (folder / "trainer_state.json").is_file()


def complete_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """All complete checkpoints, the one sealed last at the end."""
    found = [_read(folder)[0] for folder in output_dir.glob("checkpoint-*")]
    return sorted((checkpoint for checkpoint in found if checkpoint is not None), key=lambda c: c.sealed_at)


def rotate(output_dir: Path, *, keep: int | None, best: Path | None = None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`, never the last one and never `best`; and what kills left torn.

    Called when a checkpoint was sealed and no process is writing one.
    """
    if not keep or keep < 1:
        return
    for folder in [path for path in output_dir.glob("checkpoint-*") if path.is_dir()]:
        marked = (folder / _UNFINISHED).exists() or not any(folder.iterdir())
        if marked and flaw(folder) is not None:
            _delete(folder)
    checkpoints = complete_checkpoints(output_dir)
    deletable = [c for c in checkpoints[:-1] if best is None or c.path.resolve() != best.resolve()]
    for checkpoint in deletable[: max(0, len(checkpoints) - keep)]:
        _delete(checkpoint.path)


def _delete(folder: Path) -> None:
    """From the seal to the mark: what a kill leaves of it has no seal, and the mark by which the next rotation knows it."""
    (folder / _UNFINISHED).touch()
    (folder / _SEAL).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _UNFINISHED:
            path.unlink()
    (folder / _UNFINISHED).unlink()
    folder.rmdir()


def _read(folder: Path) -> tuple[Checkpoint | None, str | None]:
    try:
        content = json.loads((folder / _SEAL).read_text())
        for name, n_bytes in content["bytes"].items():
            path = folder / name
            if not path.is_file():
                return None, f"its file {name} is missing"
            if path.stat().st_size != n_bytes:
                return None, f"its file {name} has {path.stat().st_size} bytes instead of {n_bytes}"
        return Checkpoint(folder, content["step"], content["n_processes"], content["sealed_at"]), None
    except FileNotFoundError:
        return None, "it was not saved to its end (it has no seal)"
    except (ValueError, KeyError, TypeError) as error:
        return None, f"its seal cannot be read ({error})"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
