"""A marker whose row is that of the tokens no text ever used is named at the start, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toolgrpo.models.untrained_markers import output_rows_in, untrained_line, untrained_rows

MARKERS = {"<tool_call>": 5, "</tool_call>": 6}
N_TOKENS = 40


def rows(*untrained: int, n_unused: int = 12, apart: float = 1e-3) -> torch.Tensor:
    """Rows of a vocabulary: those of `untrained` and the unused ones are one vector, the others are their own."""
    torch.manual_seed(0)
    made = torch.randn(N_TOKENS + n_unused, 64)
    for one in (*untrained, *range(N_TOKENS, len(made))):
        made[one] = 0.3 * torch.arange(64).cos() + apart * torch.randn(64)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_markers_that_share_the_row_of_unused_tokens_are_named(dtype: torch.dtype) -> None:
    line = untrained_line(rows(5, 6).to(dtype), MARKERS, N_TOKENS, "answer")
    assert line is not None and "<tool_call> and </tool_call>: this model was never trained on them" in line
    assert "--unmarked_calls accept" in line
    assert untrained_rows(rows(6).to(dtype), MARKERS.values(), N_TOKENS) == [6]


@pytest.mark.parametrize(
    "weights",
    [rows(), rows(5, 6, n_unused=3), rows(5, 6, apart=1.0), torch.zeros(N_TOKENS + 12, 64), torch.zeros(0)],
    ids=["trained", "hardly an unused token", "unused rows are random", "all zero", "split over processes"],
)
def test_nothing_is_said_where_the_weights_do_not_show_it(weights: torch.Tensor) -> None:
    assert untrained_line(weights, MARKERS, N_TOKENS, "answer") is None


def test_who_accepts_calls_without_markers_is_not_told_to() -> None:
    line = untrained_line(rows(5), MARKERS, N_TOKENS, "accept")
    assert line is not None and "are accepted" in line and "--unmarked_calls" not in line


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_the_head_is_found_in_files(name: str, tmp_path: Path) -> None:
    save_file({"model.layers.0.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({name: rows(5)}, tmp_path / "b.safetensors")
    found = output_rows_in([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert found is not None and torch.equal(found, rows(5))
    assert output_rows_in([tmp_path / "a.safetensors"]) is None
