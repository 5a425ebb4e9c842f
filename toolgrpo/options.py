"""The fields that `ToolGRPOConfig` adds to TRL's, by theme: frozen dataclasses, each field with its help
and what it may be.

Imports nothing heavy, so that help and early errors read it at once. A theme checks
its fields one by one; what two fields say together is checked in `trainer/config.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import ESTIMATORS

T = TypeVar("T")


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    allowed: Callable[[Any], bool] | None = None,
    wrong: str = "",
) -> Any:
    """Return a field with its help. A value that is not `allowed` is refused in the words of `wrong`."""
    metadata: dict[str, Any] = {"help": text}
    if choices:
        metadata["choices"] = choices
    if allowed is not None:
        metadata |= {"allowed": allowed, "wrong": wrong}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(least: int) -> dict[str, Any]:
    """Return what an `option` that is such a number, or None where that is its default, is told of its values."""
    return {
        "allowed": lambda number: number is None or number >= least,
        "wrong": f"{{name}} must be at least {least}, got {{value}}",
    }


def seconds(default: float | None, text: str) -> Any:
    """Return a field that is a number of seconds, or None where its default is None."""
    return option(
        default,
        text,
        allowed=lambda value: value is None or 0 < value < math.inf,
        wrong="{name} must be a positive number of seconds, got {value}",
    )


def call_markers_option() -> Any:
    """Return the field that says how calls are marked, for episodes and for supervised training."""
    return option(
        "auto",
        "<tool_call> and its like: tokens (as the tokenizer has them), spelled (in ordinary pieces) or auto (spelled where "
        "the model was never trained on the tokens).",
        choices=("auto", "tokens", "spelled"),
    )


def prefix_sharing_option() -> Any:
    """Return the field that says whether a training pass reads what rows have in common once."""
    return option(
        "auto",
        "Read what rows have in common once: auto (where it pays), on (or fail), or off (TRL's pass).",
        choices=("auto", "on", "off"),
    )


def max_tokens_per_pass_option() -> Any:
    """Return the field that bounds such a pass."""
    return option(
        None,
        "Most packed tokens of one forward pass; default: no more than TRL's, and in GRPO on a CPU what fits into memory.",
        allowed=lambda number: number is None or number >= 1,
        wrong="{name} must be a positive number of tokens, got {value}",
    )


class Options:
    """A theme: its fields are checked one by one when it is made."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]  # every theme is a dataclass
            value, choices = getattr(self, one.name), one.metadata.get("choices")
            if choices and value not in choices:
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
class EpisodeOptions(Options):
    """Options of an episode and its limits."""

    max_completion_length: int | None = option(
        1024, "Most tokens of an episode after its prompt: sampled tokens and tool results together."
    )
    max_turns: int | None = option(8, "Most assistant turns of an episode.")
    max_user_turns: int | None = option(
        None, "Most messages of the user after the prompt, of a column `user_turns` or an environment."
    )
    max_tool_calls: int | None = option(None, "Most tool calls of an episode; further ones are answered with an error.")
    max_turn_tokens: int | None = option(None, "Most sampled tokens of one turn.")
    max_tool_response_tokens: int | None = option(1024, "A longer tool result is cut in the middle, and says so.")
    episode_timeout: float | None = seconds(None, "Wall-clock seconds after which an episode is ended as it is.")
    max_concurrent_episodes: int | None = option(
        None, "Most episodes that run at the same time in one process; default: all.", **at_least(1)
    )
    enable_thinking: bool | None = option(
        None, "Passed to chat templates that know it; a column `enable_thinking` decides for its row."
    )
    call_markers: str = call_markers_option()
    unmarked_calls: str = option(
        "answer",
        "A call without its markers, bare, in a code fence or in XML tags: answer (say what the form is), accept (run it) or ignore "
        "(it is the final answer).",
        choices=("answer", "accept", "ignore"),
    )
    tool_timeout: float = seconds(30.0, "Seconds after which a tool call is given up.")
    reward_timeout: float | None = seconds(
        None, "Seconds a reward may take over a batch; more is an error, never a score."
    )
    context: dict[str, Any] | str | None = option(
        None,
        "Drop the tool results of all but the last turns if a turn would begin behind max_tokens, e.g. "
        '\'{"max_tokens": 4096, "keep_last_turns": 2}\'.',
    )
    long_prompts: str = option(
        "refuse",
        "Rows whose prompt fills the context window: refuse (say which they are), or skip them.",
        choices=("refuse", "skip"),
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options):
    """Options of the engine."""

    engine: str = option(
        "auto",
        "Inference engine (docs/how-to/engines.md).",
        choices=("auto", "vllm_colocate", "vllm_server", "transformers"),
    )
    engine_timeout: float = seconds(
        900.0, "Seconds a vLLM server has to answer one request; longer than any should take."
    )
    vllm_server_urls: list[str] | None = option(
        None, "URLs of one or several running `vllm serve` (engine vllm_server)."
    )
    vllm_lora_sync: str = option(
        "merge",
        "How vLLM gets a LoRA policy: merge (into the weights, which are sent whole) or adapter (alone).",
        choices=("merge", "adapter"),
    )
    vllm_kv_cache_gib: int = option(1, "KV cache of colocated vLLM on the CPU, in GiB.", **at_least(1))
    vllm_enforce_eager: bool | None = option(
        None, "Do not compile in colocated vLLM; default: on the CPU (starts 20 s sooner)."
    )


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Options):
    """Options of the choice of rows for a step. By default those of TRL's sampler, each trained on."""

    dynamic_sampling: str = option(
        "off",
        "backfill: as soon as all rewards of a group are alike, draw another prompt in its place. off: train on what the "
        "step began with.",
        choices=("off", "backfill"),
    )
    max_groups_drawn: float = option(
        4.0,
        "With backfill: draw at most so many times the groups of a step, then train on what is there.",
        allowed=lambda times: times >= 1,
        wrong="{name} must be at least 1 times the groups of a step, got {value:g}",
    )


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(Options):
    """Options of the overlap of training and rollouts."""

    max_staleness: int = option(
        0,
        "How many steps the weights may be behind that a batch began to be drawn from: its rollouts run while so many "
        "earlier batches are trained on. 0: one after the other.",
        **at_least(0),
    )
    carry_over: float = option(
        0.0,
        "So large a share of the groups of a step may be left over to the next one, where they go on: the step begins "
        "when the others are complete. 0: it waits for all.",
        allowed=lambda share: 0 <= share < 1,
        wrong="{name} must be from 0 to below 1, a share of the groups of a step, got {value:g}; to have a whole step more "
        "in flight, raise max_staleness",
    )


