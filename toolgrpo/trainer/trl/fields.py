"""Account for every field of TRL's config: read by this package, by TRL's code that still runs,
or refused with a sentence.

Invariant: each field that `GRPOConfig` adds to Transformers' `TrainingArguments` stands in exactly
one of the three tables, but for those that TRL deprecates, whose value it puts into another; a TRL that adds one fails `tests/trainer/test_trl_fields.py` until somebody
has looked where it is read. The fields of `TrainingArguments` itself steer the training loop of
Transformers, which runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ_HERE = frozenset(
    (
        *("max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("num_generations", "steps_per_generation", "generation_batch_size", "reward_weights", "log_completions"),
        *("use_vllm", "vllm_mode", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
        *("vllm_tensor_parallel_size", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
        *("vllm_server_timeout", "vllm_group_port", "trust_remote_code", "model_init_kwargs"),
        *("generation_kwargs", "chat_template_kwargs"),
    )
)

READ_BY_TRL = frozenset(
    (
        *("router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32", "num_generations_eval", "shuffle_dataset"),
        *("pad_to_multiple_of", "beta", "num_iterations", "epsilon", "epsilon_high", "delta", "loss_type"),
        *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
        *("vespo_lambda_neg", "importance_sampling_level", "multi_objective_aggregation", "scale_rewards"),
        *("mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max"),
        *("entropy_coef_delta", "entropy_target", "off_policy_mask_threshold", "use_bias_correction_kl"),
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    )
)

_BATCHES = "leave it out; the transformers engine batches as it goes"
_TABLE = (
    "leave it out; log_completions sends tables with tools and turns, and OUTPUT_DIR/episodes.jsonl has every episode"
)

# What TRL's own generation and its own tables would read, neither of which runs here; and what to
# do instead.
WITHOUT_EFFECT: Mapping[str, str] = {
    "max_tool_calling_iterations": "use max_turns (a turn more than iterations: the last one answers)",
    "cache_implementation": "leave it out",
    "ds3_gather_for_generation": "leave it out; the engine gets whole weights, a parameter at a time",
    "vllm_structured_outputs_regex": "leave it out; malformed calls are answered with an error",
    "vllm_model_impl": "leave it out; colocated vLLM uses its own implementation of the model",
    "use_transformers_continuous_batching": _BATCHES,
    "transformers_continuous_batching_config": _BATCHES,
    "log_multimodal": "leave it out; episodes are text",
    "num_completions_to_print": _TABLE,
    "log_unique_prompts": _TABLE,
    "log_completions_hub_repo": _TABLE,
}

# Of Transformers' own fields, which steer its training loop.
DONE_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), "leave it out; an evaluation samples in the engine's precision"
    ),
    "enable_jit_checkpoint": "leave it out; SIGTERM ends a run after its step, saved, and the next run resumes from there",
}


def without_effect(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each field that was set and would do nothing."""
    return [
        f"{name} belongs to what TRL would do itself and has no effect here; {instead}"
        for name, instead in {**WITHOUT_EFFECT, **DONE_HERE}.items()
        if values.get(name) != defaults.get(name)
    ]
