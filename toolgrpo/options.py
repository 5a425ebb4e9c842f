"""The fields that `ToolGRPOConfig` adds to TRL's, by theme: frozen dataclasses, each field with its help
and what it may be.

Imports nothing heavy, so that help and early errors read it at once. A theme checks
its fields one by one; what two fields say together is checked in `trainer/config.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import typing
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar

from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import ESTIMATORS
from toolgrpo.support.plain_text import CHAT_URL

T = TypeVar("T")


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    allowed: Callable[[Any], bool] | None = None,
    wrong: str = "",
    theme: str = "",
    bare: Any = None,
) -> Any:
    """Return a field with its help. A value that is not `allowed` is refused in the words of `wrong`.

    `theme` is where its help stands, if not under the class's own; `bare` is the value of the flag alone.
    """
    metadata: dict[str, Any] = {"help": text}
    if theme:
        metadata["theme"] = theme
    if bare is not None:
        metadata["bare"] = bare
    if choices:
        metadata["choices"] = choices
    if allowed is not None:
        metadata |= {"allowed": allowed, "wrong": wrong}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


CHAT_ADDRESS: dict[str, Any] = {  # what an `option` that is the address of a chat endpoint is told of its values
    "allowed": lambda url: url is None or re.fullmatch(CHAT_URL, url),
    "wrong": "{name} must be an address such as https://HOST/v1, without a password, a query or a slash at its end; got {value}",
}


def at_least(least: int) -> dict[str, Any]:
    """Return what an `option` that is such a number, or None where that is its default, is told of its values."""
    return {
        "allowed": lambda number: number is None or number >= least,
        "wrong": f"{{name}} must be at least {least}, got {{value}}",
    }


def seconds(default: float | None, text: str, theme: str = "") -> Any:
    """Return a field that is a number of seconds, or None where its default is None."""
    return option(
        default,
        text,
        allowed=lambda value: value is None or 0 < value < math.inf,
        wrong="{name} must be a positive number of seconds, got {value}",
        theme=theme,
    )


def call_markers_option() -> Any:
    """Return the field that says how calls are marked, for episodes and for supervised training."""
    return option(
        "auto",
        "Form of <tool_call> and similar markers: tokens (the tokenizer's own), spelled (in ordinary tokens) or auto "
        "(spelled if the model was never trained on the special tokens).",
        choices=("auto", "tokens", "spelled"),
        theme="sampling",
    )


def prefix_sharing_option() -> Any:
    """Return the field that says whether a training pass reads what rows have in common once."""
    return option(
        "auto",
        "Compute prefixes that rows share once: auto (where it pays), on (or fail) or off (TRL's pass).",
        choices=("auto", "on", "off"),
    )


def max_tokens_per_pass_option() -> Any:
    """Return the field that bounds such a pass."""
    return option(
        None,
        "Maximum packed tokens per forward pass; default: as many as TRL's, or in GRPO on a CPU as many as fit into memory.",
        allowed=lambda number: number is None or number >= 1,
        wrong="{name} must be a positive number of tokens, got {value}",
    )


class Options:
    """A group of fields, which are checked one by one when it is made."""

    theme: ClassVar[str] = ""  # of the flags in help, where a field names none

    def __init_subclass__(cls, theme: str = "") -> None:
        cls.theme = theme

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]  # every theme is a dataclass
            value, choices = getattr(self, one.name), one.metadata.get("choices")
            if choices and value not in (*choices, one.default):
                raise ConfigError(f"{one.name} must be one of {', '.join(choices)}; got {value!r}")
            allowed = one.metadata.get("allowed")
            if allowed is not None and not allowed(value):
                raise ConfigError(one.metadata["wrong"].format(name=one.name, value=value))


class RecordedShare(float):
    """A share between 0 and 1; true means all and false none, as text too."""

    def __new__(cls, value: Any) -> Self:
        number = {"true": 1.0, "false": 0.0}.get(str(value).lower())
        if number is None:
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = -1.0
        if not 0 <= number <= 1:
            raise ArgumentTypeError(
                f"must be true or false, or the share of the groups that is recorded, as 0.1; got {value!r}"
            )
        return super().__new__(cls, number)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls._validated)

    @classmethod
    def _validated(cls, value: Any) -> Self:
        try:
            return cls(value)
        except ArgumentTypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions(Options, theme="episode"):
    """Options of an episode and its limits."""

    max_completion_length: int | None = option(
        1024, "Maximum tokens of an episode after its prompt: sampled tokens and tool results together."
    )
    max_turns: int | None = option(8, "Maximum assistant turns per episode.")
    max_user_turns: int | None = option(
        None, "Maximum user messages after the prompt, from a column `user_turns` or an environment."
    )
    max_tool_calls: int | None = option(None, "Maximum tool calls per episode; further calls get an error.")
    max_turn_tokens: int | None = option(None, "Maximum sampled tokens per turn.")
    max_tool_response_tokens: int | None = option(
        1024, "Maximum tokens per tool result; a longer one is cut in the middle, with a notice.", theme="tools"
    )
    episode_timeout: float | None = seconds(None, "Wall-clock seconds after which an episode ends.")
    max_concurrent_episodes: int | None = option(
        None, "Maximum episodes that run at once in one process; default: all.", **at_least(1)
    )
    enable_thinking: bool | None = option(
        None,
        "Value passed to chat templates that have this argument; a column `enable_thinking` overrides it.",
        theme="sampling",
    )
    call_markers: str = call_markers_option()
    unmarked_calls: str = option(
        "answer",
        "Treatment of a call without its markers (bare, in a code fence or in XML tags): answer (reply with the right "
        "form), accept (run it) or ignore (read it as the final answer).",
        choices=("answer", "accept", "ignore"),
        theme="sampling",
    )
    tool_timeout: float = seconds(30.0, "Seconds after which a tool call is abandoned.", theme="tools")
    reward_timeout: float | None = seconds(
        None, "Seconds that a reward may take for a batch; more is an error, never a reward.", theme="rewards"
    )
    context: dict[str, Any] | str | None = option(
        None,
        "Drop the tool results of all but the last turns once a turn would start beyond max_tokens, e.g. "
        '\'{"max_tokens": 4096, "keep_last_turns": 2}\'.',
    )
    long_prompts: str = option(
        "refuse",
        "Treatment of rows whose prompt fills the context window: refuse (name them and stop) or skip.",
        choices=("refuse", "skip"),
        theme="data",
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options, theme="engine"):
    """Options of the engine."""

    engine: str = option(
        "auto",
        "Inference engine (docs/how-to/engines.md).",
        choices=("auto", "vllm_colocate", "vllm_server", "transformers", "chat_api"),
    )
    engine_timeout: float = seconds(900.0, "Seconds that a vLLM server or a chat endpoint has to answer one request.")
    base_url: str | None = option(
        None,
        "Address of an OpenAI-compatible endpoint, up to /v1, which plays the episodes (engine chat_api).",
        **CHAT_ADDRESS,
    )
    vllm_server_urls: list[str] | None = option(None, "URLs of running `vllm serve` processes (engine vllm_server).")
    vllm_lora_sync: str = option(
        "merge",
        "How vLLM receives a LoRA policy: merge (whole weights with the adapter merged in) or adapter (the adapter alone).",
        choices=("merge", "adapter"),
    )
    vllm_kv_cache_gib: int = option(1, "Size of colocated vLLM's KV cache on the CPU, in GiB.", **at_least(1))
    vllm_enforce_eager: bool | None = option(
        None, "Run colocated vLLM without compilation; default: on the CPU only (starts 20 s sooner)."
    )


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Options, theme="drawing"):
    """Options of the choice of rows for a step. By default every row of TRL's sampler is trained on."""

    dynamic_sampling: str = option(
        "off",
        "backfill: replace a group whose rewards are all equal by a group of another prompt. off: train on the groups that "
        "the step began with.",
        choices=("off", "backfill"),
    )
    max_groups_drawn: float = option(
        4.0,
        "With backfill: limit on the groups drawn for a step, as a multiple of the groups it needs.",
        allowed=lambda times: times >= 1,
        wrong="{name} must be at least 1 times the groups of a step, got {value:g}",
    )


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(Options, theme="overlap"):
    """Options of the overlap of training and rollouts."""

    max_staleness: int = option(
        0,
        "Maximum lag of the sampling weights, in batches: rollouts run while this many earlier "
        "batches are trained on. 0: rollouts and training alternate.",
        **at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class LearningOptions(Options, theme="credit"):
    """Options of learning: from rewards to what the loss sees."""

    advantage: str = option(
        "grpo",
        "Advantage estimator (docs/background/dead_groups.md).",
        choices=tuple(ESTIMATORS),
    )
    stage_fn: list[str] | None = option(
        None,
        "Python files that export STAGES or stage: functions that change advantages and masks before the loss "
        "(docs/how-to/stages.md).",
    )
    rollout_correction: str = option(
        "auto",
        "Correction where engine and trainer disagree on log-probabilities: bypass (treat the engine's as the old "
        "policy's; PPO's clip bounds the ratio), geo_tis (keep episodes near the trainer's policy, weight their tokens "
        "by the truncated ratio), trl (TRL's own), off; auto: bypass if a batch gets one update, else geo_tis, or trl if "
        "its fields are set.",
        choices=("auto", "trl", "bypass", "geo_tis", "off"),
        theme="correction",
    )
    correction_band: list[float] = option(
        [0.999, 1.001],
        "With geo_tis: lower and upper bound on the geometric mean of an episode's ratios, for 1,000 tokens and more; for n "
        "fewer tokens the band is wider by the square root of 1,000 / n.",
        allowed=lambda band: len(band) == 2 and 0 < band[0] <= 1 <= band[1] < math.inf,
        wrong="{name} must be two numbers around 1, the lowest and the highest mean ratio that counts, such as 0.999 "
        "1.001; got {value}",
        theme="correction",
    )


@dataclass(frozen=True, kw_only=True)
class PassOptions(Options, theme="training"):
    """Options of the training pass."""

    prefix_sharing: str = prefix_sharing_option()
    max_tokens_per_pass: int | None = max_tokens_per_pass_option()
    gradient_checkpointing: bool | Literal["auto"] = option(
        True,
        "Recompute activations in the backward pass to save memory: true, false or auto (unless they clearly fit).",
        allowed=lambda value: value in (True, False, "auto"),
        wrong="{name} must be true, false or auto; got {value!r}",
    )
    skip_dead_rows: str = option(
        "auto",
        "Leave rows with zero advantage out of the training pass: auto (if nothing else needs them) or off. The gradient "
        "is the same.",
        choices=("auto", "off"),
        theme="drawing",
    )


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions(Options, theme="evaluation"):
    """Options of evaluations during a training (`eval_steps`)."""

    keep: str = option(
        "last",
        "Weights that a training ends with: last, or best (the evaluation with the highest held-out success).",
        choices=("last", "best"),
    )
    stop_when: str | None = option(
        None,
        "Stop after an evaluation: solved (held-out success is 1) or plateau:K (no rise for K evaluations).",
        allowed=lambda rule: rule is None or bool(re.fullmatch(r"solved|plateau:[1-9]\d*", rule)),
        wrong="{name} must be solved, or plateau:K with a number of evaluations such as plateau:3; got {value!r}",
    )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(Options, theme="watching"):
    """Options of display and recording."""

    success_threshold: float = option(1.0, "Minimum reward for an episode to count as a success.", theme="rewards")
    logging_steps: float = option(1, "Steps between two log entries.")
    quiet: bool = option(False, "Show errors only: no lines, no progress bar, no warnings.")
    max_dropped_share: float = option(
        0.25,
        "Maximum share of a batch's episodes that may be dropped; above it the run stops and names the causes.",
        allowed=lambda share: 0 <= share <= 1,
        wrong="{name} must be between 0 and 1, got {value}",
        theme="credit",
    )
    max_infrastructure_failures: float | None = option(
        0.5,
        "Maximum share of a rollout's episodes that may fail for infrastructure reasons (engine lost, tool timed out or "
        "died); above it the run stops.",
        allowed=lambda share: share is None or 0 < share <= 1,
        wrong="{name} must be a share above 0 and at most 1, or none; got {value}",
    )
    record_episodes: RecordedShare = option(
        RecordedShare(True),
        "Record trajectories in OUTPUT_DIR/episodes.jsonl (docs/reference/episodes.md): true, false, or a share of the "
        "groups such as 0.1.",
    )
    record_tokens: int = option(
        4,
        "Number of episodes per step whose tokens are recorded with log-probability, entropy and correction.",
        allowed=lambda number: number >= 0,
        wrong="{name} must be a number of episodes, 0 or more, got {value}",
    )


THEMES: tuple[type[Any], ...] = (
    EpisodeOptions,
    GenerationOptions,
    DrawingOptions,
    OverlapOptions,
    LearningOptions,
    PassOptions,
    HeldOutOptions,
    WatchOptions,
)


def batch_of_parts(group: int, at_once: int, batch: int) -> str:
    """Return what is said of a batch that its groups do not fill."""
    return (
        f"the {batch} episodes of a batch (per_device_train_batch_size x gradient_accumulation_steps x processes) "
        f"must be divisible by num_generations ({group}); try per_device_train_batch_size "
        f"{group * max(1, round(at_once / group))}"
    )


def with_fields_of(*themes: type[Any]) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a dataclass with the fields of these themes."""

    def decorated(kind: type[T]) -> type[T]:
        own = dict(vars(kind).get("__annotations__", {}))
        for theme in themes:
            hints = typing.get_type_hints(theme)
            for one in dataclasses.fields(theme):
                own[one.name] = hints[one.name]
                shown = {name: one.metadata[name] for name in ("help", "choices") if name in one.metadata}
                copied = field(default=one.default, default_factory=one.default_factory, metadata=shown)
                setattr(kind, one.name, copied)
        kind.__annotations__ = own
        return dataclass(kind)

    return decorated


class Changeable:
    """A config of TRL's with fields of ours, of which copies are made."""

    def changed(self, **changes: Any) -> Self:
        """Return a copy with these fields set; `dataclasses.replace` would derive TRL's anew, which TRL refuses."""
        known = {one.name for one in dataclasses.fields(self)}  # type: ignore[arg-type]  # every one is a dataclass
        if not changes.keys() <= known:
            raise ConfigError(f"{min(changes.keys() - known)} is not a field of {type(self).__name__}")
        config = copy.copy(self)
        for name, value in changes.items():
            setattr(config, name, value)
        return config


def options_of(config: Any, theme: type[T]) -> T:
    """Return one theme of a config; raise ConfigError for a field that cannot be."""
    return theme(**{one.name: getattr(config, one.name) for one in dataclasses.fields(theme)})  # type: ignore[arg-type]