@dataclass(frozen=True, kw_only=True)
class LearningOptions(Options):
    """Options of learning: from rewards to what the loss sees."""

    advantage: str = option(
        "grpo",
        "Estimator, from rewards to advantages (docs/background/dead_groups.md).",
        choices=tuple(ESTIMATORS),
    )
    penalty: dict[str, float] | str | None = option(
        None,
        "Weights of what is taken off for output_tokens, context_tokens, turns and calls, each beside the group's largest "
        "and times its mean reward, e.g. '{\"turns\": 0.1}'.",
    )
    overlong: dict[str, float] | str | None = option(
        None,
        'What is taken off in the last tokens before max_completion_length, e.g. \'{"buffer": 256, "penalty": 1.0}\'.',
    )
    void_turns: str = option(
        "keep",
        "Episodes with a turn that has neither a call nor a final answer: keep, or mask_episode (not trained on).",
        choices=("keep", "mask_episode"),
    )
    max_dropped_share: float = option(
        0.25,
        "Largest share of a batch whose episodes cannot be scored; more end the run with the causes.",
        allowed=lambda share: 0 <= share <= 1,
        wrong="{name} must be between 0 and 1, got {value}",
    )
    credit: str = option(
        "episode",
        "The advantage of a turn: episode (that of its episode) or turns (from the rewards by turn of turn_reward or "
        "turn_reward_fn).",
        choices=("episode", "turns"),
    )
    turn_reward: list[str] | None = option(None, "Built-in rewards by turn, with credit turns: gold_call, environment.")
    turn_reward_fn: list[str] | None = option(None, "Python files that export turn_reward_func.")
    turn_reward_weights: list[float] | None = option(
        None,
        "Weights of the turn rewards beside the episode's reward, in this order; default: 1 each.",
        allowed=lambda weights: all(map(math.isfinite, weights or ())),
        wrong="{name} must be finite, got {value}",
    )
    rollout_correction: str = option(
        "auto",
        "Tokens that the engine drew with other log-probabilities than the trainer's: bypass (the engine's are the old "
        "policy's, and PPO's clip holds the ratio), geo_tis (episodes near the trainer's policy count, their tokens by "
        "the truncated ratio), trl (TRL's own), off; auto: bypass where a batch gets one update, else geo_tis, and trl "
        "where its fields are set.",
        choices=("auto", "trl", "bypass", "geo_tis", "off"),
    )
    correction_band: list[float] = option(
        [0.999, 1.001],
        "With geo_tis: the band for the geometric mean of an episode's ratios, from 1,000 tokens on; of n tokens fewer it "
        "is wider by the square root of 1,000 over n.",
        allowed=lambda band: len(band) == 2 and 0 < band[0] <= 1 <= band[1] < math.inf,
        wrong="{name} must be two numbers around 1, the lowest and the highest mean ratio that counts, such as 0.999 "
        "1.001; got {value}",
    )


