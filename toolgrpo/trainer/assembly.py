"""A trainer's parts: what the arguments of its constructor stand for, and what is opened once TRL has loaded its model.

`take_parts` resolves names, datasets, tokenizer, chat format, tools and rewards, as TRL and the rollouts take them; nothing
is loaded then but the tokenizer and the tools. Its doors for an agent and for rows, and the lines about what generates, are
those of the commands too. Watchers, training pass and model card follow.

Values in, parts out: nothing here knows the trainer. What is opened is put on the stack of the caller, who closes it where
the construction fails later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback

from toolgrpo.build import Parts, load_tokenizer
from toolgrpo.chat.base import ChatFormat
from toolgrpo.data.rows import rows_and_reasons
from toolgrpo.data.table import as_dataset
from toolgrpo.engines.base import CacheRoom, Engine, HasCache
from toolgrpo.engines.build import BuiltEngine
from toolgrpo.errors import ConfigError, DataError, ModelError
from toolgrpo.models import folder_of, is_adapter
from toolgrpo.models.adapter_step import join_adapters
from toolgrpo.observe.doctor import Finding
from toolgrpo.observe.metrics import Known, MetricsLog
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path, token_texts
from toolgrpo.observe.rollout_lines import RolloutLines, RolloutLog
from toolgrpo.observe.steps import StepLog
from toolgrpo.observe.trackers import RolloutTables, guard_trackers, installed_trackers
from toolgrpo.observe.watch import DoctorWatch, stop_if_infrastructure_fails
from toolgrpo.rewards import Reward, named_rewards, refused_rows
from toolgrpo.rewards.base import source_text
from toolgrpo.rollout import Observer, Player
from toolgrpo.rollout.observers import Observers
from toolgrpo.rollout.row_parts import OFFERED, TOOL_COLUMNS, rows_without_their_tools, users_speak
from toolgrpo.shared_pass.scoring import SharedPass, most_in_a_pass, unsupported_model
from toolgrpo.shared_pass.torch_seam import attention_name
from toolgrpo.support.plain_text import counted
from toolgrpo.support.process_setup import map_large_blocks
from toolgrpo.tools import Toolbox, open_tools
from toolgrpo.tools.arguments import signatures_text
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.hardware import precision_line
from toolgrpo.trainer.memory import Device, PassShape, RunShape, free_bytes, keeps_activations, most_tokens
from toolgrpo.trainer.model_card import ModelCard

Tools = str | Path | ModuleType | Sequence[Callable[..., Any]] | ToolProvider


def take_parts(
    model: str | PreTrainedModel,
    reward_funcs: Any,
    args: ToolGRPOConfig | None,
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: Any,
    *,
    tools: Tools | None,
    chat: ChatFormat | None,
    factory: Callable[[], Any] | None,
    agent: str | Path | Player | None = None,
    opened: ExitStack,
) -> Parts:
    """Return what these arguments of a trainer stand for, or say what does not go together.

    `factory` makes the environments of a job that was written for TRL; `agent` is a file or a command.
    """
    args = args or ToolGRPOConfig("toolgrpo-output")
    named_model, model, reward_funcs = model, folder_of(model), named_rewards(reward_funcs)
    if isinstance(model, str) and is_adapter(model):
        raise ModelError(
            f"{model} is a LoRA adapter, and a training begins with whole weights: toolgrpo export {model} --merge "
            f"{model}-merged, then give that folder"
        )
    train_dataset = as_dataset(train_dataset, "train_dataset")
    eval_dataset = as_dataset(eval_dataset, "eval_dataset")
    trl_jobs.refuse_images(train_dataset)
    trl_jobs.refuse_images(eval_dataset)
    tokenizer = tokenizer or load_tokenizer(
        model, revision=args.revision, trust_remote_code=args.trust_remote_code, call_markers=args.call_markers
    )
    toolbox = open_tools(tools, environment=factory, tool_timeout_s=args.tool_timeout)
    if toolbox is not None and toolbox is not tools:
        opened.callback(toolbox.close)
    player = open_player(agent, toolbox, args)
    if player is not None:
        opened.callback(player.close)
    speaks = toolbox is not None or player is not None or users_speak(None, train_dataset)
    if not speaks:
        trl_jobs.warn_of_text(train_dataset, reward_funcs)
    for name, rows in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
        if isinstance(rows, Dataset):  # a stream is not read
            columns = () if player is not None else OFFERED if toolbox is None else TOOL_COLUMNS
            asked = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            suited_rows(rows, name, toolbox, asked, columns)
    reward_funcs, weights = trl_jobs.with_environment(reward_funcs, args.reward_weights, factory)
    if train_dataset is None and factory is not None:
        n_rows = args.generation_batch_size // args.num_generations
        train_dataset = trl_jobs.placeholder_rows(n_rows, args.max_steps)
    return Parts.of(
        args.changed(report_to=installed_trackers(args.report_to), reward_weights=weights),
        tokenizer,
        chat,
        named_model=named_model,
        model=model,
        reward_funcs=reward_funcs,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        toolbox=toolbox,
        closes_tools=toolbox is not tools,
        player=player,
    )


def open_player(
    agent: str | Path | Player | None, tools: ToolProvider | None, config: Any, host: str = "127.0.0.1"
) -> Player | None:
    """Return what plays the episodes, if it is not our own loop."""
    if agent is None:
        return None
    if tools is not None:
        raise ConfigError(
            "an agent brings its own tools, so that those that are given would not be used; leave them out"
        )
    from toolgrpo.gateway.agents import check_limits, load_agent  # most runs have no agent, and need nothing of it

    check_limits(config.episode_limits())
    if isinstance(agent, str | Path):
        return load_agent(agent, host=host, log_path=Path(config.output_dir) / "agent.log")
    return agent


def suited_rows(
    rows: Any,
    name: str,
    tools: ToolProvider | None,
    rewards: Sequence[Any],
    columns: Iterable[str],
    *,
    left_out: Callable[[str], None] | None = None,
    advice: str = "leave them out",
    look: Callable[[Callable[[], dict[int, str]]], dict[int, str]] = lambda find: find(),
) -> Any:
    """Return the rows whose tools are there, and that every reward can score: each other one would end a training, or
    teach nothing. `left_out` is told of these; without it they are an error.
    """
    finds = [("the tools", partial(rows_without_their_tools, tools, columns=columns))]
    finds += [(one.name, partial(refused_rows, reward=one)) for one in rewards if isinstance(one, Reward)]
    for who, find in finds:
        refused = look(partial(find, rows=rows))
        if not refused:
            continue
        from toolgrpo.data.load import places_of  # a trainer whose rows are good needs no reader of files

        text = f"{name}: {len(refused)} of {counted(len(rows), 'row')} do not suit {who}: "
        text += rows_and_reasons(refused, places_of(rows, refused).__getitem__)
        if left_out is None or len(refused) == len(rows):
            raise DataError(f"{text}. Fix these rows, or {advice}")
        left_out(f"{text}; left out")
        rows = rows.select([number for number in range(len(rows)) if number not in refused])
    return rows


def model_card(given: Parts, rewards: Mapping[str, float]) -> ModelCard:
    """Return what is known of a training before its first step."""
    base_model = given.named_model
    if not isinstance(base_model, str):
        base_model = str(given.policy.model.config._name_or_path or type(given.model).__name__)
    return ModelCard(
        base_model=base_model,
        tools=() if given.toolbox is None else given.toolbox.schemas,
        rewards=rewards,
        data=_described(given.train_dataset),
        is_adapter=hasattr(given.policy.model, "peft_config"),
        chat=given.chat.name,
    )


def cache_of(engine: Engine) -> CacheRoom | None:
    """Return the room in the cache of an engine that knows it."""
    return engine.cache if isinstance(engine, HasCache) else None


def open_pass(given: Parts, rows: Any, say: Callable[[str], None]) -> SharedPass:
    """Return the training pass that the config asks for; on a CPU, cut to what fits into memory."""
    args: ToolGRPOConfig = given.config
    policy, free = given.policy, free_bytes()
    if not policy.backend.splits_parameters:
        join_adapters(policy.model)
    shape = PassShape.of(policy.model, checkpointing=args.gradient_checkpointing)
    is_whole = policy.device.type == "cpu" and not policy.backend.splits_parameters
    sizes = PassSizes.of(given, rows) if is_whole else None
    if sizes is None or shape is None or free is None:
        return args.shared_pass()
    if shape.is_large(min(sizes.largest, args.max_tokens_per_pass or sizes.largest)):
        map_large_blocks()
    most = most_tokens(shape, **sizes._asdict(), free=free, given=args.max_tokens_per_pass, say=say)
    return SharedPass(mode=args.prefix_sharing, max_tokens=most)


class PassSizes(NamedTuple):
    """The most tokens of a training pass, those of one row, and whether prompts are shared."""

    largest: int
    of_a_row: int
    shares: bool

    @classmethod
    def of(cls, given: Parts, rows: Any) -> Self | None:
        """Return the sizes for these rows; None for those of a stream."""
        args, limits = given.config, given.config.episode_limits()
        sized = rows if hasattr(rows, "__len__") else ()
        window = given.prompts.window(sized, limits.max_completion_length, given.prompt_room)
        if window is None:
            return None
        whole = args.prefix_sharing == "off" or args.torch_compile or unsupported_model(given.policy.model) is not None
        n_rows, group = args.per_device_train_batch_size, args.num_generations
        n_prompts = n_rows if whole else -(-(n_rows + group - math.gcd(n_rows, group)) // group)
        prompt, completion = window.longest_prompt + window.room, window.max_completion_length
        return cls(n_prompts * prompt + n_rows * completion, prompt + completion, not whole)


def may_keep_activations(given: Parts, engine: str, rows: Any, say: Callable[[str], None]) -> bool:
    """Return whether a training pass of this process may keep all activations (`gradient_checkpointing: auto`).

    Not where the sizes are not known beforehand: agents, environments, compaction, shared-out weights, experts.
    """
    args, tools, policy = given.config, given.toolbox, given.policy
    config = policy.base_model.config
    grows = given.player or args.context or (isinstance(tools, Toolbox) and tools.has_environment)
    odd = getattr(config.get_text_config(), "num_experts_per_tok", None) or attention_name(config) == "eager"
    is_plain = policy.backend.kind in ("NO", "MULTI_CPU", "MULTI_GPU") and not (grows or odd)
    sizes, n_processes = PassSizes.of(given, rows) if is_plain else None, policy.backend.n_processes
    run, tokens = None, 0
    if sizes is not None:
        tokens = sizes.largest
        if args.prefix_sharing == "auto" and sizes.shares:
            unshared = args.per_device_train_batch_size * sizes.of_a_row
            tokens = min(unshared, most_in_a_pass(policy.device.type, tokens))
        if args.max_tokens_per_pass and sizes.shares and n_processes == 1:
            tokens = min(tokens, max(args.max_tokens_per_pass, sizes.of_a_row))
        asked: dict[str, Any] = {"dtype": policy.dtype, "engine": engine, "at_a_time": args.engine_options().max_rows}
        run = RunShape.of(policy.model, args, context=sizes.of_a_row, **asked)
    free, device = free_bytes(policy.device), Device.here(policy.device)
    return keeps_activations(run, device, tokens=tokens, free=free, n_processes=n_processes, say=say)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Observers of a training, beside those that the user brings."""

    progress: RunProgress
    recorder: EpisodeRecorder
    step_log: StepLog
    metrics: MetricsLog
    tables: RolloutTables
    doctor: DoctorWatch

    def callbacks(self, stop: TrainerCallback, checkpoints: TrainerCallback) -> tuple[TrainerCallback, ...]:
        """Return the callbacks of the training in their order: a stop saves, and a save logs; a log is
        shown before what is said of it.
        """
        return stop, checkpoints, self.step_log, self.tables, self.progress, self.doctor

    def observers(self, of_user: Sequence[Observer]) -> Observers:
        """Return the observers of its rollouts in their order."""
        lines = [RolloutLines(self.progress.say)] if self.progress.lines_only else []
        own = [self.step_log, self.metrics, self.recorder, self.tables, self.progress, RolloutLog(), *lines]
        return Observers([*own, *of_user])


