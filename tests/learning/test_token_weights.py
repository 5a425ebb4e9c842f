"""How off-policy tokens are weighted, the trap of weights that are a product over an episode, and which way a run has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.learning.correction import (
    EpisodeRule,
    clipped,
    cut_by,
    difference_metrics,
    kept,
    log_ratios,
    settled,
    truncated,
    weight_metrics,
    weights_of_rows,
)
from toolgrpo.testing.trainers import tiny_config

LENGTHS = torch.linspace(20, 2000, 200).long()
OF_BF16 = 0.015  # standard deviation of a token's log-ratio


def noise() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios of 200 episodes of 20 to 2,000 tokens that differ by chance alone, and their mask."""
    mask = (torch.arange(2000) < LENGTHS.unsqueeze(1)).long()
    draws = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return OF_BF16 * draws * mask, mask


def of_trl(log_ratio: torch.Tensor) -> torch.Tensor:
    """TRL's default: the product of an episode's ratios, and 0 above 3."""
    product = log_ratio.sum(dim=1, keepdim=True).exp()
    return product.masked_fill(product > 3.0, 0.0)


def metrics(log_ratio: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    return weight_metrics(weights_of_rows(log_ratio, weights, mask))


def test_a_product_over_an_episode_makes_long_ones_noise() -> None:
    log_ratio, mask = noise()
    found = metrics(log_ratio, of_trl(log_ratio), mask)
    assert found["correction/ess/q1"] > 0.9 > 0.8 > found["correction/ess/q4"]
    assert found["correction/masked_episodes/q1"] == 0 < found["correction/masked_episodes/q4"]
    weights = of_trl(log_ratio)[150:, 0]
    assert weights.max() > 2 and weights[weights > 0].min() < 0.4


def test_bypass_and_geo_tis_treat_all_lengths_alike() -> None:
    log_ratio, mask = noise()
    ways = {
        "bypass": clipped(log_ratio, torch.ones(200), 0.2, 0.2),
        "geo_tis": truncated(log_ratio, 2.0) * kept(log_ratio, mask, EpisodeRule(band_tokens=1000)).unsqueeze(1),
    }
    for name, weights in ways.items():
        found = metrics(log_ratio, weights, mask)
        for quarter in ("q1", "q2", "q3", "q4"):
            assert found[f"correction/masked_episodes/{quarter}"] <= 0.1, (name, quarter)
            assert found[f"correction/ess/{quarter}"] > 0.9, (name, quarter)


def test_episodes_of_another_policy_are_left_out() -> None:
    mask = torch.ones(2, 2000, dtype=torch.long)
    log_ratio = torch.tensor([0.0, -0.2]).unsqueeze(1).expand(2, 2000)
    assert kept(log_ratio, mask, EpisodeRule()).tolist() == [True, False]


def test_tokens_outside_the_mask_and_without_a_number_weigh_one() -> None:
    trainer = torch.tensor([[-1.0, -2.0, -3.0]])
    engine = torch.tensor([[-1.5, math.nan, -9.0]])
    found = log_ratios(trainer, engine, torch.tensor([[1, 1, 0]]))
    assert found.tolist() == [[0.5, 0.0, 0.0]]
    assert truncated(found, 1.2).tolist() == [[pytest.approx(1.2), 1.0, 1.0]]


def test_the_clip_leaves_out_what_pushes_further_only() -> None:
    log_ratio = torch.tensor([[0.5, -0.5, 0.0], [0.5, -0.5, 0.0]])
    weights = clipped(log_ratio, torch.tensor([1.0, -1.0]), 0.2, 0.2)
    assert (weights == 0).tolist() == [[True, False, False], [False, True, False]]


def test_the_metrics_are_those_of_their_definitions() -> None:
    log_ratio = torch.tensor([[0.2, -0.1, 0.0, 0.0], [0.0, 0.4, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    weights = torch.tensor([[2.0, 1.0, 9.0, 9.0], [0.0, 0.0, 0.0, 0.0]])
    rows = weights_of_rows(log_ratio, weights, mask)
    found = weight_metrics(rows)
    assert found["correction/masked_episodes"] == 0.5
    assert found["correction/masked_tokens"] == pytest.approx(4 / 6)
    assert found["correction/ess"] == pytest.approx(3**2 / (6 * 5))
    k3 = sum(math.expm1(x) - x for x in (0.2, -0.1, 0.4)) / 6
    assert found["correction/k3"] == pytest.approx(k3, rel=1e-5)
    assert found["correction/masked_episodes/q2"] == 0 and found["correction/masked_episodes/q4"] == 1
    assert "correction/ess/q1" not in found, "two episodes make no four quarters"
    differences = difference_metrics(rows)
    assert differences["sampling/sampling_logp_difference/mean"] == pytest.approx(0.7 / 6)
    assert differences["sampling/sampling_logp_difference/max"] == pytest.approx(0.4)
    assert weight_metrics([]) == difference_metrics([]) == {}


# Which correction a run has: what is asked, what fits its engine and how many updates a batch gets.

DEFAULT: dict[str, Any] = {"vllm_importance_sampling_mode": "sequence_mask"}  # TRL's own; tiny_config has another


@pytest.mark.parametrize(
    ("changes", "method", "why"),
    [
        ({}, "bypass", "one update"),
        ({"gradient_accumulation_steps": 4}, "bypass", "one update"),
        ({"num_iterations": 2}, "geo_tis", "several updates"),
        ({"steps_per_generation": 2}, "geo_tis", "several updates"),
        ({"importance_sampling_level": "sequence"}, "geo_tis", "narrower than the effect of rounding"),
        ({"num_iterations": 2, "rollout_correction": "bypass"}, "bypass", "as asked"),
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
    asked: dict[str, Any] = {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "min_p": 0.1}
    for name, value in asked.items():
        assert cut_by(SamplingOptions(**{name: value})) == f"{name} {value}"
