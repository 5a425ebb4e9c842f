"""`ToolGRPOConfig`: TRL's `GRPOConfig` plus what an episode, an engine and the tools need.

Validated at construction.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from trl import GRPOConfig

from toolgrpo.chat.unmarked import POLICIES
from toolgrpo.credit.options import CreditOptions
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.engines.build import ENGINES, EngineOptions
from toolgrpo.engines.transformers import TransformersOptions
from toolgrpo.engines.vllm_colocate import ColocateOptions
from toolgrpo.engines.vllm_options import VLLMOptions
from toolgrpo.engines.vllm_server import ServerOptions
from toolgrpo.errors import ConfigError
from toolgrpo.observe.options import RecordingOptions, WatchOptions
from toolgrpo.rollout.compaction import ContextOptions
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.shared_pass.scoring import MODES, SharedPass
from toolgrpo.signal.admission import GroupDrawingOptions
from toolgrpo.signal.correction import CorrectionOptions
from toolgrpo.signal.shaping import ShapingOptions
from toolgrpo.signal.training_rows import TrainingRowsOptions
from toolgrpo.tools.base import TOOL_TIMEOUT_S
from toolgrpo.trainer.hardware import settled_bf16, settled_cpu, trains_on_cpu
from toolgrpo.trainer.overlap import OverlapOptions
from toolgrpo.trainer.prompt_lengths import PromptOptions
from toolgrpo.trainer.trl_fields import refuse_without_effect
from toolgrpo.trainer.trl_jobs import TRLJobOptions

ENGINE_NAMES = ("auto", *ENGINES)
LORA_SYNCS = ("merge", "adapter")


@dataclass
class ToolGRPOConfig(
    RecordingOptions,
    WatchOptions,
    ShapingOptions,
    TrainingRowsOptions,
    CreditOptions,
    GroupDrawingOptions,
    CorrectionOptions,
    OverlapOptions,
    PromptOptions,
    ContextOptions,
    TRLJobOptions,
    GRPOConfig,  # type: ignore[misc]  # TRL ships no types
):
    """All of TRL's fields, and those below. `None` means no limit, where a limit is meant."""

    may_be_greedy: ClassVar[bool] = False  # whether temperature may be 0

    max_completion_length: int | None = field(
        default=1024,
        metadata={"help": "Most tokens of an episode after its prompt: sampled tokens and tool results together."},
    )

    # the episode
    max_turns: int | None = field(default=8, metadata={"help": "Most assistant turns of an episode."})
    max_user_turns: int | None = field(
        default=None,
        metadata={"help": "Most messages of the user after the prompt, of a column `user_turns` or an environment."},
    )
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
    tool_timeout: float = field(
        default=TOOL_TIMEOUT_S, metadata={"help": "Seconds after which a tool call is given up."}
    )
    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds a reward may take over a batch; more is an error, never a score."}
    )

    # the engine
    engine: str = field(
        default="auto",
        metadata={"help": "What generates: auto, vllm_colocate, vllm_server or transformers.", "choices": ENGINE_NAMES},
    )
    engine_timeout: float = field(
        default=900.0,
        metadata={"help": "Seconds a vLLM server has to answer one request; longer than any should take."},
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
            "help": "Most packed tokens of one forward pass of a prefix-shared batch; default: no more than TRL's, and on a CPU what fits into memory."
        },
    )

    # what people see
    success_threshold: float = field(
        default=1.0, metadata={"help": "An episode counts as a success if its reward is at least this."}
    )

    def __post_init__(self) -> None:
        self.bf16: bool | None = settled_bf16(self.bf16, self.fp16, on_cpu=trains_on_cpu(self.use_cpu))
        use_cpu, ddp_backend = settled_cpu(self.use_cpu, self.ddp_backend, self.bf16)
        self.use_cpu: bool = use_cpu
        self.ddp_backend: str | None = ddp_backend
        self.take_trl_arguments()
        self._check_fields_of_trl()
        own_batch = self.generation_batch_size is None and self.steps_per_generation is None
        try:
            super().__post_init__()
        except ValueError as error:
            group, batch = self.num_generations, self.generation_batch_size
            if not own_batch or not batch or batch % group == 0:
                raise
            raise ConfigError(
                f"the {batch} episodes of a batch (per_device_train_batch_size x gradient_accumulation_steps x processes) "
                f"must be divisible by num_generations ({group}); try per_device_train_batch_size "
                f"{group * max(1, round(self.per_device_train_batch_size / group))}"
            ) from error
        if self.engine not in ENGINE_NAMES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINE_NAMES)}; got {self.engine!r}")
        self._check_servers()
        if self.vllm_lora_sync not in LORA_SYNCS:
            raise ConfigError(f"vllm_lora_sync must be one of {', '.join(LORA_SYNCS)}; got {self.vllm_lora_sync!r}")
        if self.unmarked_calls not in POLICIES:
            raise ConfigError(f"unmarked_calls must be one of {', '.join(POLICIES)}; got {self.unmarked_calls!r}")
        for name in ("tool_timeout", "episode_timeout", "reward_timeout", "engine_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
        if self.vllm_kv_cache_gib < 1:
            raise ConfigError(f"vllm_kv_cache_gib must be at least 1, got {self.vllm_kv_cache_gib}")
        if self.max_concurrent_episodes is not None and self.max_concurrent_episodes < 1:
            raise ConfigError(f"max_concurrent_episodes must be at least 1, got {self.max_concurrent_episodes}")
        self.shared_pass()
        self.check_recording()
        self.check_prompt_options()
        self.episode_limits()
        self.check_watch()
        self.check_group_drawing()
        self.check_training_rows()
        self.check_correction()
        self.check_overlap()
        self.check_shaping()
        self.check_credit()

    def _check_fields_of_trl(self) -> None:
        """Refuse what TRL and Transformers take without a word, or divide by zero on."""
        defaults = {known.name: known.default for known in fields(self)}
        refuse_without_effect(vars(self), defaults)
        for name, least in (
            *(("num_generations", 2), ("per_device_train_batch_size", 1), ("gradient_accumulation_steps", 1)),
            *(("temperature", 0), ("beta", 0), ("learning_rate", 0)),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                why = " (GRPO compares the episodes of a group)" if name == "num_generations" else ""
                raise ConfigError(f"{name} must be at least {least}{why}, got {value}")
        if self.temperature == 0 and not self.may_be_greedy:
            raise ConfigError(
                "temperature must be above 0 in training, got 0: greedy episodes of a group are all alike, and the "
                "log-probabilities are divided by it. Leave it at 1.0; an evaluation may use 0"
            )

    def changed(self, **changes: Any) -> Self:
        """Return a copy with these fields set.

        Not by `dataclasses.replace`: TRL would derive the fields anew that it has derived before,
        and refuse them.
        """
        known = {known.name for known in fields(self)}
        if not changes.keys() <= known:
            raise ConfigError(f"{min(changes.keys() - known)} is no field of {type(self).__name__}")
        config = copy.copy(self)
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    def engine_options(self) -> EngineOptions:
        """Return which engine these fields ask for, and what each engine would be asked."""
        batch = self.per_device_train_batch_size * self.steps_per_generation
        at_a_time = self.max_concurrent_episodes or math.ceil(batch * (1 + self.max_staleness + self.carry_over))
        return EngineOptions(
            engine=self.engine,
            vllm_colocate=ColocateOptions(
                vllm=VLLMOptions(
                    max_model_len=self.vllm_max_model_length,
                    max_num_seqs=at_a_time,
                    gpu_memory_utilization=self.vllm_gpu_memory_utilization,
                    kv_cache_gib=self.vllm_kv_cache_gib,
                    enforce_eager=self.vllm_enforce_eager,
                    enable_sleep_mode=self.vllm_enable_sleep_mode,
                    trust_remote_code=self.trust_remote_code,
                    seed=self.seed,
                ),
                tensor_parallel_size=self.vllm_tensor_parallel_size,
                lora_sync=self.vllm_lora_sync,
            ),
            vllm_server=ServerOptions(
                urls=tuple(self.server_urls()),
                ready_timeout_s=self.vllm_server_timeout,
                weights_folder=Path(self.output_dir) / "vllm_weights",
                lora_sync=self.vllm_lora_sync,
                timeout_s=self.engine_timeout,
                group_port=self.vllm_group_port,
            ),
            transformers=TransformersOptions(
                max_model_len=self.vllm_max_model_length,
                max_rows=at_a_time,
                seed=self.seed,
                own_copy=self.runs_ahead,
            ),
        )

    def server_urls(self) -> list[str]:
        """Return the vLLM servers that were configured, our way or TRL's."""
        if self.vllm_server_urls:
            return list(self.vllm_server_urls)
        if self.vllm_server_base_url:
            return [self.vllm_server_base_url]
        defaults = {known.name: known.default for known in fields(GRPOConfig)}
        address = ("vllm_server_host", "vllm_server_port")
        named = any(getattr(self, name) != defaults[name] for name in address)
        if named or (self.use_vllm and self.vllm_mode == "server"):
            return [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return []

    def _check_servers(self) -> None:
        """Refuse servers that are named in two ways, or for an engine that uses none."""
        ways = [name for name in ("vllm_server_urls", "vllm_server_base_url") if getattr(self, name)]
        if len(ways) == 2:
            raise ConfigError("vllm_server_urls and vllm_server_base_url both name servers; give one of them")
        if ways and self.engine not in ("auto", "vllm_server"):
            raise ConfigError(f"{ways[0]} is given, but engine is {self.engine!r}; use engine vllm_server (or auto)")

    def episode_limits(self) -> EpisodeLimits:
        """Return the limits of an episode as one value."""
        if self.max_completion_length is None:
            raise ConfigError("max_completion_length must be a number of tokens; got None")
        return EpisodeLimits(
            max_completion_length=self.max_completion_length,
            max_turns=self.max_turns,
            max_user_turns=self.max_user_turns,
            max_tool_calls=self.max_tool_calls,
            max_turn_tokens=self.max_turn_tokens,
            max_tool_response_tokens=self.max_tool_response_tokens,
            deadline_s=self.episode_timeout,
            context=self.context_limit(),
        )

    def shared_pass(self) -> SharedPass:
        """Return the prefix-shared training pass these fields ask for."""
        return SharedPass(mode=self.prefix_sharing, max_tokens=self.max_tokens_per_pass)

    def sampling_options(self) -> SamplingOptions:
        """Return how tokens are drawn in training."""
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )
