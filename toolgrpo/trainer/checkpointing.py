"""Save and resume a run so that it goes on as if it had never stopped.

Transformers saves the model, the optimizer, the scheduler, the generators of random numbers of every process and the
step. `Checkpoints` adds what it does not know: each process's place inside a generation batch, the engine's own random
numbers, how many episodes there were, and how long the log of episodes was. `checkpoint_files` says what is complete.

Invariants: a resumed run has the losses of one that never stopped, if its engine draws the same tokens for the same
state (ScriptedEngine and the transformers engine do, on the CPU; vLLM promises no such thing); no episode stands in
the log twice; a log is written at every save, so no metric straddles one.

Not covered: resuming with another number of processes gives the model and optimizer back where the backend can do that,
but not the random numbers and places, and says so.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.engines.base import Resumable
from toolgrpo.errors import ConfigError, StorageError
from toolgrpo.trainer import checkpoint_files as files
from toolgrpo.trainer import trl_seam

__all__ = ["Checkpoints", "RunIsComplete"]

logger = logging.getLogger(__name__)

_NEARLY_NOTHING_BYTES = 16 << 20
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")  # PyTorch says what failed, but not why

# accelerate calls the device of a process on the CPU `cpu:0`, Transformers loads the optimizer onto it, and PyTorch knows
# only `cpu` there: without this a run of several processes on the CPU could be saved but not resumed.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


# What a run writes beside its model, and what may hold data, secrets of tools, or the weights once more.
_NOT_FOR_THE_HUB = """\
# Written by toolgrpo: files of the run that --push_to_hub leaves at home. Change it as you like; it is never overwritten.
episodes*.jsonl*
*.log
failure.json
vllm_weights/
# A pickle of all arguments, --hub_token too.
training_args.bin
"""


class RunIsComplete(Exception):
    """Raised when training begins and the checkpoint has all its steps: Transformers would train one more."""


class Checkpoints(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """The checkpoints of one trainer.

    As a callback it restores what it saved, asks for a log at every save, and keeps the run's own files from the hub.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._output_dir = Path(trainer.args.output_dir)
        self._resumed: Path | None = None

    def to_resume(self, wanted: str | bool | None) -> str | None:
        """The folder to resume from: the one that is named, the last complete one (`auto`: if there is one), or None."""
        (folder,) = broadcast_object_list([self._choose(wanted) if self._is_main else None])
        self._resumed = None if folder is None else Path(folder)
        return None if folder is None else str(folder)

    def save(self, write: Callable[[], None]) -> None:
        """Let `write` fill the checkpoint of this step; seal it; then delete what is beyond `save_total_limit`."""
        trainer, args = self._trainer, self._trainer.args
        step = trainer.state.global_step
        folder = files.checkpoint_folder(self._output_dir, step)
        if self._is_main:
            files.begin(folder)
        trainer.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None  # rotating is ours: it has to wait for the seal
        try:
            write()
            self._save_place(folder)
            trainer.accelerator.wait_for_everyone()
            if self._is_main:
                files.seal(folder, step=step, n_processes=trainer.accelerator.num_processes)
                best = trainer.state.best_model_checkpoint
                files.rotate(self._output_dir, keep=limit, best=None if best is None else Path(best))
        except Exception as error:
            reason = _storage_failure(error, self._output_dir)
            if reason is None:
                raise
            raise self._not_saved(folder, reason) from error
        finally:
            args.save_total_limit = limit
        trainer.accelerator.wait_for_everyone()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._resumed is None:
            self._trainer.recorder.start_anew()
            return
        if state.global_step >= state.max_steps:
            raise RunIsComplete
        trl_seam.skip_epochs(self._trainer, int(state.epoch or 0))
        path = self._place_file(self._resumed)
        checkpoint = next(
            (c for c in files.complete_checkpoints(self._resumed.parent) if c.path == self._resumed), None
        )
        saved_by = None if checkpoint is None else checkpoint.n_processes
        if not path.is_file() or saved_by != self._trainer.accelerator.num_processes:
            logger.warning(
                "%s was saved by %s processes and is resumed by %s: random numbers and the place inside a generation batch "
                "start anew",
                self._resumed,
                saved_by or "an unknown number of",
                self._trainer.accelerator.num_processes,
            )
            return
        self._restore_place(torch.load(path, map_location="cpu", weights_only=True))

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Transformers pushes the whole output folder; the hub does not take what a `.gitignore` in it names."""
        ignore = self._output_dir / ".gitignore"
        if self._is_main and not ignore.exists():
            ignore.write_text(_NOT_FOR_THE_HUB)

    @property
    def _is_main(self) -> bool:
        return bool(self._trainer.accelerator.is_main_process)

    def _choose(self, wanted: str | bool | None) -> str | None:
        if wanted is None or wanted is False or str(wanted).lower() == "false":
            return None
        complete = files.complete_checkpoints(self._output_dir)
        last = complete[-1].path if complete else None
        if wanted is True or str(wanted).lower() in ("auto", "true"):
            for torn in _torn(self._output_dir):
                logger.warning("passed over %s: %s", torn, files.flaw(torn))
            if last is None and str(wanted).lower() != "auto":
                raise ConfigError(f"there is no complete checkpoint in {self._output_dir} to resume from")
            return None if last is None else str(last)
        folder = Path(str(wanted))
        reason = files.flaw(folder)
        if reason is None:
            return str(folder)
        if files.is_foreign(folder):
            logger.warning("%s was not saved by toolgrpo; whether it is complete cannot be told", folder)
            return str(folder)
        raise ConfigError(
            f"cannot resume from {folder}: {'there is no such folder' if not folder.is_dir() else reason}. "
            + (
                f"The last complete checkpoint is {last}."
                if last
                else f"{self._output_dir} has no complete checkpoint."
            )
        )

    def _place_file(self, folder: Path) -> Path:
        return folder / f"toolgrpo_place_{self._trainer.accelerator.process_index}.pt"

    def _save_place(self, folder: Path) -> None:
        engine = self._trainer.engine
        place = {
            "batch": trl_seam.place_in_batch(self._trainer),
            "engine": engine.sampling_state() if isinstance(engine, Resumable) else None,
            "n_episodes": self._trainer.n_episodes,
            "episode_log_bytes": self._trainer.recorder.sync(),
        }
        torch.save(place, self._place_file(folder))

    def _restore_place(self, place: dict[str, Any]) -> None:
        trainer = self._trainer
        trl_seam.restore_place_in_batch(trainer, place["batch"])
        if place["engine"] is not None and isinstance(trainer.engine, Resumable):
            trainer.engine.restore_sampling_state(place["engine"])
        trainer.n_episodes = place["n_episodes"]
        trainer.recorder.cut(place["episode_log_bytes"])

    def _not_saved(self, folder: Path, reason: str) -> StorageError:
        shutil.rmtree(folder, ignore_errors=True)
        complete = files.complete_checkpoints(self._output_dir)
        last = f"The last complete one is {complete[-1].path}" if complete else "There is no complete one yet"
        return StorageError(
            f"the checkpoint {folder} could not be written: {reason}. {last}. Free some space, or give another "
            f"--output_dir, and go on with --resume_from_checkpoint auto."
        )


def _torn(output_dir: Path) -> list[Path]:
    return sorted(f for f in output_dir.glob("checkpoint-*") if f.is_dir() and files.flaw(f) is not None)


def _storage_failure(error: BaseException, folder: Path) -> str | None:
    """Why the disk did not take what was written, or None if something else went wrong."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "the disk is full"
        if "No space left on device" in str(cause) or "StorageFull" in str(cause):
            return "the disk is full"
        if isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE):
            return str(cause)
        if any(word in str(cause) for word in _TORCH_WRITER):
            nearly_full = shutil.disk_usage(folder).free < _NEARLY_NOTHING_BYTES
            return "the disk is full" if nearly_full else f"the disk is full, or failed ({str(cause).splitlines()[0]})"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
