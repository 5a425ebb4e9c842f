"""Whatever the rows: a packing spells each of them, scores each place once, and is never longer than they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.shared_pass.group_order import order_by_group, put_in_order
from toolgrpo.shared_pass.packing import Packing, pack, pack_in_passes, rows_of_batch

pytestmark = pytest.mark.property

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """ids, attention mask (padding on either side), scored mask (anything)."""
    n_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 12))

    def table(of: st.SearchStrategy[int]) -> torch.Tensor:
        row = st.lists(of, min_size=width, max_size=width)
        return torch.tensor(draw(st.lists(row, min_size=n_rows, max_size=n_rows)))

    ids = table(st.integers(0, 2))  # few kinds, so that common beginnings happen by themselves
    mask = torch.zeros_like(ids)
    for row in mask:
        start = draw(st.integers(0, width))
        row[start : draw(st.integers(start, width))] = 1
    return ids, mask, table(st.integers(0, 1))


def spelled(packing: Packing, leaf: int) -> list[tuple[int, int]]:
    """(token, position) of the row that ends in this segment."""
    segment = packing.segments[leaf]
    places = [p for start, end in (*segment.ancestors, (segment.start, segment.end)) for p in range(start, end)]
    return [(packing.tokens[p], packing.positions[p]) for p in places]


@given(batches(), st.integers(1, 4))
def test_a_packing_spells_its_rows_and_scores_each_place_once(batch: Batch, min_shared: int) -> None:
    rows = rows_of_batch(*batch)
    if not rows:
        return
    packing = pack(rows, min_shared=min_shared)
    assert packing.n_tokens <= sum(len(row.tokens) for row in rows)
    assert [place for s in packing.segments for place in range(s.start, s.end)] == list(range(packing.n_tokens))
    owners = {place: (packing.rows[i], packing.columns[i]) for i, place in enumerate(packing.scored)}
    expected = {(row.index, c) for row in rows for c, label in zip(row.columns, row.labels, strict=True) if label >= 0}
    assert len(owners) == len(packing.scored) and set(owners.values()) == expected
    by_index = {row.index: row for row in rows}
    for number, segment in enumerate(packing.segments):
        scored = {owners[place][0] for place in range(segment.start, segment.end) if place in owners}
        assert len(scored) <= 1, "a shared token is scored for a row"
        for index in scored:
            assert spelled(packing, number) == [(t, i) for i, t in enumerate(by_index[index].tokens)]


@given(batches())
def test_labels_are_the_tokens_that_follow(batch: Batch) -> None:
    ids, mask, scored = batch
    rows = rows_of_batch(*batch)
    found = {(row.index, c): label for row in rows for c, label in zip(row.columns, row.labels, strict=True)}
    for (index, column), label in found.items():
        assert label == (int(ids[index, column]) if scored[index, column] else -100)
    places = itertools.product(*map(range, ids.shape))
    wanted = {(i, c) for i, c in places if scored[i, c] and mask[i, c] and mask[i, :c].any()}
    assert wanted == {place for place, label in found.items() if label >= 0}


@given(batches(), st.integers(1, 30))
def test_passes_hold_every_row_once_and_keep_to_the_budget(batch: Batch, max_tokens: int) -> None:
    rows = rows_of_batch(*batch)
    passes = [set(packing.rows.tolist()) for packing in pack_in_passes(rows, max_tokens, min_shared=2)]
    assert sorted(index for part in passes for index in part) == sorted(row.index for row in rows)
    by_index = {row.index: row for row in rows}

    def length(indexes: set[int]) -> int:
        return pack([by_index[index] for index in indexes], min_shared=2).n_tokens

    assert all(len(part) == 1 or length(part) <= max_tokens for part in passes)
    in_order = sorted(rows, key=lambda row: (row.tokens.tolist(), row.index))
    for part, following in itertools.pairwise(passes):
        first = next(row.index for row in in_order if row.index in following)
        assert length({*part, first}) > max_tokens, "a pass was closed before it was full"


@given(st.permutations([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4), st.sampled_from([4, 8]))
def test_whole_groups_that_fit_stay_whole(groups: list[int], size: int) -> None:
    order = order_by_group(groups, size)
    for start in range(0, 16, size):
        assert len({groups[i] for i in order[start : start + size]}) == size // 4


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]))
def test_every_optimizer_step_keeps_its_samples(samples: list[int], accumulation_steps: int) -> None:
    def batch_of(*own: int) -> dict[str, Any]:
        prompts = {
            "prompt_ids": torch.tensor([[0, s % 3] for s in own]),
            "prompt_mask": torch.tensor([[0, 1]] * len(own)),
        }
        same = {"num_items_in_batch": torch.tensor(7), "absent": None}
        return {**prompts, **same, "sample": list(own), "advantages": torch.tensor(own)}

    batches = [batch_of(*samples[start : start + 2]) for start in range(0, 12, 2)]
    ordered = put_in_order(batches, accumulation_steps)
    assert len(ordered) == len(batches)
    for start in range(0, len(batches), accumulation_steps):
        step = slice(start, start + accumulation_steps)
        found, given = (sorted(s for b in some[step] for s in b["sample"]) for some in (ordered, batches))
        assert found == given
    for b in ordered:
        assert b["advantages"].tolist() == b["sample"]
        assert b["prompt_ids"][:, 1].tolist() == [s % 3 for s in b["sample"]]
        assert b["num_items_in_batch"] == 7 and b["absent"] is None
