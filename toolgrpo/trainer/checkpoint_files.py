"""Checkpoints on disk: which are complete, which is the last, which may go; what a run goes on from.

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

A checkpoint belongs to a run: its seal and `run.yaml` have the identity of that run (None where an older version
wrote them). A run that begins (`begin_run`) sets aside, in `earlier-N/`, all that another run left in its folder, so
weights, card, report and recordings there are of one run; what is not named as a file of a run stays.

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
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import xxhash

from toolgrpo.errors import ConfigError, StorageError

_OURS = "toolgrpo_"  # so begins the name of every file that is not Transformers' or the backend's
_SEAL = f"{_OURS}complete.json"
_UNFINISHED = f"{_OURS}unfinished"
_NAME = re.compile(r"checkpoint-\d+")
_RUN_FILE, _RUN_ID = "run.yaml", re.compile(r"^run_id: (\w+)$", re.MULTILINE)
_NOTHING = ("none", "false", "")  # what is said of no checkpoint
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
_RECORDINGS = ("episodes*.jsonl*", "tokens*.jsonl*", "heldout*.jsonl*", "vocabulary*.jsonl*", "steps.jsonl*")
_OF_A_RUN = (
    *(*_WEIGHTS, *_RECORDINGS),
    *("*.index.json", "*.gguf", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("training_args.bin", "trainer_state.json", "all_results.json", "train_results.json", "README.md", "tools.json"),
    *("Modelfile", "summary.json", "failure.json", "evaluation.json", "report*.html"),
    *("train.log*", "train.rank*.log*", "agent.log*", "tools.log*"),
    "vllm_weights",
)


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
    run: str | None = None  # to which it belongs; None: an older version wrote it


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A run that has its folder: its identity, and the checkpoint that it goes on from."""

    run: str | None
    checkpoint: Path | None


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


def seal(folder: Path, *, step: int, n_processes: int, run: str | None = None) -> Checkpoint:
    """Declare a checkpoint complete, once everything in it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (_UNFINISHED, _SEAL))
    for path in files:
        _sync(path)
    sealed = {str(path.relative_to(folder)): Sealed(path.stat().st_size, _digest(path)) for path in files}
    checkpoint = Checkpoint(folder, step, n_processes, time.time(), sealed, run)
    written = folder / f"{_SEAL}.tmp"
    written.write_text(_seal_text(checkpoint))
    _sync(written)
    written.replace(folder / _SEAL)
    (folder / _UNFINISHED).unlink(missing_ok=True)  # at no moment is there neither a mark nor a seal
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


def has_optimizer(folder: Path) -> bool:
    """Return whether a run can go on from a checkpoint: with `save_only_model` it holds weights alone."""
    names = [path.name for path in folder.iterdir()]
    return any(name.startswith(("optimizer", "scheduler", "global_step")) for name in names)


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


# What a run goes on from, and where it begins anew.

Say = Callable[[str], None]


def begin_run(
    folder: Path, wanted: Any, say: Say, *, unsealed: bool = False, keeps: Collection[str] = (), model: str = ""
) -> BegunRun:
    """Decide what a run goes on from; where it does not go on with the run in `folder`, set that aside.

    The folder is claimed. `unsealed` as in `to_resume`; recordings of the kinds in `keeps` are the new run's
    already; `model` is what it trains.
    """
    checkpoint = to_resume(folder, wanted, say, unsealed=unsealed)
    left = _left_by_a_run(folder)
    if checkpoint is not None:
        sealed = checkpoint_in(checkpoint)
        run = None if sealed is None else sealed.run
        if checkpoint.resolve().parent == folder.resolve() or (left and run == _run_in(folder)):
            return BegunRun(run, checkpoint)
    check_model_is_elsewhere(folder, model)
    if left:
        _set_aside(folder, [name for name in left if name.partition(".")[0] not in keeps], say)
    else:
        (folder / _RUN_FILE).unlink(missing_ok=True)  # of a run that came to nothing
    return BegunRun(uuid.uuid4().hex[:16], checkpoint)


def to_resume(folder: Path, wanted: Any, say: Say, *, unsealed: bool = False) -> Path | None:
    """Return the checkpoint that is wanted: a path, `true` or `auto` for the last of the run; None: to begin anew.

    Every file of it is as it was. With `unsealed`, the last that Transformers alone has saved will do where no other is.
    """
    check_wanted(folder, wanted)
    word = str(wanted).lower()
    if word in _NOTHING:
        return None
    if word in ("auto", "true"):
        last = _last_whole(folder, say, unsealed)
        if last is None and word == "true":
            raise ConfigError(f"there is no complete checkpoint in {folder} to resume from")
        return last
    named = Path(str(wanted))
    reason = why_unusable(named)
    if reason is None:
        return named
    if is_foreign(named):
        say(f"{named} was not saved by toolgrpo, so it may be incomplete")
        return named
    last = _last_whole(folder, lambda text: None, unsealed)
    other = f"The last complete checkpoint is {last}." if last else f"{folder} has no complete checkpoint."
    raise ConfigError(f"cannot resume from {named}: {reason}. {other}")


def check_wanted(folder: Path, wanted: Any) -> None:
    """Refuse to go on from nothing; nothing is read for this."""
    word = str(wanted).lower()
    if word == "true" and not step_folders(folder):
        raise ConfigError(
            f"there is no complete checkpoint in {folder} to resume from; auto starts a new run where there is none"
        )
    if word not in ("auto", "true", *_NOTHING) and not Path(str(wanted)).is_dir():
        last = complete_checkpoints(folder)
        other = f"the last complete checkpoint is {last[-1].path}" if last else f"{folder} has no complete checkpoint"
        raise ConfigError(f"cannot resume from {wanted}: there is no such folder; {other}")


def check_model_is_elsewhere(folder: Path, model: str) -> None:
    """Refuse to begin a run where the model lies that it trains: it would be set aside, or written over."""
    place = Path(model).resolve() if model and Path(model).is_dir() else None
    if place is not None and (place == folder.resolve() or place in {one.resolve() for one in step_folders(folder)}):
        raise ConfigError(
            f"the model to train, {model}, is in the output folder {folder}, which the new run uses "
            f"itself; give another --output_dir, or resume the run there: --resume_from_checkpoint auto"
        )


def _last_whole(folder: Path, say: Say, unsealed: bool) -> Path | None:
    """Return the checkpoint of the folder's run sealed last that is as it was; say which are passed over."""
    run, candidates = run_id_in(folder), complete_checkpoints(folder)
    if run is None and len({one.run for one in candidates}) > 1:
        found = ", ".join(one.path.name for one in candidates)
        raise ConfigError(f"the checkpoints in {folder} are of several runs ({found}); name the one to resume from")
    if unsealed and run is None and not candidates:
        foreign = [one for one in step_folders(folder) if is_foreign(one)]
        return max(foreign, key=lambda one: int(one.name.rpartition("-")[2]), default=None)
    complete = {one.path for one in candidates}
    passed_over = {one: why_incomplete(one) for one in step_folders(folder) if one not in complete}
    last = None
    while candidates and last is None:
        newest = candidates.pop()
        of_another = run is not None and newest.run != run
        passed_over[newest.path] = "it belongs to another run" if of_another else why_unusable(newest.path)
        if passed_over[newest.path] is None:
            last = newest.path
    for one, reason in passed_over.items():
        if reason is not None:
            say(f"passed over {one}: {reason}")
    if passed_over and last is None:
        say(f"no checkpoint in {folder} can be resumed from")
    return last


