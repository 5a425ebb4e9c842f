"""`ToolGRPOTrainer`: a thin `GRPOTrainer` that generates with toolgrpo's episodes and trains only on what was sampled.

It connects parts and holds no policy: the engine is chosen in `engines/choose.py`, an episode is run in
`rollout/episode.py`, TRL's private names live in `trl_seam.py`. Advantages, losses, the reference model, importance
sampling, logging and checkpoints stay TRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from toolgrpo.chat import check_vocabulary, resolve_format
from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import Engine, SamplingOptions
from toolgrpo.engines.build import build_engine
from toolgrpo.engines.choose import given
from toolgrpo.errors import ConfigError, ModelError
from toolgrpo.observe.group_spread import reward_spread
from toolgrpo.observe.metrics import rollout_metrics
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path
from toolgrpo.observe.reduction import of_all_processes
from toolgrpo.observe.tables import episode_rows
from toolgrpo.observe.trackers import RolloutTables, guard_trackers, installed_trackers
from toolgrpo.rollout import Episode, EpisodeRunner, RolloutResult, TokenCutter, run_rollout
from toolgrpo.tools import load_tools
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer import trl_seam
from toolgrpo.trainer.backend_check import check_backend
from toolgrpo.trainer.checkpointing import Checkpoints, RunIsComplete
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.first_failure import name_the_first_failure
from toolgrpo.trainer.memory_return import MemoryReturn
from toolgrpo.trainer.stopping import GracefulStop
from toolgrpo.trajectory import Message, Trajectory

__all__ = ["ToolGRPOTrainer"]

Tools = str | Path | ModuleType | Sequence[Callable[..., Any]] | ToolProvider


class ToolGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL ships no types
    """TRL's `GRPOTrainer` with multi-turn tool episodes.

    Takes TRL's arguments; `tools` may be the path of a tools file, a module, a list of functions or a `Toolbox`.
    `engine` and `chat` replace what the config and the tokenizer would choose.
    """

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
        **kwargs: Any,
    ) -> None:
        for name in ("rollout_func", "environment_factory"):
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"ToolGRPOTrainer runs its own episodes, so `{name}` has no effect; pass `tools=` (a tools or "
                    f"environment file) instead, or use TRL's GRPOTrainer."
                )
        trl_seam.warn_if_untested()
        args = args or ToolGRPOConfig("toolgrpo-output")
        tokenizer = processing_class or _load_tokenizer(model, args)
        self.chat = chat or resolve_format(tokenizer)
        self.toolbox = _as_toolbox(tools, args)
        self.train_sampler: Any = None
        args.report_to = installed_trackers(args.report_to)
        with trl_seam.no_engine_of_trl(args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=tokenizer,
                **kwargs,
            )
        trl_seam.tune_fused_head(self.accelerator.device)
        self.backend = check_backend(self.accelerator)
        check_vocabulary(tokenizer, self.model.config.get_text_config().vocab_size)
        self.engine, self.engine_choice = build_engine(self) if engine is None else (engine, given(engine))
        trl_seam.correct_for_engine(self, self.engine.name != "transformers" and self.engine.gives_logprobs)
        self._shared_pass = args.shared_pass()
        self._rows: Sequence[Mapping[str, Any]] = []
        self._weights_of_step: int | None = None
        self.rollout_seconds = 0.0
        self.progress = RunProgress(Console(stderr=True, quiet=not self.is_world_process_zero()))
        self._cutter = TokenCutter(tokenizer, args.max_tool_response_tokens)
        self.n_episodes = 0  # of all processes, so far
        self.recorder = EpisodeRecorder(
            episodes_path(Path(args.output_dir), self.accelerator.process_index) if args.record_episodes else None
        )
        self._stop = GracefulStop(self.accelerator, lambda text: self.progress.say(text))
        self._checkpoints = Checkpoints(self)
        guard_trackers(self.callback_handler.callbacks, args.report_to)
        self._tables = RolloutTables(self.callback_handler.callbacks, with_tables=args.log_completions)
        self.log_completions = False  # TRL's own table has no tools in it
        # In this order: a stop saves, and a save logs.
        for callback in (self._stop, self._checkpoints, self._tables, MemoryReturn()):
            self.add_callback(callback)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """TRL's loop. `resume_from_checkpoint` may be `auto`: the last complete checkpoint, if there is one.

        SIGTERM or Ctrl-C ends it after the step of now, saved; then `stopped_by` names the signal.
        """
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        with name_the_first_failure(Path(self.args.output_dir), self.accelerator), self._stop:
            folder = self._checkpoints.to_resume(wanted)
            if folder is not None:
                self.progress.say(f"resuming from {folder}")
            try:
                output = super().train(resume_from_checkpoint=folder, **kwargs)
            except RunIsComplete:
                self.progress.say(f"all {self.state.global_step} steps were done before; nothing is left to train")
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                output = TrainOutput(self.state.global_step, 0.0, {})
        if self.stopped_by is not None:
            self.progress.say(
                f"stopped by {self.stopped_by} after step {self.state.global_step}, which is saved in "
                f"{self.args.output_dir}; go on with --resume_from_checkpoint auto"
            )
        return output

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the last `train` early, or None."""
        return None if self._stop.stopped_by is None else self._stop.stopped_by.name

    def rollout(
        self, rows: Sequence[Mapping[str, Any]], options: SamplingOptions | None = None, *, label: str = "episodes"
    ) -> RolloutResult:
        """Run one episode per row with the weights of now. Each process runs its own rows and waits for no other."""
        self._push_weights()
        runner = EpisodeRunner(
            engine=self.engine,
            chat=self.chat,
            limits=self.args.episode_limits(),
            options=options or self.args.sampling_options(),
            cut=self._cutter,
            tools=self.toolbox,
            engine_retries=self.args.engine_retries,
            unmarked_calls=self.args.unmarked_calls,
        )
        episodes = [
            Episode(messages=_as_messages(row["prompt"]), row=row, enable_thinking=self._thinking(row)) for row in rows
        ]
        with self.progress.episodes(len(episodes), label) as on_done:
            return run_rollout(episodes, runner, max_concurrent=self.args.max_concurrent_episodes, on_done=on_done)

    def close(self) -> None:
        """End the engine, the tool workers and the recorder."""
        self.engine.shutdown()
        if self.toolbox is not None:
            self.toolbox.close()
        self.recorder.close()

    # What TRL calls.

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        self._checkpoints.save(lambda: write(model, trial))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self._rows = inputs
        return super()._generate_and_score_completions(inputs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return trl_seam.prepare_inputs(self, generation_batch, super()._prepare_inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        shared = trl_seam.shared_logps(self, self._shared_pass, model, *args, **kwargs)
        padded = super()._get_per_token_logps_and_entropies
        return padded(model, *args, **kwargs) if shared is None else shared

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        rows = [{**row, "prompt": prompt} for row, prompt in zip(self._rows, prompts, strict=True)]
        result = self.rollout(rows)
        self.rollout_seconds += result.duration_s
        trajectories = self._numbered(result.trajectories)
        trl_seam.count_tokens(self, sum(len(t.prompt_ids) + len(t.ids) for t in trajectories))
        metrics = rollout_metrics(trajectories, duration_s=result.duration_s, engine_idle_s=result.engine_idle_s)
        trl_seam.log_metrics(self, of_all_processes(metrics))
        pad_id = self.processing_class.pad_token_id
        return trl_seam.GenerationOutput.from_trajectories(trajectories, pad_id).as_trl()

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device)).nansum(dim=1)
        own = rewards[start : start + len(prompts)].tolist()
        success = sum(reward >= self.args.success_threshold for reward in rewards.tolist()) / len(rewards)
        trl_seam.log_metrics(self, {"success": success, **reward_spread(rewards.tolist(), self._group_size())})
        step, trajectories = self.state.global_step, [row["trajectories"] for row in inputs]
        self.recorder.record(trajectories, own, inputs, step=step, mode=trl_seam.mode_of(self))
        if self._tables.wanted:
            by_name = dict(
                zip(self.reward_func_names, rewards_per_func[start : start + len(prompts)].T.tolist(), strict=True)
            )
            self._tables.show(episode_rows(trajectories, own, inputs, by_name, step=step))
        return rewards_per_func

    def _group_size(self) -> int:
        training = trl_seam.mode_of(self) == "train"
        return int(self.args.num_generations if training else self.num_generations_eval)

    def _numbered(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """With a number that no other episode of the run has, in any process."""
        first = self.n_episodes + self.accelerator.process_index * len(trajectories)
        self.n_episodes += self.accelerator.num_processes * len(trajectories)
        return [replace(t, metadata={**t.metadata, "episode": first + i}) for i, t in enumerate(trajectories)]

    def _push_weights(self) -> None:
        if self._weights_of_step != self.state.global_step:
            self.engine.load_weights(trl_seam.iter_named_params(self))
            self._weights_of_step = self.state.global_step

    def _thinking(self, row: Mapping[str, Any]) -> bool | None:
        of_row = row.get("enable_thinking")
        return self.args.enable_thinking if of_row is None else bool(of_row)


def _as_messages(prompt: str | Sequence[Message]) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    return tuple(dict(message) for message in prompt)


def _as_toolbox(tools: Tools | None, args: ToolGRPOConfig) -> ToolProvider | None:
    if tools is None or isinstance(tools, ToolProvider):
        return tools
    return load_tools(tools, tool_timeout_s=args.tool_timeout)


def _load_tokenizer(model: str | PreTrainedModel, args: ToolGRPOConfig) -> Any:
    path = model if isinstance(model, str) else model.config._name_or_path
    if not path:
        raise ModelError("the model was not loaded from a path, so its tokenizer is unknown; pass `processing_class`")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no tokenizer could be loaded from {path!r}: {error}. Give a folder that `save_pretrained` wrote, a hub id, "
            f"or `nano` for the embedded model."
        ) from error
