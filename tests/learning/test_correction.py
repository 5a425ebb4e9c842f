"""Which correction a run has: what is asked, what fits its engine and how many updates a batch gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.learning.correction import cut_by, settled
from toolgrpo.testing.trainers import tiny_config

DEFAULT: dict[str, Any] = {"vllm_importance_sampling_mode": "sequence_mask"}  # TRL's own; tiny_config has another


@pytest.mark.parametrize(
    ("changes", "method", "why"),
    [
        ({}, "bypass", "one update"),
        ({"gradient_accumulation_steps": 4}, "bypass", "one update"),
        ({"num_iterations": 2}, "geo_tis", "several updates"),
        ({"steps_per_generation": 2}, "geo_tis", "several updates"),
        ({"importance_sampling_level": "sequence"}, "geo_tis", "narrower than what rounding does"),
        ({"num_iterations": 2, "rollout_correction": "bypass"}, "bypass", "as asked"),
        ({"rollout_correction": "trl"}, "trl", "as asked"),
        ({"rollout_correction": "off"}, "off", "as asked"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "trl", "vllm_importance_sampling_mode is set"),
        ({"vllm_importance_sampling_clip_max": 2.0}, "trl", "vllm_importance_sampling_clip_max is set"),
        ({"vllm_importance_sampling_correction": False}, "off", "vllm_importance_sampling_correction is false"),
    ],
    ids=str,
)
def test_auto_is_what_fits_the_updates_of_a_batch(
    tmp_path: Path, changes: dict[str, Any], method: str, why: str
) -> None:
    args = tiny_config(tmp_path, **{**DEFAULT, **changes})
    found = settled(args, gives_logprobs=True, same_numbers=False)
    assert found.method == method and why in found.line and "\n" not in found.line


def test_nothing_is_corrected_where_nothing_differs_or_is_known(tmp_path: Path) -> None:
    args = tiny_config(tmp_path, **DEFAULT, rollout_correction="geo_tis")
    assert settled(args, gives_logprobs=True, same_numbers=True).method == "off"
    assert settled(args, gives_logprobs=False, same_numbers=False).method == "off"


def test_what_cuts_the_distribution_is_named() -> None:
    assert cut_by(SamplingOptions()) is None
    assert cut_by(SamplingOptions(top_p=0.9)) == "top_p 0.9"
    assert cut_by(SamplingOptions(top_k=50)) == "top_k 50"
    assert cut_by(SamplingOptions(repetition_penalty=1.1)) == "repetition_penalty 1.1"
    assert cut_by(SamplingOptions(min_p=0.1)) == "min_p 0.1"
