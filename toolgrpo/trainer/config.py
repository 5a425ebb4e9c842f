"""`ToolGRPOConfig`: TRL's `GRPOConfig` plus the fields of `toolgrpo/options.py`, checked at construction.

The commands take the config of the model from here, too.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import trl
from trl import get_peft_config as get_peft_config
from trl import get_quantization_config as get_quantization_config

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.engines.build import EngineOptions
from toolgrpo.engines.vllm_options import ServerOptions, VLLMOptions
from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import ESTIMATORS, Shaping
from toolgrpo.learning.correction import set_fields_of_trl
from toolgrpo.learning.stages import ROW_LOSSES, TOKEN_LOSSES
from toolgrpo.options import THEMES, Changeable, RecordedShare, batch_of_parts, options_of, with_fields_of
from toolgrpo.rollout.compaction import ContextLimit
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.support.shipped_files import nearest_is
from toolgrpo.trainer.hardware import settled_device
from toolgrpo.trainer.trl.fields import without_effect
from toolgrpo.trainer.trl_jobs import take_trl_arguments

_LEAST_OF_TRL = {
    **{"num_generations": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    **{"num_iterations": 1, "steps_per_generation": 1, "generation_batch_size": 1, "ref_model_sync_steps": 1},
    **{"temperature": 0, "beta": 0, "learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0, "top_k": -1},
}
_BETWEEN_OF_TRL = {"top_p": (1e-6, 1), "min_p": (0, 1), "learning_rate": (0, 1e6)}
_CHOICES_OF_TRL: dict[str, tuple[Any, ...]] = {
    "loss_type": (*sorted(TOKEN_LOSSES | ROW_LOSSES), "bnpo"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


@dataclass
class ModelConfig(trl.ModelConfig):  # type: ignore[misc]  # TRL ships no types
    """TRL's, without dropout: with it the training pass scores another policy than the one that sampled."""

    lora_dropout: float = 0.0