def run_id_in(folder: Path) -> str | None:
    """Return the identity of the training whose settings are in a folder."""
    try:
        found = _RUN_ID.search((folder / _RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if found is None else found[1]


def _run_in(folder: Path) -> str | None:
    """Return the identity of the run in a folder, by its file or else its last checkpoint."""
    return run_id_in(folder) or next((one.run for one in reversed(complete_checkpoints(folder))), None)


def is_of_a_run(name: str) -> bool:
    """Return whether a run gives this name to a file in its folder."""
    return any(fnmatch(name, part) for part in _OF_A_RUN)


def _left_by_a_run(folder: Path) -> list[str]:
    """Return the names of what a run left in a folder; none, if it has no checkpoint, weights or episodes to keep."""
    checkpoints = [one.name for one in step_folders(folder)]
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    if not checkpoints and not any(fnmatch(name, part) for name in names for part in (*_WEIGHTS, "episodes*.jsonl*")):
        return []
    files = [name for name in names if is_of_a_run(name)]
    return [*checkpoints, *files, *[name for name in names if name == _RUN_FILE]]


def _set_aside(folder: Path, names: Collection[str], say: Say) -> None:
    """Move a run into a folder of its own: checkpoints first and its name last, should this be interrupted."""
    number = 1
    while os.path.lexists(folder / f"earlier-{number}"):
        number += 1
    aside = folder / f"earlier-{number}"
    try:
        aside.mkdir()
        for name in names:
            (folder / name).rename(aside / name)
    except OSError as error:
        raise StorageError(
            f"the run in {folder} cannot be set aside in {aside.name} ({error.strerror or error}); give another output_dir"
        ) from error
    say(f"the run that was in {folder} is moved, whole, to {aside}; --resume_from_checkpoint auto resumes a run")


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
        return "it was not saved completely (it has no seal)"
    except (OSError, ValueError, RecursionError) as error:
        return f"its seal cannot be read ({error})"


def _seal_text(checkpoint: Checkpoint) -> str:
    content = {
        "step": checkpoint.step,
        "n_processes": checkpoint.n_processes,
        "sealed_at": checkpoint.sealed_at,
        **({} if checkpoint.run is None else {"run": checkpoint.run}),
        "files": {name: {"bytes": one.n_bytes, "digest": one.digest} for name, one in checkpoint.files.items()},
    }
    return json.dumps({**content, "digest": _digest_of_json(content)}, indent=1) + "\n"


def _from_seal(folder: Path, text: str) -> Checkpoint:
    """Read what `_seal_text` wrote. Raises ValueError for anything else."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop("digest", None) != _digest_of_json(content):
        raise ValueError("it was changed after it was written")
    try:
        files = {str(name): Sealed(int(one["bytes"]), str(one["digest"])) for name, one in content["files"].items()}
        numbers = int(content["step"]), int(content["n_processes"]), float(content["sealed_at"])
        checkpoint = Checkpoint(folder, *numbers, files, content.get("run"))
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
