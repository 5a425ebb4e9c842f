"""A marker whose row is that of the tokens no text ever used is spelled and named at the start, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.chat_families import trl_tokenizer
from toolgrpo.build import load_tokenizer, markers_line
from toolgrpo.chat import resolve_format
from toolgrpo.chat.encoding import marker_tokens, spelled_markers
from toolgrpo.models.untrained_markers import output_rows_in, untrained_rows

TOKENIZER = trl_tokenizer("qwen2_5")
MARKERS = marker_tokens(TOKENIZER)
OPENING, CLOSING = MARKERS.values()
N_TOKENS = len(TOKENIZER)


def rows(*untrained: int, n_unused: int = 12, apart: float = 1e-3) -> torch.Tensor:
    """Rows of a vocabulary: those of `untrained` and the unused ones are one vector, the others are their own."""
    torch.manual_seed(0)
    made = torch.randn(N_TOKENS + n_unused, 64)
    for one in (*untrained, *range(N_TOKENS, len(made))):
        made[one] = 0.3 * torch.arange(64).cos() + apart * torch.randn(64)
    return made


def said(head: torch.Tensor, tokenizer: Any = TOKENIZER, unmarked_calls: str = "answer") -> str | None:
    return markers_line(tokenizer, resolve_format(tokenizer), lambda: head, unmarked_calls=unmarked_calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_markers_that_share_the_row_of_unused_tokens_are_named(dtype: torch.dtype) -> None:
    line = said(rows(OPENING, CLOSING).to(dtype))
    assert line is not None and "<tool_call> and </tool_call>: this model was never trained on them" in line
    assert "--unmarked_calls accept" in line
    accepting = said(rows(OPENING), unmarked_calls="accept")
    assert accepting is not None and "--call_markers auto" in accepting and "--unmarked_calls" not in accepting
    assert untrained_rows(rows(CLOSING).to(dtype), MARKERS.values(), N_TOKENS) == [CLOSING]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: rows(), id="trained"),
        pytest.param(lambda: rows(OPENING, CLOSING, n_unused=3), id="hardly an unused token"),
        pytest.param(lambda: rows(OPENING, CLOSING, apart=1.0), id="unused rows are random"),
        pytest.param(lambda: torch.zeros(N_TOKENS + 12, 64), id="all zero"),
        pytest.param(lambda: torch.zeros(0), id="split over processes"),
    ],
)
def test_nothing_is_said_where_the_weights_do_not_show_it(make: Callable[[], torch.Tensor]) -> None:
    assert said(make()) is None


@pytest.mark.parametrize(
    ("untrained", "call_markers", "spelled"),
    [
        (MARKERS.values(), "auto", list(MARKERS)),
        ([OPENING], "auto", ["<tool_call>"]),
        ([], "auto", []),
        (MARKERS.values(), "tokens", []),
        ([], "spelled", list(MARKERS)),
    ],
)
def test_untrained_markers_are_spelled_unless_the_flag_says_otherwise(
    untrained: Iterable[int], call_markers: str, spelled: list[str], tmp_path: Path
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    save_file({"lm_head.weight": rows(*untrained)}, tmp_path / "model.safetensors")
    loaded = load_tokenizer(str(tmp_path), call_markers=call_markers)
    assert list(spelled_markers(loaded)) == spelled
    line = said(rows(*untrained), loaded)
    assert (line is not None and "ordinary pieces, by a server" in line) == bool(spelled)
    assert (line is not None and "never trained" in line) == bool(untrained)


def test_weights_that_cannot_be_read_leave_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert not spelled_markers(load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_the_head_is_found_in_files(name: str, tmp_path: Path) -> None:
    save_file({"model.layers.0.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({name: rows(OPENING)}, tmp_path / "b.safetensors")
    found = output_rows_in([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert found is not None and torch.equal(found, rows(OPENING))
    assert output_rows_in([tmp_path / "a.safetensors"]) is None
