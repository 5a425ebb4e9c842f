"""Looks at the output folder before a command starts: it can be written to, and nothing in it would be lost.

Refused are a folder that another run has, a resume from nothing or of a run that was moved, and files of the user, or of
a training, that the command would write over or move away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolgrpo.commands.given import HEAD, RUN_FILE, Given
from toolgrpo.errors import ConfigError
from toolgrpo.support.run_lock import claim_folder
from toolgrpo.trainer.checkpoint_files import (
    check_model_is_elsewhere,
    check_wanted,
    is_of_a_run,
    run_id_in,
    step_folders,
)


def check_folder(output_dir: str, *, keep: bool = False) -> None:
    """Check that the output folder can be made and written to; `keep` it if it is made for that."""
    folder = Path(output_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with contextlib.suppress(OSError):  # another process was first
            for made in () if keep else missing:
                made.rmdir()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--output_dir {output_dir} cannot be a folder to write to: {why}; choose another one"
        ) from error


def checkpoint(given: Given) -> None:
    """Refuse to go on from nothing, and to begin anew over the model that is trained."""
    known = given.known()
    wanted, folder = known["resume_from_checkpoint"], Path(known["output_dir"] or "trainer_output")
    check_wanted(folder, wanted)
    beside = given.file.parent if given.file is not None and given.file.name == RUN_FILE else folder
    goes_on = str(wanted).lower() in ("auto", "true") and "output_dir" in given.places
    if goes_on and beside.resolve() != folder.resolve() and step_folders(beside):
        raise ConfigError(
            f"{given.file} says output_dir {folder}, but checkpoints are beside it: the run was moved. Give --output_dir "
            f"{shlex.quote(str(beside))}"
        )
    if not wanted and not known.get("dry_run"):
        check_model_is_elsewhere(folder, str(known["model_name_or_path"]))


def contents(given: Given) -> None:
    """Refuse an output folder that cannot be written to, or that another run has."""
    if os.environ.get("RANK", "0") != "0":
        return
    known = given.known()
    folder = Path(known["output_dir"] or "trainer_output")
    check_folder(str(folder))
    if given.command in ("train", "sft"):
        _refuse_to_replace(known, folder)
    elif given.command == "evaluate":
        for label in ("baseline", "model"):
            if run_id_in(folder / label):
                raise ConfigError(
                    f"output_dir {folder}: the evaluation would write into {folder / label}, which holds a training; give another "
                    f"--output_dir"
                )
    if folder.is_dir() and not known.get("dry_run"):
        claim_folder(folder).release()


def _refuse_to_replace(known: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder in which the run would write over, or move away, what is the user's."""
    card, settings = folder / "README.md", folder / RUN_FILE
    if card.is_file() and card.read_bytes()[:3] != b"---":
        raise ConfigError(
            f"output_dir {folder} has a README.md that is not a model card, and the model card would replace it; give another folder"
        )
    if settings.is_file() and not run_id_in(folder) and not settings.read_bytes().startswith(HEAD.encode()):
        raise ConfigError(
            f"{settings} was not written by a run, and the settings of this one would replace it; rename it, or give another "
            f"--output_dir"
        )
    for name in ("dataset_id_or_path", "eval_dataset_id_or_path", "mcp_config"):
        path = Path(str(known.get(name) or ""))
        if known.get(name) and path.is_dir() and path.resolve() == folder.resolve():
            raise ConfigError(
                f"{name} {path} is the output folder, too, and the run writes a heldout.jsonl; give another --output_dir"
            )
        if path.is_file() and path.resolve().parent == folder.resolve() and is_of_a_run(path.name):
            raise ConfigError(
                f"{name} {path} is in output_dir, and has the name of a file that the run itself writes; rename it, or give "
                f"another --output_dir"
            )
