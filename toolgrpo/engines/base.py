"""Engine: token ids in, token ids and log-probabilities out.

Requests join and leave at any time. An engine knows no tokenizer, chat format or tool. Every
`sample` call ends: with a `Sample`, with `EngineError`, or by cancellation (which drops the request
inside the engine too).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-turn token was sampled (it is the last of the ids)
    LENGTH = "length"  # max_tokens were sampled


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options for sampling a token; the same for all requests of a rollout. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    ids: tuple[int, ...] | list[int]  # everything so far; the engine must not change it
    max_tokens: int
    stop_ids: tuple[int, ...]
    options: SamplingOptions
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled tokens of a request.

    `logprobs` are those of the distribution drawn from, or None if the engine gives none.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    weights: tuple[int, int] | None = None  # the steps of the weights that it began and ended with


CHAT_API, KEY_VARIABLE = "chat_api", "TOOLGRPO_CHAT_KEY"
NO_TOKENS = (
    f"engine {CHAT_API} asks an endpoint for messages, and gets no token ids and no log-probabilities to train on; "
    f"`toolgrpo evaluate` and `toolgrpo check` play with it, and `toolgrpo sft --from_run` learns from its successes"
)
"""Said wherever a chat endpoint would have to be an engine."""

MORE_ROOM = (
    "--vllm_gpu_memory_utilization, 0.6 with --vllm_enable_sleep_mode true; on a CPU --vllm_kv_cache_gib; or bound "
    "--max_concurrent_episodes"
)
"""What gives the episodes more room in the cache."""


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """The tokens that an engine's cache holds, and what it is asked to hold."""

    tokens: int
    window: int  # tokens of the longest episode
    at_a_time: int  # episodes that may be open

    @property
    def demand(self) -> float:
        """Return how often the cache would be full if all of them were half as long as they may be."""
        return self.at_a_time * self.window / 2 / max(1, self.tokens)

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens, {self.tokens // self.window} full episodes of {self.window:,}; {self.at_a_time} "
            f"asked for"
        )


class Engine(Protocol):
    """One generation engine.

    `open` and `close` bracket a rollout; `shutdown` ends the engine for good.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt and completion) one sequence can have, honestly."""
        ...

    @property
    def gives_logprobs(self) -> bool: ...

    @property
    def same_numbers_as_trainer(self) -> bool:
        """Return whether its log-probabilities come from the trainer's own forward pass,
        so that none need be corrected.
        """
        ...

    @property
    def takes_weights_while_open(self) -> bool:
        """Return whether `load_weights` may come while requests are open, which then go on with the new weights."""
        ...

    async def open(self) -> None: ...

    async def sample(self, request: SampleRequest) -> Sample: ...

    async def close(self) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights, under their checkpoint names, and forget every cached prefix."""
        ...

    def shutdown(self) -> None: ...


@runtime_checkable
class HoldsCopy(Engine, Protocol):
    """An engine that computes by itself, with weights that it was given: is it the trainer's model?"""

    @property
    def restores(self) -> int:
        """Return how often it lost its weights and was given them back."""
        ...


@runtime_checkable
class HasCache(Protocol):
    """An engine whose cache has a size that is known when it has started."""

    @property
    def cache(self) -> CacheRoom | None: ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that may give its weights up between rollouts, and then has to be given them again."""

    @property
    def needs_weights(self) -> bool: ...


@runtime_checkable
class Resumable(Protocol):
    """An engine that draws with random numbers of its own: a checkpoint keeps them,
    so that a resumed run draws the same.

    The state is made of tensors, numbers, strings, lists and dicts.
    """

    def sampling_state(self) -> dict[str, Any]: ...

    def restore_sampling_state(self, state: dict[str, Any]) -> None: ...