def open_watchers(
    given: Parts,
    *,
    cache: CacheRoom | None,
    progress: RunProgress,
    callbacks: list[TrainerCallback],
    log: Callable[[Mapping[str, float]], None],
    model_name: str,
    process: int,
    is_main: bool,
) -> Watchers:
    """Return the watchers of one process; `log` takes the metrics of a rollout.

    The trackers among TRL's callbacks are guarded, so that none can stop a run.
    """
    args, tool_names = given.config, given.tool_names
    recording = episodes_path(Path(args.output_dir), process)
    guard_trackers(callbacks, args.report_to)
    recorder = EpisodeRecorder(recording, share=args.record_episodes, token_text=token_texts(given.tokenizer))
    step_log = StepLog(
        recording.with_name("steps.jsonl") if is_main else None,
        facts={"model": model_name, "tools": tool_names},
        recorded_bytes=lambda: recorder.n_bytes,
        say=progress.say,
        shows_warnings=progress.brings_own_log,
    )

    def log_unless_infrastructure_fails(metrics: Mapping[str, float]) -> None:
        log(metrics)
        stop_if_infrastructure_fails(metrics, args.max_infrastructure_failures)

    def record(finding: Finding) -> None:
        step = max(0, finding.step - 1)  # steps.jsonl counts those that were done before
        step_log.event("finding", finding.sentence, step=step, rule=finding.rule, section=finding.section)
        tables.alert(f"doctor: {finding.rule}", f"{finding.sentence} ({finding.link})")

    tables = RolloutTables(callbacks, with_tables=args.log_completions)
    return Watchers(
        progress=progress,
        recorder=recorder,
        step_log=step_log,
        metrics=MetricsLog(
            log_unless_infrastructure_fails,
            Known(tool_names, args.episode_limits(), cache),
            args.shaping(),
        ),
        tables=tables,
        doctor=DoctorWatch(progress.say, record=record),
    )


