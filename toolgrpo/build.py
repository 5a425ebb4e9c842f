"""Put tokenizer, chat format, tools, agent, engine and limits together: the trainer, `train`, `check`,
`evaluate`, `replay` and `gateway` build with it, so each renders and runs episodes as the others do.

    parts = put_together(config, tokenizer, toolbox=toolbox)
    built = parts.engine(policy, parts.demand(policy, rows))
    rollouts = parts.rollouts(built.engine)

`config` is a `ToolGRPOConfig`. Nothing is loaded here but a tokenizer, an engine and an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import AutoTokenizer

from toolgrpo.chat import check_vocabulary, prove_rows, resolve_format, with_template_arguments
from toolgrpo.chat.base import ChatFormat
from toolgrpo.chat.encoding import marker_tokens, spelled_markers, with_spelled
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.engines.base import Engine
from toolgrpo.engines.build import BuiltEngine, build_engine
from toolgrpo.engines.policy import Policy
from toolgrpo.errors import ConfigError, ModelError, ToolGRPOError
from toolgrpo.models import missing_folder
from toolgrpo.models.untrained_markers import (
    output_rows,
    output_rows_in,
    untrained_line,
    untrained_rows,
    weight_files,
)
from toolgrpo.rollout import Player, Rollouts
from toolgrpo.rollout.demand import PROMPT_ROOM, Demand, Prompts, rows_that_fit, suit
from toolgrpo.rollout.observers import Observers
from toolgrpo.rollout.row_parts import users_speak
from toolgrpo.support.offline import settle_hub
from toolgrpo.tools.base import ToolProvider

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of which rollouts are made, before there is an engine."""

    config: Any
    tokenizer: Any
    template: Any  # the tokenizer, with the arguments that the config has for its chat template
    chat: ChatFormat
    toolbox: ToolProvider | None = None
    closes_tools: bool = True  # False: they belong to whoever loaded them
    player: Player | None = None  # an agent, that plays the episodes

    @property
    def tool_names(self) -> list[str]:
        return [] if self.toolbox is None else list(self.toolbox.names)

    @property
    def prompts(self) -> Prompts:
        return Prompts(chat=self.chat, tools=self.toolbox, enable_thinking=self.config.enable_thinking)

    @property
    def prompt_room(self) -> int:
        """Return how many tokens an agent may add to a row's prompt."""
        return 0 if self.player is None else PROMPT_ROOM

    def prove_chat(self, prompts: Iterable[Any], datasets: Iterable[Any]) -> None:
        """Raise unless the chat format holds for these prompts, and for the users of these datasets."""
        speak = any(users_speak(self.toolbox, data) for data in datasets)
        prove_rows(self.chat, self.template, prompts, user_turns=speak)

    def demand(
        self, policy: Policy, datasets: Iterable[Any], heldout: Sequence[Mapping[str, Any]] = (), *, samples: int = 1
    ) -> Demand:
        """Return the options of the engines, suited to all the rows that one will be asked about."""
        flat = chain.from_iterable(data.values() if isinstance(data, Mapping) else [data] for data in datasets)
        return suit(
            self.config.engine_options(),
            policy,
            chain.from_iterable(rows for rows in flat if hasattr(rows, "__len__")),
            heldout,
            prompts=self.prompts,
            max_completion_length=self.config.episode_limits().max_completion_length,
            samples=samples,
            max_concurrent=self.config.max_concurrent_episodes,
            room=self.prompt_room,
        )

    def engine(self, policy: Policy, demand: Demand | None = None) -> BuiltEngine:
        """Build the engine; what a library says against the settings is shown as the user's mistake."""
        options = self.config.engine_options() if demand is None else demand.options
        try:
            return build_engine(policy, options)._replace(context=None if demand is None else demand.line)
        except ToolGRPOError:
            raise
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"the engine cannot be started with these settings: {error}") from error

    def markers_line(self, head: Callable[[], torch.Tensor | None]) -> str | None:
        """Return the line about markers that are spelled, or that the model was never trained on, if there are any;
        `head` reads its output rows.
        """
        return markers_line(self.tokenizer, self.chat, head, unmarked_calls=self.config.unmarked_calls)

    def fitting(self, engine: Engine, say: Callable[[str], None]) -> Callable[..., Any]:
        """Return what leaves the rows, of a `name`, whose prompts fit into the engine's window."""
        context = self.config.episode_limits().context
        tokens = engine.max_model_len if context is None else min(engine.max_model_len, context.max_tokens + 1)
        return partial(rows_that_fit, prompts=self.prompts, tokens=tokens, policy=self.config.long_prompts, say=say)

    def rollouts(
        self, engine: Engine, observers: Observers | None = None, *, vocabulary: int | None = None
    ) -> Rollouts:
        config = self.config
        return Rollouts(
            engine=engine,
            chat=self.chat,
            limits=config.episode_limits(),
            tokenizer=self.tokenizer,
            tools=self.toolbox,
            closes_tools=self.closes_tools,
            observers=observers or Observers(),
            vocabulary=vocabulary,
            unmarked_calls=config.unmarked_calls,
            max_concurrent=config.max_concurrent_episodes,
            enable_thinking=config.enable_thinking,
            player=self.player,
        )


def put_together(
    config: Any,
    tokenizer: Any,
    *,
    vocabulary: int,
    toolbox: ToolProvider | None = None,
    player: Player | None = None,
) -> Parts:
    """Return the parts of a model that is loaded, with its tokenizer."""
    template = with_template_arguments(tokenizer, config.chat_template_kwargs)
    chat = resolve_format(template)
    check_vocabulary(tokenizer, vocabulary)
    return Parts(config=config, tokenizer=tokenizer, template=template, chat=chat, toolbox=toolbox, player=player)


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


def load_tokenizer(
    model: str | PreTrainedModel,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    call_markers: str = "auto",  # one of `options.EpisodeOptions`
) -> Any:
    """Return the tokenizer that lies beside the model, in the same revision, with its markers spelled if need be."""
    path = model if isinstance(model, str) else model.config._name_or_path
    if not path:
        raise ModelError("the model was not loaded from a path, so its tokenizer is unknown; pass `processing_class`")
    settle_hub(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        advice = "Give a folder that `save_pretrained` wrote, a hub id, or `nano` for the embedded model"
        missing = missing_folder(path)
        if missing is not None:
            raise ModelError(f"{missing}. {advice}.") from error
        raise ModelError(f"no tokenizer could be loaded from {path!r}: {str(error).rstrip('. ')}. {advice}.") from error
    markers = {} if call_markers == "tokens" else marker_tokens(tokenizer)
    ids = [] if call_markers == "auto" else list(markers.values())
    if markers and call_markers == "auto":
        with suppress(OSError, ValueError, SafetensorError):  # loading the model says what is wrong with its weights
            rows = output_rows_in(weight_files(path, revision)) if isinstance(model, str) else output_rows(model)
            ids = [] if rows is None else untrained_rows(rows, markers.values(), len(tokenizer))
    return with_spelled(tokenizer, ids) if ids else tokenizer


def markers_line(
    tokenizer: Any, chat: ChatFormat, head: Callable[[], torch.Tensor | None], *, unmarked_calls: str
) -> str | None:
    """Return the start line about markers that are spelled, or that the model was never trained on, if there are any."""
    spelled = spelled_markers(tokenizer)
    markers = spelled or (chat.marker_ids if isinstance(chat, TemplateFormat) else {})
    return untrained_line(head, markers, len(tokenizer), spelled=bool(spelled), unmarked_calls=unmarked_calls)
