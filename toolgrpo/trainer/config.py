"""`ToolGRPOConfig`: TRL's `GRPOConfig` plus what an episode, an engine and the tools need. Validated at construction."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

import torch
from trl import GRPOConfig

from toolgrpo.chat.unmarked import POLICIES
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.errors import ConfigError
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.shared_pass.scoring import MODES, SharedPass

__all__ = ["ENGINES", "LORA_SYNCS", "ToolGRPOConfig"]

# Fields of TRL that steer its own generation, which does not run here, and what to use instead.
_WITHOUT_EFFECT = {
    "max_tool_calling_iterations": "use max_turns (a turn more than iterations: the last one answers)",
    "chat_template_kwargs": "use enable_thinking, the one template argument there is",
    "generation_kwargs": "use temperature, top_p, top_k, min_p and repetition_penalty",
    "cache_implementation": "leave it out",
    "vllm_structured_outputs_regex": "leave it out; malformed calls are answered with what is wrong",
    "use_transformers_continuous_batching": "leave it out; the transformers engine batches as it goes",
    "use_transformers_paged": "leave it out; the transformers engine batches as it goes",
}

ENGINES = ("auto", "vllm_colocate", "vllm_server", "transformers")
LORA_SYNCS = ("merge", "adapter")


@dataclass
class ToolGRPOConfig(GRPOConfig):  # type: ignore[misc]  # TRL ships no types
    """All of TRL's fields, and those below. `None` means no limit, where a limit is meant."""

    max_completion_length: int | None = field(
        default=1024,
        metadata={"help": "Most tokens of an episode after its prompt: sampled tokens and tool results together."},
    )

    # the episode
    max_turns: int | None = field(default=8, metadata={"help": "Most assistant turns of an episode."})
    max_tool_calls: int | None = field(
        default=None, metadata={"help": "Most tool calls of an episode; further ones are answered with an error."}
    )
    max_turn_tokens: int | None = field(default=None, metadata={"help": "Most sampled tokens of one turn."})
    max_tool_response_tokens: int | None = field(
        default=1024, metadata={"help": "A longer tool result is cut in the middle, and says so."}
    )
    episode_timeout: float | None = field(
        default=None, metadata={"help": "Wall-clock seconds after which an episode is ended as it is."}
    )
    max_concurrent_episodes: int | None = field(
        default=None, metadata={"help": "Most episodes that run at the same time in one process; default: all."}
    )
    enable_thinking: bool | None = field(
        default=None,
        metadata={"help": "Passed to chat templates that know it; a column `enable_thinking` decides for its row."},
    )
    unmarked_calls: str = field(
        default="answer",
        metadata={
            "help": "A call without its markers, bare or in a code fence: answer (say what the form is), accept (run it) "
            "or ignore (it is the final answer).",
            "choices": POLICIES,
        },
    )
    tool_timeout: float = field(default=30.0, metadata={"help": "Seconds after which a tool call is given up."})

    # the engine
    engine: str = field(
        default="auto",
        metadata={"help": "What generates: auto, vllm_colocate, vllm_server or transformers.", "choices": ENGINES},
    )
    engine_retries: int = field(
        default=3, metadata={"help": "How often a request that failed is tried again before its episode is lost."}
    )
    vllm_server_urls: list[str] | None = field(
        default=None, metadata={"help": "URLs of one or several running `vllm serve` (engine vllm_server)."}
    )
    vllm_lora_sync: str = field(
        default="merge",
        metadata={
            "help": "How vLLM gets a LoRA policy: merge (into the weights, which are sent whole) or adapter (alone).",
            "choices": LORA_SYNCS,
        },
    )
    vllm_kv_cache_gib: int = field(default=1, metadata={"help": "KV cache of colocated vLLM on the CPU, in GiB."})
    vllm_enforce_eager: bool | None = field(
        default=None, metadata={"help": "Do not compile in colocated vLLM; default: on the CPU (starts 20 s sooner)."}
    )

    # the training pass
    prefix_sharing: str = field(
        default="auto",
        metadata={
            "help": "Read a prompt once for all its completions: auto (where it pays), on (or fail), or off (TRL's pass).",
            "choices": MODES,
        },
    )
    max_tokens_per_pass: int | None = field(
        default=None,
        metadata={
            "help": "Most packed tokens of one forward pass of a prefix-shared batch; default: no more than TRL's."
        },
    )

    # what people see
    success_threshold: float = field(
        default=1.0, metadata={"help": "An episode counts as a success if its reward is at least this."}
    )
    record_episodes: bool = field(
        default=True, metadata={"help": "Write every trajectory to OUTPUT_DIR/episodes.jsonl."}
    )

    def __post_init__(self) -> None:
        if not torch.cuda.is_available():
            # TRL's default is bf16 mixed precision, which is slower than fp32 on most CPUs and never exact.
            self.bf16: bool | None = bool(self.bf16)
            self._use_gloo()
        self._check_fields_of_trl()
        super().__post_init__()
        if self.engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}; got {self.engine!r}")
        if self.vllm_server_urls and self.engine not in ("auto", "vllm_server"):
            raise ConfigError(
                f"vllm_server_urls is given, but engine is {self.engine!r}; use engine vllm_server (or auto)"
            )
        if self.vllm_lora_sync not in LORA_SYNCS:
            raise ConfigError(f"vllm_lora_sync must be one of {', '.join(LORA_SYNCS)}; got {self.vllm_lora_sync!r}")
        if self.unmarked_calls not in POLICIES:
            raise ConfigError(f"unmarked_calls must be one of {', '.join(POLICIES)}; got {self.unmarked_calls!r}")
        for name in ("tool_timeout", "episode_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
        if self.vllm_kv_cache_gib < 1:
            raise ConfigError(f"vllm_kv_cache_gib must be at least 1, got {self.vllm_kv_cache_gib}")
        if self.max_concurrent_episodes is not None and self.max_concurrent_episodes < 1:
            raise ConfigError(f"max_concurrent_episodes must be at least 1, got {self.max_concurrent_episodes}")
        self.shared_pass()
        if self.engine_retries < 0:
            raise ConfigError(f"engine_retries must be at least 0, got {self.engine_retries}")
        self.episode_limits()

    def _use_gloo(self) -> None:
        """Without a GPU, several processes talk over gloo; left alone, each of them would train for itself."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            self.ddp_backend: str | None = self.ddp_backend or "gloo"
        else:
            self.use_cpu: bool = True

    def _check_fields_of_trl(self) -> None:
        """What TRL and Transformers take without a word, or answer with a division by zero."""
        defaults = {known.name: known.default for known in fields(self)}
        for name, instead in _WITHOUT_EFFECT.items():
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{name} steers TRL's own generation and has no effect here; {instead}")
        for name, least in (
            *(("num_generations", 2), ("per_device_train_batch_size", 1), ("gradient_accumulation_steps", 1)),
            *(("temperature", 0), ("beta", 0), ("learning_rate", 0)),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                why = " (GRPO compares the episodes of a group)" if name == "num_generations" else ""
                raise ConfigError(f"{name} must be at least {least}{why}, got {value}")

    def episode_limits(self) -> EpisodeLimits:
        """The limits of an episode as one value."""
        if self.max_completion_length is None:
            raise ConfigError("max_completion_length must be a number of tokens; got None")
        return EpisodeLimits(
            max_completion_length=self.max_completion_length,
            max_turns=self.max_turns,
            max_tool_calls=self.max_tool_calls,
            max_turn_tokens=self.max_turn_tokens,
            max_tool_response_tokens=self.max_tool_response_tokens,
            deadline_s=self.episode_timeout,
        )

    def shared_pass(self) -> SharedPass:
        """The prefix-shared training pass these fields ask for."""
        return SharedPass(mode=self.prefix_sharing, max_tokens=self.max_tokens_per_pass)

    def sampling_options(self) -> SamplingOptions:
        """How tokens are drawn in training."""
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )
