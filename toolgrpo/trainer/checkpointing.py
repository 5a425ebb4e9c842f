"""Save and resume a run so that it goes on as if it had never stopped.

Transformers saves the model, the optimizer, the scheduler, the generators of random numbers of
every process and the step. `Checkpoints` adds what it does not know: each process's place inside a
generation batch, the engine's own random numbers, how many episodes there were, how long the log of
episodes was, and, where steps choose their own prompts, the place in their order and what is known
of the rows. `checkpoint_files` says what is complete.

Invariants: a resumed run has the losses of one that never stopped, if its engine groups the same
tokens for the same state (ScriptedEngine and the transformers engine do, on the CPU; vLLM promises
no such thing); no episode stands in the log twice; a log is written at every save, so no metric
straddles one.

A run that refuses a batch (too many of its episodes were dropped) is saved as it was when that step
began.

Not covered: the metrics of steps that were not logged yet when a batch was refused; resuming with another number of processes gives the model and optimizer back where the
backend can do that, and the order of rows, but not the random numbers and places, and says so.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.engines.base import Resumable
from toolgrpo.errors import ConfigError, StorageError, ToolGRPOError
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path
from toolgrpo.support.storage import storage_failure, write_whole
from toolgrpo.trainer import checkpoint_files as files
from toolgrpo.trainer.stopping import RunIsComplete

if TYPE_CHECKING:
    from toolgrpo.trainer.trl.calls import CallsOfTRL

# accelerate calls the device of a process on the CPU `cpu:0`, Transformers loads the optimizer onto
# it, and PyTorch knows only `cpu` there: without this a run of several processes on the CPU could
# be saved but not resumed.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


# What a run writes beside its model, and what may hold data, secrets of tools, or the weights once
# more.
_NOT_FOR_THE_HUB = """\
# Written by toolgrpo: files of the run that --push_to_hub does not push. Change it as you like; it is never overwritten.
episodes*.jsonl*
heldout*.jsonl*
tokens*.jsonl*
vocabulary*.jsonl*
steps.jsonl*
report*.html
*.log
*.log.1
run.yaml
summary.json
earlier-*/
.run*.lock
failure.json
vllm_weights/
# A pickle of all arguments, --hub_token too.
training_args.bin
"""


Place = dict[str, Any]
"""Where one process of a run is: in its generation batch, in its engine's random numbers, in its log
of episodes, and in the order of rows.
"""


@contextmanager
def tied_head_expected(model: Any) -> Iterator[None]:
    """Keep Transformers from reporting the head of a tied model as missing in a checkpoint, which never has it.

    Of a model whose head has weights of its own it is reported: that head would not be restored.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().endswith("model loaded: ['lm_head.weight'].")

    loads, head = logging.getLogger("transformers.trainer"), model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        loads.addFilter(is_news)
    try:
        yield
    finally:
        loads.removeFilter(is_news)


@dataclass(frozen=True, slots=True)
class _Begun:
    """Place of a process when a step began, the tokens counted by then, and its generators of random numbers, those of
    the accelerators too.
    """

    place: Place
    n_tokens: int
    of_python: Any
    of_numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, place: Place, n_tokens: int) -> Self:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(place, n_tokens, random.getstate(), np.random.get_state(), torch.get_rng_state(), tuple(cuda))

    def restore_random_numbers(self) -> None:
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


def begin_together(folder: Path, wanted: Any, say: Callable[[str], None], **more: Any) -> files.BegunRun:
    """Begin a run in its folder, in the main process; every process gets the same answer, once all have read theirs."""
    state = PartialState()
    state.wait_for_everyone()
    begun: files.BegunRun | ToolGRPOError | None = None
    if state.is_main_process:
        try:
            begun = files.begin_run(folder, wanted, say, **more)
        except ToolGRPOError as refused:  # for all, which would wait for this process
            begun = refused
    (begun,) = broadcast_object_list([begun])
    if isinstance(begun, ToolGRPOError):
        raise begun
    return cast("files.BegunRun", begun)