@dataclass(frozen=True, kw_only=True)
class PassOptions(Options):
    """Options of the training pass."""

    prefix_sharing: str = prefix_sharing_option()
    max_tokens_per_pass: int | None = max_tokens_per_pass_option()
    skip_dead_rows: str = option(
        "auto",
        "Leave rows without any advantage out of the training pass: auto (where nothing else needs them) or off. The "
        "gradient is the same.",
        choices=("auto", "off"),
    )


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions(Options):
    """Options of evaluations during a training (`eval_steps`)."""

    keep: str = option(
        "last",
        "Which weights a training ends with: last, or best (of its evaluations, by held-out success).",
        choices=("last", "best"),
    )
    stop_when: str | None = option(
        None,
        "End after an evaluation: solved (held-out success is 1) or plateau:K (it has not risen for K evaluations).",
        allowed=lambda rule: rule is None or bool(re.fullmatch(r"solved|plateau:[1-9]\d*", rule)),
        wrong="{name} must be solved, or plateau:K with a number of evaluations such as plateau:3; got {value!r}",
    )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(Options):
    """Options of display and recording."""

    success_threshold: float = option(1.0, "An episode counts as a success if its reward is at least this.")
    logging_steps: float = option(1, "Steps between two logs.")
    quiet: bool = option(False, "Show nothing but errors: no lines, no bar, no warnings.")
    max_infrastructure_failures: float | None = option(
        0.5,
        "Share of a rollout's episodes that infrastructure may fail (engine lost, tool timed out or died) before the run stops.",
        allowed=lambda share: share is None or 0 < share <= 1,
        wrong="{name} must be a share above 0 and at most 1, or none; got {value}",
    )
    record_episodes: RecordedShare = option(
        RecordedShare(True),
        "Write every trajectory to OUTPUT_DIR/episodes.jsonl (docs/reference/episodes.md): true, false, or a share of the groups, as "
        "0.1.",
    )
    record_tokens: int = option(
        4,
        "Of so many episodes of each step write what training saw of each token: log-probability, entropy, correction.",
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
                shown = {
                    name: one.metadata[name] for name in ("help", "choices") if name in one.metadata
                }  # as argparse
                copied = field(default=one.default, default_factory=one.default_factory, metadata=shown)
                setattr(kind, one.name, copied)
        kind.__annotations__ = own
        return dataclass(kind)

    return decorated


def options_of(config: Any, theme: type[T]) -> T:
    """Return one theme of a config; raise ConfigError for a field that cannot be."""
    return theme(**{one.name: getattr(config, one.name) for one in dataclasses.fields(theme)})  # type: ignore[arg-type]
