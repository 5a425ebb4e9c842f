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

from transformers import AutoTokenizer, PreTrainedModel

from toolgrpo.chat import check_vocabulary, prove_rows, resolve_format, with_template_arguments
from toolgrpo.chat.base import ChatFormat
from toolgrpo.data.table import as_dataset
from toolgrpo.errors import ConfigError, ModelError
from toolgrpo.gateway.agents import PROMPT_ROOM, check_limits, load_agent
from toolgrpo.hub import settle_hub
from toolgrpo.models import folder_of, missing_folder
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
class GivenParts:
    """The parts of one trainer that are there before its model is loaded."""

    named_model: str | PreTrainedModel  # as the user says it
    model: str | PreTrainedModel  # as TRL loads it
    args: ToolGRPOConfig
    reward_funcs: Any
    train_dataset: Any
    eval_dataset: Any
    tokenizer: Any
    template: Any  # the tokenizer, with the arguments that the config has for its chat template
    chat: ChatFormat
    toolbox: ToolProvider | None
    closes_tools: bool  # False: they belong to whoever loaded them
    player: Player | None = None  # an agent, that plays the episodes

    @property
    def tool_names(self) -> list[str]:
        return [] if self.toolbox is None else list(self.toolbox.names)

    @property
    def prompt_room(self) -> int:
        """Return how many tokens an agent may add to a row's prompt."""
        return 0 if self.player is None else PROMPT_ROOM

    def check_model(self, vocabulary: int, rows: Iterable[Mapping[str, Any]] | None) -> None:
        """Raise unless tokenizer and chat format suit a loaded model and its rows."""
        check_vocabulary(self.tokenizer, vocabulary)
        prompts = (row["prompt"] for row in islice(rows or (), _MOST_ROWS_PROVEN))
        speak = any(users_speak(self.toolbox, data) for data in (rows, self.eval_dataset))
        prove_rows(self.chat, self.template, prompts, user_turns=speak)


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
    tokenizer = tokenizer or load_tokenizer(model, revision=_revision(args), trust_remote_code=args.trust_remote_code)
    template = with_template_arguments(tokenizer, args.chat_template_kwargs)
    chat = chat or resolve_format(template)
    toolbox = _as_toolbox(tools, args, factory)
    if toolbox is not None and toolbox is not tools:
        opened.callback(toolbox.close)
    player = _as_player(agent, toolbox, args)
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
        args=args.changed(report_to=installed_trackers(args.report_to), reward_weights=weights),
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


def _as_player(agent: str | Path | Player | None, tools: ToolProvider | None, args: ToolGRPOConfig) -> Player | None:
    if agent is None:
        return None
    if tools is not None:
        raise ConfigError(
            "an agent brings its own tools, so that those that are given would not be used; leave them out"
        )
    check_limits(args.episode_limits())
    if isinstance(agent, str | Path):
        return load_agent(agent, log_path=Path(args.output_dir) / "agent.log")
    return agent


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
    settle_hub(path)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        advice = "Give a folder that `save_pretrained` wrote, a hub id, or `nano` for the embedded model"
        missing = missing_folder(path)
        if missing is not None:
            raise ModelError(f"{missing}. {advice}.") from error
        raise ModelError(f"no tokenizer could be loaded from {path!r}: {str(error).rstrip('. ')}. {advice}.") from error