class Checkpoints(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """The checkpoints of one trainer.

    As a callback it restores what it saved, asks for a log at every save, and keeps the run's own
    files from the hub. Transformers deletes no checkpoint meanwhile: it knows no seal, and takes
    every folder `checkpoint-*` for one.
    """

    def __init__(self, trainer: CallsOfTRL) -> None:
        self._trainer = trainer
        self._output_dir = Path(trainer.args.output_dir)
        self._resumed: Path | None = None
        self._keep = trainer.args.save_total_limit
        self._begun: _Begun | None = None
        self._run: files.BegunRun | None = None
        self.once_sealed: Callable[[], None] | None = None  # done when the checkpoint that is being written is whole
        self._evaluates_first = trainer.args.eval_on_start

    def to_resume(self, wanted: str | bool | files.BegunRun | None) -> str | None:
        """Return the folder to resume from, or None to begin anew; the first time the run begins.

        It is the one that is named, or the last complete one (with `auto`, if there is one).
        """
        if isinstance(wanted, files.BegunRun):
            self._run = wanted
        elif self._run is None:
            model = self._trainer.model
            self._run = begin_together(
                *(self._output_dir, wanted, self._trainer.progress.say),
                keeps=self._trainer.recorder.open_kinds(),
                model=str(getattr(getattr(model, "config", None), "_name_or_path", "")),
            )
        else:
            chosen = files.to_resume(self._output_dir, wanted, self._warn) if self._is_main else None
            (folder,) = broadcast_object_list([chosen])
            self._run = replace(self._run, checkpoint=folder)
        self._resumed = self._run.checkpoint
        return None if self._resumed is None else str(self._resumed)

    def save(self, write: Callable[[], None], place: Place | None = None) -> None:
        """Let `write` fill the checkpoint of this step; seal it.

        Then delete what is beyond `save_total_limit`. `place` is where the run is to go on, if not
        from here.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        folder = files.checkpoint_folder(self._output_dir, step)
        try:
            if self._is_main:
                files.begin(folder)
            trainer.accelerator.wait_for_everyone()
            write()
            log_bytes = trainer.recorder.sync()
            torch.save(self._place(log_bytes) if place is None else place, self._place_file(folder))
            trainer.accelerator.wait_for_everyone()
            if self._is_main:
                run = None if self._run is None else self._run.run
                files.seal(folder, step=step, n_processes=trainer.accelerator.num_processes, run=run)
        except Exception as error:
            reason = storage_failure(error, self._output_dir)
            if reason is None:
                raise
            raise self._not_saved(folder, reason) from error
        if self._is_main:
            self._delete_old()
        if self.once_sealed is not None:
            push, self.once_sealed = self.once_sealed, None
            try:
                push()
            except OSError as error:  # it is whole here all the same
                self._warn(f"{folder} could not be pushed: {error}")
        trainer.accelerator.wait_for_everyone()

    def _delete_old(self) -> None:
        best = self._trainer.state.best_model_checkpoint
        try:
            files.rotate(self._output_dir, keep=self._keep, best=None if best is None else Path(best))
        except OSError as error:  # the new one is whole
            self._warn(f"an old checkpoint could not be deleted, and stays: {error}")

    def save_step_before(self, write: Callable[[], None]) -> None:
        """Save the step that was done last, as it was before the one that failed; every process must ask.

        The weights are still its own, for nothing was trained since. What the failed step drew is
        drawn again by the resumed run, and its episodes stay in the log until then.
        """
        step, begun = self._trainer.state.global_step, self._begun  # None between two steps
        folder = files.checkpoint_folder(self._output_dir, step)
        if begun is None or not step or any(gather_object([files.why_incomplete(folder) is None])):
            return
        begun.restore_random_numbers()
        self._trainer.state.num_input_tokens_seen = begun.n_tokens
        self.save(write, begun.place)
        self._warn(f"step {step} is saved in {folder}")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._begun = _Begun.now(self._place(self._trainer.recorder.size()), state.num_input_tokens_seen)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._begun = None
        # A checkpoint keeps no metrics that were not logged, and an evaluation may ask for one. Those of the last step
        # belong to TRL's closing line, unless an evaluation follows: TRL would then log them as the evaluation's.
        keeps = control.should_save and state.global_step < state.max_steps
        control.should_log = control.should_log or control.should_evaluate or keeps

    on_epoch_end = on_step_end

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        args.save_total_limit = None  # after the trackers were told
        if self._resumed is None:
            return
        args.eval_on_start = False  # the run has started; its draws would be others
        self._find_best(state)
        reason = self._trainer.heldout_watch.reason(state)
        if state.global_step >= state.max_steps or reason is not None:
            raise RunIsComplete(reason or f"all {state.global_step} steps were done before")
        if not files.has_optimizer(self._resumed):
            raise ConfigError(
                f"{self._resumed} holds only weights (save_only_model), so a run cannot be resumed from it; "
                f"start a new one from them, with another --output_dir: --model_name_or_path {self._resumed}"
            )
        if args.sync_ref_model:
            raise ConfigError(
                f"sync_ref_model changes the reference model, which no checkpoint holds, so {self._resumed} cannot "
                f"be resumed; start a new run with resume_from_checkpoint false"
            )
        self._trainer.skip_epochs(int(state.epoch or 0))
        for trouble in gather_object(self._restore(self._resumed)):
            self._warn(f"{trouble}; the training continues")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        args.save_total_limit, args.eval_on_start = self._keep, self._evaluates_first

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        """Write a `.gitignore`: Transformers pushes the whole output folder but what that names."""
        ignore = self._output_dir / ".gitignore"
        if self._is_main and not ignore.exists():
            write_whole(ignore, _NOT_FOR_THE_HUB)

    @property
    def _is_main(self) -> bool:
        return bool(self._trainer.accelerator.is_main_process)

    def _find_best(self, state: TrainerState) -> None:
        """Find the best checkpoint beside the resumed one: its path may be of another place, or of another working folder."""
        if not state.best_global_step or state.best_model_checkpoint is not None:
            return
        assert self._resumed is not None
        best = files.checkpoint_folder(self._resumed.parent, state.best_global_step)
        reason = files.why_incomplete(best)
        if reason is None:
            state.best_model_checkpoint = str(best)
        elif self._trainer.args.load_best_model_at_end:
            self._warn(f"the best step so far, {state.best_global_step}, has no whole checkpoint ({best}: {reason})")

    def _restore(self, folder: Path) -> list[str]:
        """Put this process where it was; returns what could not be restored."""
        path = self._place_file(folder)
        checkpoint = files.checkpoint_in(folder)
        saved_by = None if checkpoint is None else checkpoint.n_processes
        now = self._trainer.accelerator.num_processes
        if not path.is_file() or saved_by != now:
            return [
                f"{folder} was saved by {saved_by or 'an unknown number of'} processes and is resumed by {now}: random "
                f"numbers and the place inside a generation batch start anew in process "
                f"{self._trainer.accelerator.process_index}",
                *self._restore_of_another_number(folder),
            ]
        return self._restore_place(torch.load(path, map_location="cpu", weights_only=True))

    def _restore_of_another_number(self, folder: Path) -> list[str]:
        """Restore what no process has for itself: the order of rows, the number of episodes, and what was recorded."""
        places = {
            int(path.stem.rpartition("_")[2]): torch.load(path, map_location="cpu", weights_only=True)
            for path in folder.glob("toolgrpo_place_*.pt")
        }
        if not places:
            return []
        self._restore_order(places[min(places)])
        trainer, lost = self._trainer, []
        own, n = trainer.accelerator.process_index, trainer.accelerator.num_processes
        for process in {own, *(places if self._is_main else ())} if trainer.recorder.path is not None else ():
            if process == own or process >= n:
                recorder = (
                    trainer.recorder if process == own else EpisodeRecorder(episodes_path(self._output_dir, process))
                )
                place = places.get(process)  # None: it came later
                n_bytes = (
                    recorder.bytes_before(trainer.state.global_step) if place is None else place["episode_log_bytes"]
                )
                lost.append(recorder.cut(n_bytes))
        return [f"the recording of episodes is not whole: {one}" for one in lost if one is not None]

    def _warn(self, text: str) -> None:
        """Warn the person at the terminal, and in the log of a command."""
        if self._is_main:
            self._trainer.progress.say(text)

    def _place_file(self, folder: Path) -> Path:
        return folder / f"toolgrpo_place_{self._trainer.accelerator.process_index}.pt"

    def _place(self, log_bytes: int) -> Place:
        engine, batches = self._trainer.engine, self._trainer.rollout_batches
        return {
            "batch": self._trainer.place_in_batch(),
            "engine_name": engine.name,
            "engine": engine.sampling_state() if isinstance(engine, Resumable) else None,
            "n_episodes": batches.n_episodes,
            "episode_log_bytes": log_bytes,
            "row_order": None if batches.groups is None else batches.groups.order.state(),
            "off_policy": self._trainer.off_policy.state(),
        }

    def _restore_place(self, place: Place) -> list[str]:
        trainer = self._trainer
        same_batches = trainer.restore_place_in_batch(place["batch"])
        if same_batches and "off_policy" in place:
            trainer.off_policy.restore(place["off_policy"])
        same_engine = place.get("engine_name", trainer.engine.name) == trainer.engine.name
        if place["engine"] is not None and same_engine and isinstance(trainer.engine, Resumable):
            trainer.engine.restore_sampling_state(place["engine"])
        self._restore_order(place)
        lost = trainer.recorder.cut(place["episode_log_bytes"])
        said = [] if lost is None else [f"the recording of episodes is not whole: {lost}"]
        anew = "the checkpoint has batches of another form, so its generation batch is left and the next one drawn"
        return said if same_batches else [*said, anew]

    def _restore_order(self, place: Place) -> None:
        batches = self._trainer.rollout_batches
        batches.n_episodes = place["n_episodes"]
        if batches.groups is not None and place.get("row_order") is not None:
            batches.groups.order.restore(place["row_order"])

    def _not_saved(self, folder: Path, reason: str) -> StorageError:
        shutil.rmtree(folder, ignore_errors=True)
        complete = files.complete_checkpoints(self._output_dir)
        last = f"The last complete one is {complete[-1].path}" if complete else "There is no complete one yet"
        return StorageError(
            f"the checkpoint {folder} could not be written: {reason}. {last}. Free some space, or give "
            f"another output_dir, and resume with resume_from_checkpoint auto."
        )
