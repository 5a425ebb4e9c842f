"""Arguments of a trainer resolved, and the lines about it at the start. Its constructor calls this; the commands call the
doors for an agent and for rows, and the lines about the engine.

`take_parts` resolves names, datasets, tokenizer, chat format, tools and rewards into `Parts` (`toolgrpo/build.py`, which
makes the rollouts of them); nothing is loaded then but the tokenizer and the tools.

Values in, parts out: nothing here knows the trainer. What is opened is put on the stack of the caller, who closes it where
the construction fails later.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from toolgrpo.build import Parts, load_tokenizer
from toolgrpo.chat.base import ChatFormat
from toolgrpo.data.rows import rows_and_reasons
from toolgrpo.data.table import as_dataset, check_prompts
from toolgrpo.engines.base import CacheRoom, Engine, HasCache
from toolgrpo.engines.build import BuiltEngine
from toolgrpo.errors import ConfigError, DataError, ModelError
from toolgrpo.models import folder_of, is_adapter
from toolgrpo.observe.trackers import installed_trackers
from toolgrpo.rewards import Reward, named_rewards, refused_rows
from toolgrpo.rewards.base import source_text
from toolgrpo.rollout import Player
from toolgrpo.rollout.row_parts import OFFERED, TOOL_COLUMNS, rows_without_their_tools, users_speak
from toolgrpo.support.plain_text import counted
from toolgrpo.tools import open_tools
from toolgrpo.tools.arguments import signatures_text
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.hardware import precision_line
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
            f"{model} is a LoRA adapter, but training begins with whole weights: run toolgrpo export {shlex.quote(model)} "
            f"--merge {shlex.quote(f'{model}-merged')}, then give that folder"
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
            check_prompts(rows, name)
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
        raise ConfigError("an agent brings its own tools, so the given tools would not be used; leave them out")
    from toolgrpo.gateway.agents import check_limits, load_agent  # most runs have no agent, and need nothing of it

    check_limits(config.episode_limits())
    if isinstance(agent, str | Path):
        return load_agent(agent, host=host, log_path=Path(config.output_dir) / "agent.log")
    return agent


def check_rows_of_a_step(rows: Any, config: ToolGRPOConfig, name: str) -> None:
    """Raise `DataError` where a step could not be filled: TRL's loop would end without one. A stream may have any number."""
    group, batch = config.num_generations, config.generation_batch_size
    if hasattr(rows, "__len__") and len(rows) < batch // group:
        raise DataError(
            f"{name} has {counted(len(rows), 'row')}, but one step needs {batch // group} different prompts (a generation "
            f"batch of {batch} episodes in groups of {group}). Give more rows, a smaller --per_device_train_batch_size or "
            f"--gradient_accumulation_steps, or larger groups."
        )


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

        text = f"{name}: {len(refused)} of {counted(len(rows), 'row')} do not fit {who}: "
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
    thinking = given.config.enable_thinking
    return ModelCard(
        base_model=base_model,
        tools=() if given.toolbox is None else given.toolbox.schemas,
        rewards=rewards,
        data=_described(given.train_dataset),
        is_adapter=hasattr(given.policy.model, "peft_config"),
        chat=given.chat.name,
        template_arguments={
            **(given.config.chat_template_kwargs or {}),
            **({} if thinking is None else {"enable_thinking": thinking}),
        },
    )


def cache_of(engine: Engine) -> CacheRoom | None:
    """Return the room in the cache of an engine that knows it."""
    return engine.cache if isinstance(engine, HasCache) else None


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
