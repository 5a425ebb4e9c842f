"""`ToolGRPOTrainer`: a `GRPOTrainer` that generates with toolgrpo's episodes and trains only on what was sampled.

Read from top to bottom, it is the story of a run; advantages, losses, the reference model, logging and checkpoints are TRL's:

    construct    take parts, let TRL load the model, open engine, training pass, watchers and the road of a batch
    train        TRL's loop, from its beginning or a checkpoint, until its end, a signal or a failure
    a step       TRL asks for its batch (`trl/calls.py`, which this class extends):
                     rows -> `rollout` -> grade            `Batches.take`
                     -> TRL scores it -> stages            `_generate_and_score_completions`
                     -> micro-batches -> shared pass       `compute_loss`
    measure      held-out rows, before a training, during it and after it
    close        give back what was opened
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from toolgrpo.build import Parts
from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import Engine, SamplingOptions, Sleeper
from toolgrpo.engines.build import BuiltEngine, EngineChoice
from toolgrpo.errors import InfrastructureError, StorageError, TooManyDroppedError
from toolgrpo.evaluation.agreement import EngineProof
from toolgrpo.evaluation.grading import Grading, success_at
from toolgrpo.learning.correction import settled
from toolgrpo.learning.stages import Stage, user_stages
from toolgrpo.models import name_base_whole
from toolgrpo.observe.console import SteadyConsole
from toolgrpo.observe.progress import RunProgress, library_bars_off, take_display
from toolgrpo.observe.watch import open_watchers
from toolgrpo.rewards.base import watched
from toolgrpo.rollout import Observer, Player, RolloutBatch
from toolgrpo.rollout.batch import Mode
from toolgrpo.rollout.observers import Observers
from toolgrpo.support.barrier import Processes
from toolgrpo.support.run_lock import FolderClaim, claim_folder
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.assembly import (
    Tools,
    cache_of,
    check_rows_of_a_step,
    engine_lines,
    loaded_lines,
    model_card,
    take_parts,
)
from toolgrpo.trainer.batches import Batches, check_engine, open_groups
from toolgrpo.trainer.checkpoint_files import BegunRun
from toolgrpo.trainer.checkpointing import Checkpoints, tied_head_expected
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.hardware import check_backend
from toolgrpo.trainer.model_card import SavesWithCard
from toolgrpo.trainer.stopping import (
    GracefulStop,
    HeldOutWatch,
    RunIsComplete,
    close_when_nobody_has_it,
    report_first_failure,
)
from toolgrpo.trainer.training_pass import open_pass, settled_checkpointing
from toolgrpo.trainer.trl import trainer as trl_trainer
from toolgrpo.trainer.trl.calls import CallsOfTRL, check_models

logger = logging.getLogger(__name__)
_MOST_ROWS_PROVEN = 256  # whose system messages the chat format is proven for


class ToolGRPOTrainer(SavesWithCard, CallsOfTRL):
    """TRL's `GRPOTrainer` with multi-turn tool episodes.

    Takes TRL's arguments; `tools` may be the path of a tools file, a module, a list of functions or
    a `Toolbox`. `agent`, a file or a command line, plays the episodes itself. `engine` and `chat` replace what the config and the tokenizer would choose.
    `observers` hear of every rollout; `progress` is the display to show it on. `heldout` are the
    rows that `measure` will be asked about: the engine is made large enough for them, too. The
    named models and rewards of the command line (`"nano"`, `"accuracy"`) are known here too.

    `close()` gives the engine and the tool workers back; a `with` block does it at its end, and a
    trainer that nobody has any more does it by itself. Tools that were given as a `Toolbox` stay
    open: they belong to whoever loaded them.
    """

    train_dataset: Any
    eval_dataset: Any
    _closed = False
    _claim: FolderClaim | None = None

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: ToolGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        tools: Tools | None = None,
        agent: str | Path | Player | None = None,
        engine: Engine | None = None,
        chat: ChatFormat | None = None,
        observers: Sequence[Observer] = (),
        progress: RunProgress | None = None,
        heldout: Sequence[Mapping[str, Any]] = (),
        stages: Sequence[Stage] = (),
        **kwargs: Any,
    ) -> None:
        trl_jobs.refuse_rollout_func(kwargs.pop("rollout_func", None))
        factory = trl_jobs.single_factory(kwargs.pop("environment_factory", None), train_dataset)
        trl_jobs.check_reward_arguments(reward_funcs)
        trl_trainer.warn_if_untested()
        Observers(observers)  # refused before anything is loaded
        self._opened = ExitStack()  # until `rollouts` has it
        with ExitStack() as failing:  # what was opened is closed before the error is raised
            failing.callback(self.close)
            given = take_parts(
                *(model, reward_funcs, args, train_dataset, eval_dataset, processing_class),
                tools=tools,
                chat=chat,
                factory=factory,
                agent=agent,
                opened=self._opened,
            )
            args = given.config
            self.stages = user_stages(args.stage_fn or (), stages, args.reward_timeout)
            super().__init__(
                args,
                model=given.model,
                reward_funcs=watched(given.reward_funcs, args.reward_timeout, lambda text: self.progress.say(text)),
                train_dataset=given.train_dataset,
                eval_dataset=given.eval_dataset,
                processing_class=given.tokenizer,
                **kwargs,
            )
            self.parts = parts = self._know_model(given)
            self.progress = progress or RunProgress(
                SteadyConsole(stderr=True, quiet=args.quiet or not self.is_world_process_zero())
            )
            built = self._open_engine(parts, engine, heldout)
            self.fitting = parts.fitting(built.engine, self.progress.say)
            self.train_dataset = self.fitting(self.train_dataset, name="the training rows")
            self.eval_dataset = self.fitting(self.eval_dataset, name="the evaluation rows")
            check_rows_of_a_step(self.train_dataset, self.args, "the training set")
            self._open_pass(parts, built)
            self._open_watchers(parts, built.engine)
            self.rollouts = parts.rollouts(built.engine, self._watchers.observers(observers))
            self._open_road(built.engine)
            self._say_parts(parts, built, kwargs.get("callbacks") or ())
            failing.pop_all()

    def _know_model(self, given: Parts) -> Parts:
        """Check the model that TRL has loaded, and how it is spread."""
        name_base_whole(self.model)
        self.backend = check_backend(self.accelerator, n_gpus=torch.cuda.device_count())
        self.policy = trl_trainer.policy_of(self, self.backend)
        parts = given.with_model(self.policy)
        prompts = (row["prompt"] for row in islice(self.train_dataset or (), _MOST_ROWS_PROVEN))
        parts.prove_chat(prompts, (self.train_dataset, given.eval_dataset))
        rewards = dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))
        self.card = model_card(parts, rewards)
        return parts

    def _open_engine(self, given: Parts, engine: Engine | None, heldout: Sequence[Mapping[str, Any]]) -> BuiltEngine:
        """Start what draws, and settle how its tokens are corrected."""
        args = given.config
        if engine is None:
            built = given.open_engine((self.train_dataset, self.eval_dataset), heldout)
            self._opened.callback(built.engine.shutdown)
        else:
            built = BuiltEngine(engine, EngineChoice(engine.name, "given"))
        self.engine_choice = built.choice
        self._weights_of_step = None
        correction = settled(
            args,
            gives_logprobs=built.engine.gives_logprobs,
            # In half precision a cached decode and a training pass round apart, with the same weights too.
            same_numbers=built.engine.same_numbers_as_trainer and self.policy.dtype == torch.float32,
        )
        self._correct_by(correction)
        check_models(self.reward_funcs, args, self.backend)
        if args.runs_ahead:
            check_engine(built.engine)
        return built

    def _open_pass(self, given: Parts, built: BuiltEngine) -> None:
        """Open the training pass for the rows that are left."""
        say = self.progress.say if self.is_world_process_zero() else lambda line: None
        given = settled_checkpointing(given, built.choice.name, self.train_dataset, say)
        self.args = given.config
        self._shared_pass = open_pass(given, self.train_dataset, say)

    def _open_watchers(self, given: Parts, engine: Engine) -> None:
        """Open what watches, and the callbacks that stop and save."""
        self._stop = GracefulStop(self.accelerator, self.progress.say)
        self._checkpoints = Checkpoints(self)
        self._watchers = watchers = open_watchers(
            given.config,
            tool_names=given.tool_names,
            tokenizer=given.tokenizer,
            cache=cache_of(engine),
            progress=self.progress,
            callbacks=self.callback_handler.callbacks,
            log=self._log_metrics,
            model_name=str(self.model.config._name_or_path),
            process=self.accelerator.process_index,
            is_main=self.is_world_process_zero(),
        )
        self.recorder, self.step_log, self.doctor = watchers.recorder, watchers.step_log, watchers.doctor
        self.heldout_watch = HeldOutWatch(
            keeps_best=self.args.keep == "best",
            stop_when=self.args.stop_when,
            say=self.progress.say,
            n_datasets=len(self.eval_dataset) if isinstance(self.eval_dataset, dict) else 1,
        )
        for callback in (self.heldout_watch, *watchers.callbacks(self._stop, self._checkpoints)):
            self.add_callback(callback)

    def _open_road(self, engine: Engine) -> None:
        """Open the road of a training batch: rows in line, grading, the batch between TRL's calls."""
        args = self.args
        processes = Processes(self.accelerator.num_processes, self.accelerator.process_index)
        processes.meet()  # a first time, so that they know each other before anybody is slow
        groups = open_groups(
            *(args, self.rollouts, self._training(self._load_weights), processes),
            rows=self.train_dataset,
            row_of=lambda number: self.train_sampler.data_source[number],
            order_of=self._epoch_order,
        )
        grading = Grading(
            self.reward_funcs,
            self.reward_weights.tolist(),
            success_at(args.success_threshold),
            self.reward_func_names,
            state=lambda: self.state,
            ask_model=self._ask_model,
        )
        self.rollout_batches = Batches(partial(self.rollout, mode="train"), grading, args.shaping(), processes, groups)
        self._proof = EngineProof(
            engine,
            self.policy,
            self.accelerator,
            args.sampling_options(),
            model=lambda: self.model,
            step=lambda: int(self.state.global_step),
        )
        self._open_batches()

    def _say_parts(self, parts: Parts, built: BuiltEngine, callbacks: Sequence[Any]) -> None:
        rewards = dict(zip(self.reward_func_names, self.reward_funcs, strict=True))
        loaded, generates = loaded_lines(parts, self.train_dataset, rewards), engine_lines(parts, built)
        for line in (*loaded, *generates):
            logger.info("%s", line)
        if not self.progress.brings_own_log:  # else a command has said what it loaded
            take_display(self.remove_callback, callbacks)
            generates = [*loaded, *generates, f"off-policy correction: {self.correction.line}"]
        for line in generates:
            self.progress.say(line)

    # train

    def train(self, resume_from_checkpoint: str | bool | BegunRun | None = None, **kwargs: Any) -> Any:
        """Run TRL's loop.

        `resume_from_checkpoint` may be `auto`: the last complete checkpoint, if there is one. Where there is none, a run
        that is in the output folder is set aside in `earlier-1`.
        SIGTERM or Ctrl-C ends it after the current step, saved; then `stopped_by` names the signal.
        """
        trl_jobs.refuse_replaced_generate(self.model)
        self._claim_folder()
        self._proof.again()
        self._weights_of_step = None  # another run begins at step 0 too
        self.best_step = None
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        with report_first_failure(Path(self.args.output_dir), self.accelerator), self._stop:
            folder = self._checkpoints.to_resume(wanted)
            if folder is not None:
                self.progress.say(f"resuming from {folder}")
            else:  # a training before this one in the same session has left its place
                self.restore_place_in_batch({"step": 0, "buffered_inputs": None})
                self.rollout_batches.begin_anew()
                if self.state.global_step:
                    self.recorder.begin_anew()
            try:
                bars = nullcontext() if self.progress.brings_own_log else library_bars_off()
                with bars, tied_head_expected(self.policy.base_model):
                    output = super().train(resume_from_checkpoint=folder, **kwargs)
            except RunIsComplete as complete:
                self.progress.say(f"{complete}; nothing is left to train")
                if self.args.load_best_model_at_end:
                    self._load_best()
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                output = TrainOutput(self.state.global_step, 0.0, {})
            except InfrastructureError as failed:
                alone = self.accelerator.num_processes == 1  # else the others wait for this one, and can save nothing
                if isinstance(failed, TooManyDroppedError) or (alone and not isinstance(failed, StorageError)):
                    try:
                        self._save_step_before()
                    except Exception as lost:  # whatever it is, the first failure is the one to read
                        failed.add_note(f"the step before could not be saved either: {lost}")
                raise
            finally:
                self.rollout_batches.stop()
        self._say_how_it_ended()
        return output

    def _say_how_it_ended(self) -> None:
        """Say whether the model is of an earlier step, and how to go on after a signal."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._weights_of_step = None  # those of another step are loaded, and the engine has none of them
            self.best_step = self.state.best_global_step
            name, best = self.args.metric_for_best_model, self.state.best_metric
            self.progress.say(
                f"best      step {self.best_step} of {self.state.global_step}: {name} {best:.3f}; the model is of this step"
            )
        if self.stopped_by is not None and self.state.global_step < self.state.max_steps:
            self.progress.say(
                f"stopped by {self.stopped_by} after step {self.state.global_step}, which is saved in "
                f"{self.args.output_dir}; resume with --resume_from_checkpoint auto"
            )

    def _claim_folder(self) -> None:
        if self._claim is None:
            self._claim = claim_folder(Path(self.args.output_dir), self.accelerator.process_index)
            if self._claim.warning is not None:
                self.progress.say(self._claim.warning)

    # a step

    def rollout(
        self,
        rows: Sequence[Mapping[str, Any]],
        options: SamplingOptions | None = None,
        *,
        label: str | None = None,
        mode: Mode = "heldout",
    ) -> RolloutBatch:
        """Run one episode per row with the current weights, not graded.

        Each process runs its own rows.
        """
        self.rollout_batches.settle()
        self._load_weights()
        return self.rollouts.run(
            rows,
            options or self.args.sampling_options(),
            step=self.state.global_step,
            mode=mode,
            label=label or (f"evaluation after step {self.state.global_step}" if mode == "eval" else "episodes"),
            group_size=1 if mode == "heldout" else trl_trainer.group_size(self, mode),
            offset=self.accelerator.process_index * len(rows),
        )

    def _load_weights(self) -> int:
        """Give the engine the current weights, if it has others; return the step that they are of."""
        gave_up = isinstance(self.engine, Sleeper) and self.engine.needs_weights
        if gave_up or self._weights_of_step != self.state.global_step:
            self.rollouts.engine.load_weights(self.policy.weights())
            self._weights_of_step = self.state.global_step
        return int(self.state.global_step)

    # measure

    def measure(
        self,
        rows: Sequence[Mapping[str, Any]],
        options: SamplingOptions | None = None,
        *,
        label: str | None = None,
        mode: Mode = "heldout",
    ) -> RolloutBatch:
        """Run one episode per held-out row with the current weights, graded: before a training, during it and after it.

        Nothing is trained; observers hear of it, and the recording keeps it. Every process must call it.
        """
        self._claim_folder()
        batch = self.rollout(rows, options, label=label, mode=mode)
        if mode == "eval":
            batch = self.rollout_batches.evaluated(batch)
        with trl_jobs.point_to_messages(rows):
            grading = self.rollout_batches.grading
            answers = grading.ask([one.row for one in batch.episodes], batch.trajectories, step=batch.step)
            batch = grading.graded(batch, answers)
        self._logged_by_rewards = answers.metrics
        self.rollout_batches.processes.meet()  # rewards may take long too, and observers gather
        self.rollouts.observers.batch_done(batch)
        return batch

    # close

    def close(self) -> None:
        """End the engine, tool workers, observers and bars; leave the output folder to others. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        parts = vars(self)
        if "progress" in parts:
            self.progress.stop_steps()  # an error may have left them, and the cursor hidden
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if "rollout_batches" in parts:
            self.rollout_batches.stop()
        if "rollouts" in parts:
            self.rollouts.close()
        elif "_opened" in parts:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        close_when_nobody_has_it(self)

    # facts

    @property
    def stopped_by(self) -> str | None:
        """The signal that asked the last `train` to end, or None."""
        return None if self._stop.stopped_by is None else self._stop.stopped_by.name

    @property
    def engine(self) -> Engine:
        return self.rollouts.engine

    @property
    def chat(self) -> ChatFormat:
        return self.rollouts.chat

    @property
    def toolbox(self) -> ToolProvider | None:
        return self.rollouts.tools
