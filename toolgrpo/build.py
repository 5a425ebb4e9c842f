"""`Parts`: tokenizer, chat format, tools, agent, model and limits, put together. The trainer, `train`, `check`, `evaluate`,
`replay` and `gateway` build with it, so each renders and runs episodes as the others do.

    parts = Parts.of(config, tokenizer, toolbox=toolbox).with_model(policy)
    built = parts.open_engine(datasets)
    rollouts = parts.rollouts(built.engine)

`config` is a `ToolGRPOConfig`. Nothing is loaded here but a tokenizer and an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

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
from toolgrpo.models.untrained_markers import output_rows, output_rows_in, untrained_line, untrained_rows, weight_files
from toolgrpo.rollout import Player, Rollouts
from toolgrpo.rollout.demand import PROMPT_ROOM, Prompts, rows_that_fit, suit
from toolgrpo.rollout.observers import Observers
from toolgrpo.rollout.row_parts import users_speak
from toolgrpo.support.offline import settle_hub
from toolgrpo.tools.base import ToolProvider

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of which rollouts are made, before there is an engine; a trainer's have rewards and data sets too."""

    config: Any
    tokenizer: Any
    template: Any  # the tokenizer, with the arguments that the config has for its chat template
    chat: ChatFormat
    toolbox: ToolProvider | None = None
    closes_tools: bool = True  # False: they belong to whoever loaded them
    player: Player | None = None  # an agent, that plays the episodes
    named_model: str | PreTrainedModel = ""  # as the user says it
    model: str | PreTrainedModel = ""  # as it is loaded
    loaded: Policy | None = None  # the same, once it is
    reward_funcs: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None

    @classmethod
    def of(cls, config: Any, tokenizer: Any, chat: ChatFormat | None = None, **others: Any) -> Self:
        """Return the parts around a tokenizer; without a `chat` format, the one of its template."""
        template = with_template_arguments(tokenizer, config.chat_template_kwargs)
        chat = chat or resolve_format(template)
        return cls(config=config, tokenizer=tokenizer, template=template, chat=chat, **others)

    def with_model(self, policy: Policy) -> Self:
        """Return the parts with a model that is loaded; raise unless the tokenizer suits it."""
        parts = replace(self, loaded=policy)
        check_vocabulary(self.tokenizer, parts.vocabulary)
        return parts

    @property
    def policy(self) -> Policy:
        assert self.loaded is not None
        return self.loaded

    @property
    def vocabulary(self) -> int:
        return int(self.policy.base_model.config.get_text_config().vocab_size)

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

    def open_engine(
        self, datasets: Iterable[Any] = (), heldout: Sequence[Mapping[str, Any]] = (), *, samples: int = 1
    ) -> BuiltEngine:
        """Build the engine, suited to all rows that it will be asked about; what a library says against the settings
        is shown as the user's mistake.
        """
        flat = chain.from_iterable(data.values() if isinstance(data, Mapping) else [data] for data in datasets)
        demand = suit(
            self.config.engine_options(),
            self.policy,
            chain.from_iterable(rows for rows in flat if hasattr(rows, "__len__")),
            heldout,
            prompts=self.prompts,
            max_completion_length=self.config.episode_limits().max_completion_length,
            samples=samples,
            max_concurrent=self.config.max_concurrent_episodes,
            room=self.prompt_room,
        )
        try:
            return build_engine(self.policy, demand.options)._replace(context=demand.line)
        except ToolGRPOError:
            raise
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"the engine cannot be started with these settings: {error}") from error

    def markers_line(self) -> str | None:
        """Return the line about markers that are spelled, or that the model was never trained on, if there are any."""
        return markers_line(self.tokenizer, self.chat, self._head, unmarked_calls=self.config.unmarked_calls)

    def _head(self) -> torch.Tensor | None:
        """Read the rows of the output head: of the model's files where it was not loaded whole."""
        model = self.policy.base_model
        if isinstance(self.model, str) and model.device.type == "meta":
            return output_rows_in(weight_files(self.model, self.config.revision))
        return output_rows(model)

    def fitting(self, engine: Engine, say: Callable[[str], None]) -> Callable[..., Any]:
        """Return what leaves the rows, of a `name`, whose prompts fit into the engine's window."""
        context = self.config.episode_limits().context
        tokens = engine.max_model_len if context is None else min(engine.max_model_len, context.max_tokens + 1)
        return partial(rows_that_fit, prompts=self.prompts, tokens=tokens, policy=self.config.long_prompts, say=say)

    def rollouts(self, engine: Engine, observers: Observers | None = None) -> Rollouts:
        config = self.config
        return Rollouts(
            engine=engine,
            chat=self.chat,
            limits=config.episode_limits(),
            tokenizer=self.tokenizer,
            tools=self.toolbox,
            closes_tools=self.closes_tools,
            observers=observers or Observers(),
            vocabulary=self.vocabulary,
            unmarked_calls=config.unmarked_calls,
            max_concurrent=config.max_concurrent_episodes,
            enable_thinking=config.enable_thinking,
            player=self.player,
        )


def endpoint_rollouts(
    config: Any, model: str, *, toolbox: ToolProvider | None, say: Callable[[str], None], observers: Observers
) -> Rollouts:
    """Return the rollouts of a model behind a chat endpoint (`--base_url`), which is asked once first, and says so."""
    from toolgrpo.rollout.chat_api import AT_ONCE, ChatAPI, ChatPlayer, CountedText  # most runs ask no endpoint

    limits = config.episode_limits()
    if limits.context is not None:
        raise ConfigError("context drops tool results by our own tokens, and engine chat_api has none; leave it out")
    text = CountedText()
    arguments = config.chat_template_kwargs or {}
    api = ChatAPI(config.base_url, model, config.engine_timeout, template_arguments=arguments)
    say(f"engine    {api.look([] if toolbox is None else toolbox.schemas, config.sampling_options())}")
    return Rollouts(
        engine=api,
        chat=text,
        limits=limits,
        tokenizer=text,
        tools=toolbox,
        closes_tools=False,
        observers=observers,
        unmarked_calls=config.unmarked_calls,
        max_concurrent=config.max_concurrent_episodes or AT_ONCE,
        enable_thinking=config.enable_thinking,
        player=ChatPlayer(api),
    )


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