@with_fields_of(*THEMES)
class ToolGRPOConfig(Changeable, trl.GRPOConfig):  # type: ignore[misc]  # TRL ships no types
    """All fields of TRL and of `toolgrpo.options`. `None` means no limit, where a limit is meant."""

    may_be_greedy: ClassVar[bool] = False  # whether temperature may be 0

    if TYPE_CHECKING:  # a type checker cannot see the fields

        def __init__(self, *args: Any, **fields: Any) -> None: ...

    def __post_init__(self) -> None:
        self.__dict__.update(settled_device(self.__dict__))
        take_trl_arguments(self.__dict__, {known.name: known.default for known in fields(self)})
        self._check_fields_of_trl()
        self._settle_evaluation()
        own_batch = self.generation_batch_size is None and self.steps_per_generation is None
        try:
            super().__post_init__()
        except ValueError as error:
            group, batch = self.num_generations, self.generation_batch_size
            if not own_batch or not batch or batch % group == 0:
                raise
            raise ConfigError(batch_of_parts(group, self.per_device_train_batch_size, batch)) from error
        if self.keep == "best":  # only now: Transformers would ask that every save is one of an evaluation
            self.load_best_model_at_end: bool = True
        try:
            self.record_episodes: RecordedShare = RecordedShare(self.record_episodes)
        except ArgumentTypeError as error:
            raise ConfigError(f"record_episodes {error}") from None
        self._refuse_without_effect()  # again: TRL has put the values of fields that it deprecates into others
        self._check_own_fields()

    def _refuse_without_effect(self) -> None:
        if refused := without_effect(vars(self), {known.name: known.default for known in fields(self)}):
            raise ConfigError("\n".join(refused))

    @classmethod
    def of_trl(cls, args: trl.GRPOConfig, **options: Any) -> Self:
        """Return the config of a trainer of TRL's that is made already, with these fields set.

        Not by calling the class: that would set accelerate up anew, under that trainer.
        """
        config = cls.__new__(cls)
        defaults = {
            one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(cls)
        }
        for name, value in {**defaults, **vars(args)}.items():
            setattr(config, name, value)
        config = config.changed(**options)
        take_trl_arguments(config.__dict__, defaults)
        if config.temperature != args.temperature:
            raise ConfigError(
                f"the temperature of episodes would be {config.temperature:g}, but the loss of TRL's trainer divides by the "
                f"one of its config, {args.temperature:g}; set temperature there alone"
            )
        config._check_own_fields()
        return config

    def _check_own_fields(self) -> None:
        for theme in THEMES:
            options_of(self, theme)
        self.episode_limits()
        refuse_combinations(self)

    def _check_fields_of_trl(self) -> None:
        """Refuse what TRL and Transformers take without a word, or divide by zero on."""
        self._refuse_without_effect()
        for name, least in _LEAST_OF_TRL.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # nor NaN
                why = " (GRPO compares the episodes of a group)" if name == "num_generations" else ""
                raise ConfigError(f"{name} must be at least {least}{why}, got {value}")
        for name, (low, high) in _BETWEEN_OF_TRL.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value}")
        for name, choices in _CHOICES_OF_TRL.items():
            value, names = getattr(self, name), [str(one) for one in choices]
            if value not in choices:
                near = nearest_is(str(value), names)
                raise ConfigError(f"there is no {name} {value!r}{near}; there are {', '.join(names)}")
        if self.temperature == 0 and not self.may_be_greedy:
            raise ConfigError(
                "temperature must be above 0 in training, got 0: greedy episodes of a group are all alike, and the "
                "log-probabilities are divided by it. Leave it at 1.0; an evaluation may use 0"
            )

    def _settle_evaluation(self) -> None:
        """Evaluate where steps between evaluations are given; go by success where best ones are looked for."""
        if self.eval_steps and self.eval_strategy == "no":
            self.eval_strategy: Any = "steps"
        if self.eval_strategy == "no":
            return
        # What TRL checks, although all rows are played at once here.
        self.per_device_eval_batch_size: int = self.num_generations_eval or self.num_generations
        if self.keep == "best" and self.metric_for_best_model not in (None, "success", "eval_success"):
            raise ConfigError(
                f"keep best goes by held-out success, so metric_for_best_model {self.metric_for_best_model} has no effect; "
                f"leave one of them out (load_best_model_at_end true goes by any metric)"
            )
        if self.keep == "best" or self.metric_for_best_model is None:
            self.metric_for_best_model: str | None = "eval_success"
        if self.keep == "best" and self.save_strategy == "no":
            self.save_strategy: Any = "best"

    @property
    def draws_groups(self) -> bool:
        """Return whether the steps' prompts are chosen here, in place of TRL's sampler."""
        return bool(self.dynamic_sampling != "off")

    @property
    def runs_ahead(self) -> bool:
        """Return whether episodes run while a batch is trained on."""
        return bool(self.max_staleness > 0)

    @property
    def revision(self) -> str | None:
        """Return the revision that the model is loaded in; its tokenizer belongs to it."""
        kwargs = self.model_init_kwargs
        return kwargs.get("revision") if isinstance(kwargs, dict) else None

    def engine_options(self) -> EngineOptions:
        """Return which engine these fields ask for, and what each engine would be asked."""
        batch = self.per_device_train_batch_size * self.steps_per_generation
        at_a_time = self.max_concurrent_episodes or batch * (1 + self.max_staleness)
        return EngineOptions(
            engine=self.engine,
            max_model_len=self.vllm_max_model_length,
            max_rows=at_a_time,
            seed=self.seed,
            own_copy=self.runs_ahead,
            lora_sync=self.vllm_lora_sync,
            vllm=VLLMOptions(
                gpu_memory_utilization=self.vllm_gpu_memory_utilization,
                kv_cache_gib=self.vllm_kv_cache_gib,
                enforce_eager=self.vllm_enforce_eager,
                enable_sleep_mode=self.vllm_enable_sleep_mode,
                trust_remote_code=self.trust_remote_code,
            ),
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            vllm_server=ServerOptions(
                urls=tuple(self.server_urls()),
                ready_timeout_s=self.vllm_server_timeout,
                weights_folder=Path(self.output_dir) / "vllm_weights",
                timeout_s=self.engine_timeout,
                group_port=self.vllm_group_port,
            ),
        )

    def server_urls(self) -> list[str]:
        """Return the vLLM servers that were configured, our way or TRL's."""
        if self.vllm_server_urls:
            return list(self.vllm_server_urls)
        if self.vllm_server_base_url:
            return [self.vllm_server_base_url]
        defaults = {known.name: known.default for known in fields(trl.GRPOConfig)}
        address = ("vllm_server_host", "vllm_server_port")
        named = any(getattr(self, name) != defaults[name] for name in address)
        if named or (self.use_vllm and self.vllm_mode == "server"):
            return [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return []

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
            context=ContextLimit.parse(self.context),
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

    def shaping(self) -> Shaping:
        """Return how rewards become advantages."""
        return Shaping(
            advantage=self.advantage,
            scale=str(self.scale_rewards),
            normalize_first=self.multi_objective_aggregation == "normalize_then_sum",
            weights=tuple(self.reward_weights or ()),
        )


def refuse_combinations(config: ToolGRPOConfig) -> None:
    """Raise ConfigError for the first row of the table that applies."""
    for applies, sentence in COMBINATIONS:
        found = applies(config)
        if found:
            raise ConfigError(sentence.format(c=config, found=found))


def _servers(c: Any) -> list[str]:
    return [name for name in ("vllm_server_urls", "vllm_server_base_url") if getattr(c, name)]


def _without_whole_groups(c: Any) -> int | None:
    """Return the rows of a step that takes whole groups, if they are none."""
    n_rows: int = c.per_device_train_batch_size * c.steps_per_generation
    return n_rows if c.runs_ahead and c.draws_groups and n_rows % c.num_generations else None


# What cannot be asked for together: when it applies, and what is said. `{found}` is what the condition returned.
COMBINATIONS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda c: len(_servers(c)) == 2,
        "vllm_server_urls and vllm_server_base_url both name servers; give one of them",
    ),
    (
        lambda c: c.engine not in ("auto", "vllm_server") and _servers(c),
        "{found[0]} is given, but engine is {c.engine!r}; use engine vllm_server (or auto)",
    ),
    (
        lambda c: (
            c.eval_strategy == "no"
            and [name for name in ("stop_when", "keep") if getattr(c, name) not in (None, "last")]
        ),
        "{found[0]} uses held-out success during the training, but nothing is evaluated there; add eval_steps N",
    ),
    (
        lambda c: c.eval_strategy != "no" and str(c.metric_for_best_model).endswith("loss"),
        "metric_for_best_model {c.metric_for_best_model} is not measured: an evaluation plays episodes and computes no loss; "
        "use eval_success or eval_reward",
    ),
    (
        lambda c: c.rollout_correction in ("bypass", "geo_tis", "off") and set_fields_of_trl(c),
        "{found[0]} belongs to TRL's own correction, but rollout_correction is {c.rollout_correction}; leave one of the two "
        "out",
    ),
    (
        lambda c: c.rollout_correction in ("trl", "bypass", "geo_tis") and not c.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction false turns the correction off, but rollout_correction is "
        "{c.rollout_correction}; leave one of the two out",
    ),
    (
        lambda c: c.runs_ahead and c.vllm_enable_sleep_mode,
        "vllm_enable_sleep_mode gives the engine's memory to the training pass, but with max_staleness both run "
        "at the same time; leave one of the two out",
    ),
    (
        _without_whole_groups,
        "max_staleness with dynamic_sampling takes whole groups in each process; per_device_train_batch_size * "
        "steps_per_generation is {found} and num_generations {c.num_generations}: make the one a multiple of the other",
    ),
    (
        lambda c: c.multi_objective_aggregation == "normalize_then_sum" and c.advantage != "grpo",
        "advantage {c.advantage} works on the sum of an episode's rewards, and multi_objective_aggregation "
        "normalize_then_sum makes none; use sum_then_normalize, or leave advantage out",
    ),
    (
        lambda c: not ESTIMATORS[c.advantage].divides_by_std and c.scale_rewards == "batch",
        "advantage {c.advantage} divides by no standard deviation, so scale_rewards batch would do nothing; leave it out",
    ),
)
