"""Resolve the trainer's constructor arguments: names, datasets, tokenizer, chat format, tools and
rewards, as TRL and the rollouts take them.

Nothing here knows a trainer, and nothing is loaded but the tokenizer and the tools. What is opened
is put on the stack of the caller, who closes it where the construction fails later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

from toolgrpo.build import Parts, load_tokenizer, open_player
from toolgrpo.chat import check_vocabulary, resolve_format, with_template_arguments
from toolgrpo.chat.base import ChatFormat
from toolgrpo.data.table import as_dataset
from toolgrpo.errors import ConfigError
from toolgrpo.models import folder_of
from toolgrpo.observe.trackers import installed_trackers
from toolgrpo.rewards import named_rewards
from toolgrpo.rollout import Player
from toolgrpo.rollout.user_turns import users_speak
from toolgrpo.tools import load_tools
from toolgrpo.tools.base import TOOL_TIMEOUT_S, ToolProvider
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.config import ToolGRPOConfig

_MOST_ROWS_PROVEN = 256  # whose system messages the chat format is proven for

Tools = str | Path | ModuleType | Sequence[Callable[..., Any]] | ToolProvider


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenParts(Parts):
    """The parts of one trainer that are there before its model is loaded."""

    config: ToolGRPOConfig
    named_model: str | PreTrainedModel  # as the user says it
    model: str | PreTrainedModel  # as TRL loads it
    reward_funcs: Any
    train_dataset: Any
    eval_dataset: Any

    def check_model(self, vocabulary: int, rows: Iterable[Mapping[str, Any]] | None) -> None:
        """Raise unless tokenizer and chat format suit a loaded model and its rows."""
        check_vocabulary(self.tokenizer, vocabulary)
        prompts = (row["prompt"] for row in islice(rows or (), _MOST_ROWS_PROVEN))
        self.prove_chat(prompts, (rows, self.eval_dataset))


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
) -> GivenParts:
    """Return what these arguments of a trainer stand for, or say what does not go together.

    `factory` makes the environments of a job that was written for TRL; `agent` is a file or a command.
    """
    args = args or ToolGRPOConfig("toolgrpo-output")
    named_model, model, reward_funcs = model, folder_of(model), named_rewards(reward_funcs)
    train_dataset = as_dataset(train_dataset, "train_dataset")
    eval_dataset = as_dataset(eval_dataset, "eval_dataset")
    trl_jobs.refuse_images(train_dataset)
    trl_jobs.refuse_images(eval_dataset)
    tokenizer = tokenizer or load_tokenizer(
        model, revision=_revision(args), trust_remote_code=args.trust_remote_code, call_markers=args.call_markers
    )
    template = with_template_arguments(tokenizer, args.chat_template_kwargs)
    chat = chat or resolve_format(template)
    toolbox = opened_toolbox(tools, args, factory)
    if toolbox is not None and toolbox is not tools:
        opened.callback(toolbox.close)
    player = open_player(agent, toolbox, args)
    if player is not None:
        opened.callback(player.close)
    speaks = toolbox is not None or player is not None or users_speak(None, train_dataset)
    if not speaks:
        trl_jobs.warn_of_text(train_dataset, reward_funcs)
    reward_funcs, weights = trl_jobs.with_environment(reward_funcs, args.reward_weights, factory)
    if train_dataset is None and factory is not None:
        n_rows = args.generation_batch_size // args.num_generations
        train_dataset = trl_jobs.placeholder_rows(n_rows, args.max_steps)
    return GivenParts(
        named_model=named_model,
        model=model,
        config=args.changed(report_to=installed_trackers(args.report_to), reward_weights=weights),
        reward_funcs=reward_funcs,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        tokenizer=tokenizer,
        template=template,
        chat=chat,
        toolbox=toolbox,
        closes_tools=toolbox is not tools,
        player=player,
    )


def opened_toolbox(
    tools: Tools | None, args: ToolGRPOConfig, factory: Callable[[], Any] | None = None
) -> ToolProvider | None:
    """Return the tools that a user gives, loaded where they are not."""
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
