"""Checkpoints on disk: which are complete, which is the last, which may go.

A checkpoint is a folder `checkpoint-STEP` that Transformers and the backend fill, file after file,
from all processes. `begin` marks it as unfinished; when every process is done, `seal` adds one file
that names each file with its size and its digest, and ends with a digest of itself.

Invariants: a folder counts only if its seal is there and every file is as long as the seal says, so
a process that is killed at any moment while it saves or deletes leaves a folder that is passed
over; the seal is written after all files are on the disk, and appears whole or not at all; what is
resumed from has the digests of the seal too, so no bit of it changed on the disk; the last complete
checkpoint is deleted only after a newer one is sealed; from its first moment to its last an
incomplete one has a mark, by which `rotate` knows it as ours; nothing else in the folder is read or
deleted, whatever it is called.

"Last" is the one sealed last, not the one with the highest step: a folder may hold checkpoints of
an older, longer run.

Not covered: somebody who changes a checkpoint and its seal on purpose.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_OURS = "toolgrpo_"  # so begins the name of every file that is not Transformers' or the backend's
_SEAL = f"{_OURS}complete.json"
_UNFINISHED = f"{_OURS}unfinished"
_NAME = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True, slots=True)
class Sealed:
    """State of one file when its checkpoint was sealed."""

    n_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    n_processes: int
    sealed_at: float  # seconds since the epoch
    files: Mapping[str, Sealed]


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Return where Transformers saves the checkpoint of a step."""
    return output_dir / f"checkpoint-{step}"


def step_folders(output_dir: Path) -> list[Path]:
    """Return all folders named as one of a step.

    A note, an archive or a broken link of such a name is none.
    """
    try:
        return sorted(path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return []


def begin(folder: Path) -> None:
    """Make an empty folder for a checkpoint, in place of what a killed run left under this name.

    What is no folder there is somebody else's, and is set aside as `<name>.previous`.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.rename(folder.with_name(f"{folder.name}.previous"))
    if folder.exists():
        _delete(folder)
    folder.mkdir(parents=True)
    (folder / _UNFINISHED).touch()


def seal(folder: Path, *, step: int, n_processes: int) -> Checkpoint:
    """Declare a checkpoint complete, once everything in it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _UNFINISHED)
    for path in files:
        _sync(path)
    sealed = {str(path.relative_to(folder)): Sealed(path.stat().st_size, _digest(path)) for path in files}
    checkpoint = Checkpoint(folder, step, n_processes, time.time(), sealed)
    written = folder / f"{_SEAL}.tmp"
    written.write_text(_seal_text(checkpoint))
    _sync(written)
    written.replace(folder / _SEAL)
    (folder / _UNFINISHED).unlink()  # at no moment is there neither a mark nor a seal
    _sync(folder)
    return checkpoint


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """Return the complete checkpoint in a folder of any name, or None."""
    found = _read(folder)
    return None if isinstance(found, str) else found


def why_incomplete(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, in words, or None if it is complete.

    Its files are not read for this.
    """
    found = _read(folder)
    return found if isinstance(found, str) else None


def why_unusable(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint,
    or None if it is complete and every bit is as it was when it was sealed.
    """
    found = _read(folder)
    if isinstance(found, str):
        return found
    for name, sealed in found.files.items():
        try:
            if _digest(folder / name) != sealed.digest:
                return f"its file {name} has changed since it was saved"
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror or error})"
    return None


def is_foreign(folder: Path) -> bool:
    """Return whether Transformers or TRL alone saved it: nothing of ours was ever in it."""
    if not (folder / "trainer_state.json").is_file():
        return False
    return not any(path.name.startswith(_OURS) for path in folder.iterdir())


def complete_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """Return all complete checkpoints, the one sealed last at the end."""
    found = [_read(folder) for folder in step_folders(output_dir)]
    return sorted((one for one in found if isinstance(one, Checkpoint)), key=lambda one: one.sealed_at)


def rotate(output_dir: Path, *, keep: int | None, best: Path | None = None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`, never the last one and never `best`;
    and what kills left torn.

    Called when a checkpoint was sealed and no process is writing one.
    """
    if not keep or keep < 1:
        return
    for folder in [path for path in step_folders(output_dir) if not path.is_symlink()]:
        marked = (folder / _UNFINISHED).exists() or not any(folder.iterdir())
        if marked and why_incomplete(folder) is not None:
            _delete(folder)
    checkpoints = [one for one in complete_checkpoints(output_dir) if not one.path.is_symlink()]
    deletable = [c for c in checkpoints[:-1] if best is None or c.path.resolve() != best.resolve()]
    for checkpoint in deletable[: max(0, len(checkpoints) - keep)]:
        _delete(checkpoint.path)


def _delete(folder: Path) -> None:
    """Delete a checkpoint, its seal first and its mark last.

    What a kill leaves of it has no seal, and the mark by which the next rotation knows it.
    """
    (folder / _UNFINISHED).touch()
    (folder / _SEAL).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _UNFINISHED:
            path.unlink()
    (folder / _UNFINISHED).unlink()
    folder.rmdir()


def _read(folder: Path) -> Checkpoint | str:
    """Return the checkpoint in a folder, or what is wrong with it."""
    try:
        checkpoint = _from_seal(folder, (folder / _SEAL).read_text())
        for name, sealed in checkpoint.files.items():
            path = folder / name
            if not path.is_file():
                return f"its file {name} is missing"
            if path.stat().st_size != sealed.n_bytes:
                return f"its file {name} has {path.stat().st_size} bytes instead of {sealed.n_bytes}"
        return checkpoint
    except FileNotFoundError:
        return "it was not saved to its end (it has no seal)"
    except (OSError, ValueError, RecursionError) as error:
        return f"its seal cannot be read ({error})"


def _seal_text(checkpoint: Checkpoint) -> str:
    content = {
        "step": checkpoint.step,
        "n_processes": checkpoint.n_processes,
        "sealed_at": checkpoint.sealed_at,
        "files": {name: {"bytes": one.n_bytes, "digest": one.digest} for name, one in checkpoint.files.items()},
    }
    return json.dumps({**content, "digest": _digest_of_json(content)}, indent=1) + "\n"


def _from_seal(folder: Path, text: str) -> Checkpoint:
    """Read what `_seal_text` wrote. Raises ValueError for anything else."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop("digest", None) != _digest_of_json(content):
        raise ValueError("it is not as it was written")
    try:
        files = {str(name): Sealed(int(one["bytes"]), str(one["digest"])) for name, one in content["files"].items()}
        checkpoint = Checkpoint(
            folder, int(content["step"]), int(content["n_processes"]), float(content["sealed_at"]), files
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(checkpoint.sealed_at):
        raise ValueError("it has no time")
    return checkpoint


def _digest_of_json(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _digest(path: Path) -> str:
    """Digest what is in a file.

    No cryptography: it is against accidents, and costs less than reading the file.
    """
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