def loaded_lines(given: Parts, rows: Any, rewards: Mapping[str, Any]) -> list[str]:
    """Return a line for each part that a trainer in Python loads; a command says its own as it loads them."""
    model = given.policy.model
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    tools = signatures_text([] if given.toolbox is None else given.toolbox.schemas, indent=" " * 10) or "none"
    agent = None if given.player is None else getattr(given.player, "name", type(given.player).__name__)
    return [
        f"model     {name}, {n_parameters / 1e6:.3g} M parameters",
        *([f"data      {counted(len(rows), 'row')}"] if hasattr(rows, "__len__") else []),
        f"tools     {tools}" if agent is None else f"agent     {agent}",
        *(f"          {notice}" for notice in getattr(given.toolbox, "notices", ())),
        *(f"reward    {name}: {source_text(reward)}" for name, reward in rewards.items()),
    ]


def engine_lines(parts: Parts, built: BuiltEngine) -> list[str]:
    """Return what every trainer and command says of what it generates with."""
    cache = cache_of(built.engine)
    lines = (
        f"engine    {built.choice.name} ({built.choice.why}), {parts.chat.name} chat format",
        built.context and f"context   {built.context}",
        cache and f"cache     {cache}",
        precision_line(parts.policy.dtype, parts.policy.device),
        parts.markers_line(),
    )
    return [line for line in lines if line]


def _described(dataset: Any) -> str:
    """Return in a few words what somebody trains on."""
    columns = getattr(dataset, "column_names", None) or ()
    size = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else "rows without end"
    return f"{size} with {', '.join(columns)}" if columns else size
