"""`ToolGRPOTrainer`:
a thin `GRPOTrainer` that generates with toolgrpo's episodes and trains only on what was sampled.

It connects parts: the engine is built in `engines/build.py`, `rollout/rollouts.py` runs the
episodes, observers hear of them, TRL's private names live in `trl_seam.py`. Rewards, advantages,
losses, the reference model, importance sampling, logging and checkpoints stay TRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
from accelerate.utils import gather_object
from transformers import AutoTokenizer, PreTrainedModel
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from toolgrpo.chat import check_vocabulary, prove_rows, resolve_format, with_template_arguments
from toolgrpo.chat.base import ChatFormat
from toolgrpo.chat.raw_text import RawText
from toolgrpo.data.given_rows import as_dataset
from toolgrpo.engines.base import Engine, SamplingOptions, Sleeper
from toolgrpo.engines.build import BuiltEngine, EngineChoice, EngineOptions, build_engine
from toolgrpo.errors import ConfigError, ModelError
from toolgrpo.evaluation.grading import grade, success_at
from toolgrpo.folder_claim import FolderClaim, claim_folder
from toolgrpo.named_models import folder_of
from toolgrpo.observe.doctor import Finding
from toolgrpo.observe.metrics import MetricsLog
from toolgrpo.observe.own_display import library_bars_off, loaded_lines, take_display
from toolgrpo.observe.progress import RunProgress, StepsCallback
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path
from toolgrpo.observe.rollout_lines import RolloutLines
from toolgrpo.observe.steady_console import SteadyConsole
from toolgrpo.observe.steps import StepLog
from toolgrpo.observe.token_texts import token_texts
from toolgrpo.observe.trackers import RolloutTables, guard_trackers, installed_trackers
from toolgrpo.observe.trouble_metrics import trouble_metrics
from toolgrpo.observe.watch import DoctorWatch, stop_if_world_fails
from toolgrpo.rewards.named import named_rewards
from toolgrpo.rewards.watched import watched
from toolgrpo.rollout import Observer, RolloutBatch, Rollouts
from toolgrpo.rollout.batch import Mode
from toolgrpo.rollout.demand import Demand, suit
from toolgrpo.rollout.observers import Observers
from toolgrpo.tools import load_tools
from toolgrpo.tools.base import TOOL_TIMEOUT_S, ToolProvider
from toolgrpo.trainer import reward_seam, trl_batch, trl_jobs, trl_seam
from toolgrpo.trainer.backend_check import check_backend
from toolgrpo.trainer.checkpointing import Checkpoints, RunIsComplete
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.drawn_batches import DrawnBatch, DrawnBatches
from toolgrpo.trainer.first_failure import report_first_failure
from toolgrpo.trainer.giving_back import close_when_nobody_has_it, closed_if_it_fails
from toolgrpo.trainer.live_rows import RowChoice
from toolgrpo.trainer.memory_return import MemoryReturn
from toolgrpo.trainer.model_card import ModelCard, write_beside_model
from toolgrpo.trainer.prompt_lengths import PromptRoom, rows_that_fit
from toolgrpo.trainer.stopping import GracefulStop
from toolgrpo.trainer.token_tap import TokenTap

__all__ = ["ToolGRPOTrainer", "load_tokenizer"]

_MOST_ROWS_PROVEN = 256  # whose system messages the chat format is proven for

Tools = str | Path | ModuleType | Sequence[Callable[..., Any]] | ToolProvider


class ToolGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL ships no types
    """TRL's `GRPOTrainer` with multi-turn tool episodes.

    Takes TRL's arguments; `tools` may be the path of a tools file, a module, a list of functions or
    a `Toolbox`. `engine` and `chat` replace what the config and the tokenizer would choose.
    `observers` hear of every rollout; `progress` is the display to show it on. `heldout` are the
    rows that `measure` will be asked about: the engine is made large enough for them, too. The
    named models and rewards of the command line (`"nano"`, `"accuracy"`) are known here too.

    `close()` gives the engine and the tool workers back; a `with` block does it at its end, and a
    trainer that nobody has any more does it by itself. Tools that were given as a `Toolbox` stay
    open: they belong to whoever loaded them.
    """

    progress: RunProgress
    train_dataset: Any
    eval_dataset: Any
    _closed = False
    _claim: FolderClaim | None = None

    @closed_if_it_fails
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
        engine: Engine | None = None,
        chat: ChatFormat | None = None,
        observers: Sequence[Observer] = (),
        progress: RunProgress | None = None,
        heldout: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        trl_jobs.refuse_rollout_func(kwargs.pop("rollout_func", None))
        factory = trl_jobs.single_factory(kwargs.pop("environment_factory", None))
        trl_jobs.check_reward_arguments(reward_funcs)
        trl_seam.warn_if_untested()
        Observers(observers)  # refused before anything is loaded
        self._to_close: list[Callable[[], None]] = []  # until `rollouts` has them
        args = args or ToolGRPOConfig("toolgrpo-output")
        named, model, reward_funcs = model, folder_of(model), named_rewards(reward_funcs)
        train_dataset, eval_dataset = (
            as_dataset(train_dataset, "train_dataset"),
            as_dataset(eval_dataset, "eval_dataset"),
        )
        tokenizer = processing_class or load_tokenizer(
            model, revision=_revision(args), trust_remote_code=args.trust_remote_code
        )
        self._raw_text = args.text_prompts == "raw" and trl_jobs.is_text(train_dataset)
        speaking = with_template_arguments(tokenizer, args.chat_template_kwargs)
        chat = chat or (RawText(tokenizer) if self._raw_text else resolve_format(speaking))
        toolbox = _as_toolbox(tools, args, factory)
        if toolbox is not None and toolbox is not tools:
            self._to_close.append(toolbox.close)
        reward_funcs, weights = trl_jobs.with_environment(reward_funcs, args.reward_weights, factory)
        if self._raw_text and toolbox is not None:
            raise ConfigError("raw text has no place for tools; set text_prompts to chat, or leave the tools out")
        if self._raw_text and args.draws_groups:
            raise ConfigError(
                "dynamic_sampling, curriculum and row_weights draw conversations; set text_prompts to chat, or leave them out"
            )
        if train_dataset is None and factory is not None:
            n_rows = args.generation_batch_size // args.num_generations
            train_dataset = trl_jobs.placeholder_rows(n_rows, args.max_steps)
        self.train_sampler: Any = None
        args = args.changed(report_to=installed_trackers(args.report_to), reward_weights=weights)
        with trl_seam.no_engine_of_trl(args):
            super().__init__(
                model=model,
                reward_funcs=watched(reward_funcs, args.reward_timeout, lambda text: self.progress.say(text)),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=tokenizer,
                **kwargs,
            )
        trl_seam.tune_fused_head(self.accelerator.device)
        self.backend = check_backend(self.accelerator, n_gpus=torch.cuda.device_count())
        check_vocabulary(tokenizer, self.model.config.get_text_config().vocab_size)
        prove_rows(chat, speaking, (row["prompt"] for row in islice(self.train_dataset or (), _MOST_ROWS_PROVEN)))
        self.policy = trl_seam.policy_of(self, self.backend)
        self.card = ModelCard(
            base_model=named
            if isinstance(named, str)
            else str(self.model.config._name_or_path or type(model).__name__),
            tools=() if toolbox is None else toolbox.schemas,
            rewards=dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)),
            data=_described(train_dataset),
            is_adapter=hasattr(self.policy.model, "peft_config"),
        )
        self.demand = Demand(args.engine_options())
        if engine is None:
            self.demand = self._suited(self.demand.options, chat, toolbox, heldout)
        given = None if engine is None else BuiltEngine(engine, EngineChoice(engine.name, "given"))
        built = given or build_engine(self.policy, self.demand.options)
        if given is None:
            self._to_close.append(built.engine.shutdown)
        self.engine_choice = built.choice
        trl_seam.correct_for_engine(self, built.engine.gives_logprobs and not built.engine.same_numbers_as_trainer)
        self._shared_pass = args.shared_pass()
        self._rows: Sequence[Mapping[str, Any]] = []
        self._batch: RolloutBatch | None = None  # from its generation until its advantages are known
        self._in_dead_groups: Any = None  # of the batch that was graded last, a flag per row
        self._row_choice: RowChoice | None = None  # of the pass that TRL is about to make
        self._asked_rewards: Any = None  # from their asking until TRL wants them
        self._weights_of_step: int | None = None
        self.rollout_seconds = 0.0
        self.n_episodes = 0  # of all processes, so far
        self.progress = progress or RunProgress(
            SteadyConsole(stderr=True, quiet=args.quiet or not self.is_world_process_zero())
        )
        recording = episodes_path(Path(args.output_dir), self.accelerator.process_index)
        window = PromptRoom(
            tokens=built.engine.max_model_len, chat=chat, tools=toolbox, enable_thinking=args.enable_thinking
        )
        self.fitting = partial(rows_that_fit, window=window, policy=args.long_prompts, say=self.progress.say)
        self.train_dataset = self.fitting(self.train_dataset, name="the training rows")
        self.eval_dataset = self.fitting(self.eval_dataset, name="the evaluation rows")
        self.drawing = reward_seam.open_drawing(self) if args.draws_groups else None
        self._drawn: DrawnBatch | None = None  # the batch that TRL scores, where its groups were drawn here
        self.recorder = EpisodeRecorder(recording, share=args.record_episodes, token_text=token_texts(tokenizer))
        self._token_tap = TokenTap(self.recorder, args.record_tokens)
        self.step_log = StepLog(
            recording.with_name("steps.jsonl") if self.is_world_process_zero() else None,
            facts={"model": str(self.model.config._name_or_path), "tools": list(toolbox.names) if toolbox else []},
            recorded_bytes=lambda: self.recorder.n_bytes,
            say=lambda text: self.progress.say(text),
        )
        self._stop = GracefulStop(self.accelerator, self.progress.say)
        self._checkpoints = Checkpoints(self)
        tables = self._rollout_tables()
        self.doctor = DoctorWatch(self.progress.say, every=args.doctor_every, record=self._record_finding)
        # In this order: a stop saves, and a save logs; a log is shown before what is said of it.
        for callback in (
            self._stop,
            self._checkpoints,
            self.step_log,
            tables,
            MemoryReturn(),
            StepsCallback(self.progress),
            self.doctor,
        ):
            self.add_callback(callback)
        tool_names = [] if toolbox is None else toolbox.names
        log = MetricsLog(self._log_metrics, lambda done: trouble_metrics(done, tool_names, args.episode_limits()))
        lines = [RolloutLines(self.progress.say)] if self.progress.lines_only else []
        all_observers = Observers([self.step_log, log, self.recorder, tables, self.progress, *lines, *observers])
        self.rollouts = self._open_rollouts(
            built.engine, chat, toolbox, all_observers, closes_tools=toolbox is not tools
        )
        if not self.progress.brings_own_log:
            self._show_from_python(kwargs.get("callbacks") or ())

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Run TRL's loop.

        `resume_from_checkpoint` may be `auto`: the last complete checkpoint, if there is one.

        SIGTERM or Ctrl-C ends it after the current step, saved; then `stopped_by` names the signal.
        """
        self._claim_folder()
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        with report_first_failure(Path(self.args.output_dir), self.accelerator), self._stop:
            folder = self._checkpoints.to_resume(wanted)
            if folder is not None:
                self.progress.say(f"resuming from {folder}")
            try:
                with nullcontext() if self.progress.brings_own_log else library_bars_off():
                    output = super().train(resume_from_checkpoint=folder, **kwargs)
            except RunIsComplete:
                self.progress.say(f"all {self.state.global_step} steps were done before; nothing is left to train")
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                output = TrainOutput(self.state.global_step, 0.0, {})
        if self.args.load_best_model_at_end:
            self._weights_of_step = None  # those of another step are loaded, and the engine has none of them
        if self.stopped_by is not None and self.state.global_step < self.state.max_steps:
            self.progress.say(
                f"stopped by {self.stopped_by} after step {self.state.global_step}, which is saved in "
                f"{self.args.output_dir}; go on with --resume_from_checkpoint auto"
            )
        return output

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

    def rollout(
        self,
        rows: Sequence[Mapping[str, Any]],
        options: SamplingOptions | None = None,
        *,
        label: str = "episodes",
        mode: Mode = "heldout",
    ) -> RolloutBatch:
        """Run one episode per row with the current weights, not graded.

        Each process runs its own rows.
        """
        self._load_weights()
        return self.rollouts.run(
            rows,
            options or self.args.sampling_options(),
            step=self.state.global_step,
            mode=mode,
            label=label,
            group_size=1 if mode == "heldout" else self._group_size(mode),
            offset=self.accelerator.process_index * len(rows),
        )

    def _load_weights(self) -> None:
        gave_up = isinstance(self.engine, Sleeper) and self.engine.needs_weights
        if gave_up or self._weights_of_step != self.state.global_step:
            self.rollouts.load_weights(self.policy.weights())
            self._weights_of_step = self.state.global_step

    def measure(
        self, rows: Sequence[Mapping[str, Any]], options: SamplingOptions | None = None, *, label: str = "episodes"
    ) -> RolloutBatch:
        """Run one episode per held-out row with the current weights, graded.

        Nothing is trained or recorded.
        """
        batch = grade(
            self.rollout(rows, options, label=label),
            trl_jobs.taking_text(self.reward_funcs) if self._raw_text else self.reward_funcs,
            self.reward_weights.tolist(),
            threshold=self.args.success_threshold,
            trainer_state=self.state,
        )
        self.rollouts.observers.batch_done(batch)
        return batch

    def close(self) -> None:
        """End the engine, the tool workers, the observers and the bars,
        and leave the output folder to others. Safe to call twice.
        """
        if self._closed:
            return
        self._closed = True
        parts = vars(self)
        if "progress" in parts:
            self.progress.stop_steps()  # an error may have left them, and the cursor hidden
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        close_parts = [self.rollouts.close] if "rollouts" in parts else parts.get("_to_close", [])
        for close_part in reversed(close_parts):
            close_part()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        close_when_nobody_has_it(self)

    def _claim_folder(self) -> None:
        if self._claim is None:
            self._claim = claim_folder(Path(self.args.output_dir), self.accelerator.process_index)
            if self._claim.warning is not None:
                self.progress.say(self._claim.warning)

    def write_card(self, folder: str | Path | None = None, name: str | None = None) -> None:
        """Write `tools.json` and the model card into a folder, of the model's if none is named."""
        folder = Path(folder or self.args.output_dir)
        if self.is_world_process_zero():
            write_beside_model(folder, replace(self.card, steps=self.state.global_step), name or folder.resolve().name)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, its tools and its card."""
        self.write_card(output_dir)
        super().save_model(output_dir, _internal_call)

    # What TRL calls.

    def create_model_card(self, model_name: str | None = None, **_: Any) -> None:
        self.write_card(name=model_name)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        self._checkpoints.save(lambda: write(model, trial))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        drawing = self.drawing if trl_seam.mode_of(self) == "train" else None
        self._drawn = drawn = None if drawing is None else self._draw(drawing, len(inputs))
        self._rows = inputs = inputs if drawn is None else [dict(row) for row in drawn.rows]
        output = super()._generate_and_score_completions(inputs)
        if drawn is not None:
            reward_seam.log_drawn(self, drawn)
        old_choice, self._row_choice = self._row_choice, None
        output = trl_batch.clear_dead_groups(output, self._in_dead_groups)
        self._tell_of_batch(output)
        output, shares = trl_batch.settle_denominator(self, trl_batch.fill_old_logps(output, old_choice))
        if trl_seam.mode_of(self) == "train":
            trl_seam.log_metrics(self, shares)
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with self._token_tap.reading(inputs):
            return super()._compute_loss(model, inputs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._row_choice = choice = trl_batch.choose_rows(self, inputs)
        try:
            with trl_batch.mean_entropy_of_live(self, inputs, choice):
                return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._row_choice = None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return trl_seam.prepare_inputs(self, generation_batch, super()._prepare_inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        padded = super()._get_per_token_logps_and_entropies

        def score(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            shared = trl_seam.shared_logps(self, self._shared_pass, model, *args, **kwargs)
            return padded(model, *args, **kwargs) if shared is None else shared

        choice = self._row_choice
        scored = score(*args, **kwargs) if choice is None else choice.score(score, *args, **kwargs)
        self._token_tap.hear(scored)
        return scored

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        trl_jobs.refuse_rollout_func(self.rollout_func)  # set on a trainer that was made already
        if self._drawn is None:
            rows = [{**row, "prompt": prompt} for row, prompt in zip(self._rows, prompts, strict=True)]
            batch = self.rollout(rows, mode=trl_seam.mode_of(self))
            self._batch = batch = batch.numbered(self._first_number(len(batch)))
            trajectories = batch.trajectories
        else:
            self._batch, trajectories = self._drawn.ran, self._drawn.trajectories
            batch = self._batch
        self.rollout_seconds += batch.times.duration_s
        trl_seam.count_tokens(self, sum(len(t.prompt_ids) + len(t.ids) for t in batch.trajectories))
        pad_id = self.processing_class.pad_token_id
        output = trl_seam.GenerationOutput.from_trajectories(trajectories, pad_id)
        completions = trl_jobs.texts_of(output.completions) if self._raw_text else output.completions
        if trl_batch.reads_old_policy(self):
            self._ask_before_old_policy(prompts, output, completions)
        return output.as_trl(completions)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards_per_func, self._asked_rewards = self._asked_rewards, None
        if rewards_per_func is not None:
            return rewards_per_func
        if self._drawn is None:
            if not self._raw_text and trl_seam.has_reward_model(self):
                prompts = trl_jobs.as_conversations(prompts)  # it reads the whole conversation
            with trl_jobs.point_to_raw_text(prompts, raw=self._raw_text):
                rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        else:  # they were asked as the groups ended
            rewards_per_func = reward_seam.answers_of(self, self._drawn)
        group_size = self._group_size(trl_seam.mode_of(self))
        self._in_dead_groups = trl_batch.in_dead_groups(self, rewards_per_func, len(prompts), group_size)
        if self._batch is not None and not self._batch.is_graded:
            grades = trl_seam.own_grades(self, rewards_per_func, len(self._batch))
            self._batch = self._batch.graded(grades, success_at(self.args.success_threshold))
        return rewards_per_func

    def _tell_of_batch(self, output: dict[str, Any]) -> None:
        """Let observers hear of the batch, now that its advantages are known."""
        batch, self._batch = self._batch, None
        trl_seam.log_dropped(self, output)
        if batch is None or not batch.is_graded:
            return
        if batch.mode == "train":
            trained = batch.trajectories if self._drawn is None else self._drawn.trajectories
            numbers = [int(trajectory.metadata["episode"]) for trajectory in trained]
            # A group that was drawn may be trained on in another process than the one it ran in.
            own = dict(zip(numbers, trl_seam.advantages_of(output), strict=True))
            parts = [own] if self._drawn is None else gather_object([own])
            advantages = {number: advantage for part in parts for number, advantage in part.items()}
            batch = batch.with_advantages([advantages.get(int(t.metadata["episode"])) for t in batch.trajectories])
            self.rollouts.observers.batch_done(batch)
            self._token_tap.choose(batch, output, numbers)
        else:
            self.rollouts.observers.batch_done(batch)

    def _draw(self, drawing: DrawnBatches, n_rows: int) -> DrawnBatch:
        self._load_weights()
        drawn = drawing.draw(
            self.rollouts,
            self.args.sampling_options(),
            partial(reward_seam.ask_rewards, self),
            n_rows=n_rows,
            step=self.state.global_step,
            first_number=self.n_episodes,
        )
        self.n_episodes += drawn.n_episodes
        return drawn

    def _ask_before_old_policy(
        self, prompts: list[Any], output: trl_seam.GenerationOutput, completions: Sequence[Any]
    ) -> None:
        """Ask the rewards that TRL would ask next but one, so that the old policy reads no group
        that they say is dead.
        """
        fields = [
            dict(zip(output.extra_fields, of, strict=True)) for of in zip(*output.extra_fields.values(), strict=True)
        ]
        inputs = [{**row, **own} for row, own in zip(self._rows, fields, strict=True)]
        self._asked_rewards = self._calculate_rewards(inputs, prompts, completions, output.completion_ids)
        self._row_choice = trl_batch.choose_rows_of_old_policy(self, self._in_dead_groups)

    def _open_rollouts(
        self,
        engine: Engine,
        chat: ChatFormat,
        toolbox: ToolProvider | None,
        observers: Observers,
        *,
        closes_tools: bool,
    ) -> Rollouts:
        args = self.args
        return Rollouts(
            engine=engine,
            chat=chat,
            limits=args.episode_limits(),
            tokenizer=self.processing_class,
            tools=toolbox,
            closes_tools=closes_tools,
            observers=observers,
            engine_retries=args.engine_retries,
            unmarked_calls=args.unmarked_calls,
            max_concurrent=args.max_concurrent_episodes,
            enable_thinking=args.enable_thinking,
        )

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        trl_seam.log_metrics(self, metrics)
        stop_if_world_fails(metrics, self.args.max_world_failures)

    def _record_finding(self, finding: Finding) -> None:
        step = max(0, finding.step - 1)  # steps.jsonl counts those that were done before
        self.step_log.event("finding", finding.sentence, step=step, rule=finding.rule, section=finding.section)

    def _show_from_python(self, given: Sequence[Any]) -> None:
        """Say what was loaded, as the commands do, and let nobody else show the steps."""
        take_display(self, given)
        lines = loaded_lines(
            model=self.policy.get_model(),
            n_rows=len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None,
            tools=self.toolbox,
            rewards=self.reward_func_names,
            engine=f"{self.engine_choice.name} ({self.engine_choice.why})",
            chat=self.chat.name,
        )
        for line in lines:
            self.progress.say(line)

    def _suited(
        self, options: EngineOptions, chat: ChatFormat, toolbox: ToolProvider | None, heldout: Sequence[Any]
    ) -> Demand:
        evaluated = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else [self.eval_dataset]
        return suit(
            options,
            self.policy,
            chain.from_iterable(rows for rows in (self.train_dataset, *evaluated) if isinstance(rows, Sized)),
            heldout,
            chat=chat,
            tools=toolbox,
            max_completion_length=self.args.episode_limits().max_completion_length,
            enable_thinking=self.args.enable_thinking,
            max_concurrent=self.args.max_concurrent_episodes,
        )

    def _rollout_tables(self) -> RolloutTables:
        """Guard the trackers, so that none can stop a run, and return tables of episodes for them.

        TRL's own table has no tools in it.
        """
        guard_trackers(self.callback_handler.callbacks, self.args.report_to)
        self.log_completions = False
        return RolloutTables(self.callback_handler.callbacks, with_tables=self.args.log_completions)

    def _group_size(self, mode: Mode) -> int:
        return int(self.args.num_generations if mode == "train" else self.num_generations_eval)

    def _first_number(self, n: int) -> int:
        """Return a number that no other episode of the run has,
        in any process, nor the n - 1 after it.
        """
        first: int = self.n_episodes + self.accelerator.process_index * n
        self.n_episodes += self.accelerator.num_processes * n
        return first


def _described(dataset: Any) -> str:
    """Return in a few words what somebody trains on."""
    columns = getattr(dataset, "column_names", None) or ()
    size = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else "rows without end"
    return f"{size} with {', '.join(columns)}" if columns else size


def _as_toolbox(
    tools: Tools | None, args: ToolGRPOConfig, factory: Callable[[], Any] | None = None
) -> ToolProvider | None:
    if factory is not None:
        if isinstance(tools, ToolProvider):
            raise ConfigError(
                "an environment_factory and a toolbox that is loaded already; use load_tools(..., environment=...) for both"
            )
        return load_tools(tools or None, environment=factory, tool_timeout_s=args.tool_timeout)
    if tools is None or isinstance(tools, ToolProvider):
        timeout_s = getattr(tools, "timeout_s", args.tool_timeout)
        if args.tool_timeout not in (TOOL_TIMEOUT_S, timeout_s):
            raise ConfigError(
                f"tool_timeout is {args.tool_timeout:g}, but the toolbox that was given was loaded with "
                f"{timeout_s:g} s for a call; use load_tools(..., tool_timeout_s={args.tool_timeout:g}), or leave "
                f"tool_timeout out"
            )
        return tools
    return load_tools(tools, tool_timeout_s=args.tool_timeout)


def _revision(args: ToolGRPOConfig) -> str | None:
    """Return the revision that the model is loaded in; its tokenizer belongs to it."""
    kwargs = args.model_init_kwargs
    return kwargs.get("revision") if isinstance(kwargs, dict) else None


def load_tokenizer(
    model: str | PreTrainedModel, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Return the tokenizer that lies beside the model, in the same revision."""
    path = model if isinstance(model, str) else model.config._name_or_path
    if not path:
        raise ModelError("the model was not loaded from a path, so its tokenizer is unknown; pass `processing_class`")
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no tokenizer could be loaded from {path!r}: {error}. Give a folder that `save_pretrained` wrote, a hub id, "
            f"or `nano` for the embedded model."
        ) from error
