"""Held-out rows where nobody gave a file or a split of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolgrpo.data.load import held_out_split, hold_out
from toolgrpo.data.table import as_dataset, n_trained_on
from toolgrpo.errors import DataError

PROMPTS = [f"q{i % 40}" for i in range(50)]  # ten prompts stand there twice


def test_no_held_out_question_is_trained_on() -> None:
    drawn = hold_out(PROMPTS, 0.2, seed=1)
    assert sorted(drawn.train + drawn.heldout) == list(range(50)) and drawn.train == sorted(drawn.train)
    assert not {PROMPTS[i] for i in drawn.train} & {PROMPTS[i] for i in drawn.heldout}
    assert len(drawn.heldout) in (10, 11)


def test_one_row_at_least_stays_on_either_side() -> None:
    assert len(hold_out(["a", "b"], 0.99, seed=0).train) == 1 == len(hold_out(["a", "b"], 0.01, seed=0).heldout)
    with pytest.raises(DataError, match="at least two different prompts"):
        hold_out(["a", "a"], 0.5, seed=0)


def test_the_split_that_is_meant_for_measuring(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "q"}\n')
    assert held_out_split(str(file)) == "train", "a file is taken whole"
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "q"}\n')
    assert held_out_split(str(tmp_path)) == "test"
    found = [held_out_split(spec) for spec in ("arithmetic", "reasoning_gym:countdown", "gsm8k", "owner/name")]
    assert found == ["heldout", "heldout", "heldout", "test"]


def asked(text: str, system: str = "", **columns: Any) -> dict[str, Any]:
    before = [{"role": "system", "content": system}] if system else []
    return {"prompt": [*before, {"role": "user", "content": text}], **columns}


TRAINED = [asked("1 + 1?", answer="2"), asked("2 + 2?", "Be short.", answer="4")]
GAMES = [asked("Play.", seed=number) for number in range(3)]


@pytest.mark.parametrize(
    ("rows", "heldout", "n"),
    [
        (TRAINED, TRAINED, 2),
        (TRAINED, [asked("3 + 3?", answer="6")], 0),
        (TRAINED, [asked("1 + 1?", "Another system message.", answer="2")], 1),
        (TRAINED, [asked(" 1 +  1?\n", answer="2")], 1),
        (TRAINED, [asked("1 + 1?", answer="two")], 1),
        (TRAINED, [asked("2 + 2?", answer="4"), asked("2 + 2?", answer="4")], 2),
        ([asked("1?"), asked("1?")], [asked("1?")], 1),
        (GAMES, [asked("Play.", seed=1), asked("Play.", seed=7)], 1),
        (GAMES[:1], [asked("Play.", seed=7)], 1),
        ([asked("2?", answer="4", id=n) for n in (1, 2)], [asked("2?", answer="4", id=9)], 1),
    ],
)
def test_held_out_rows_that_are_trained_on_are_counted(rows: list[Any], heldout: list[Any], n: int) -> None:
    assert n_trained_on(as_dataset(rows, "rows"), as_dataset(heldout, "heldout")) == n
