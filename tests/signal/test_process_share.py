from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.trainer.drawn_batches import ProcessShare

pytestmark = pytest.mark.property


@given(n_groups=st.integers(1, 40), n_processes=st.integers(1, 9), extra=st.integers(0, 5))
def test_every_number_belongs_to_one_process_and_they_share_evenly(n_groups: int, n_processes: int, extra: int) -> None:
    shares = [ProcessShare(n_groups, n_processes, process) for process in range(n_processes)]
    own = [share.own for share in shares]
    assert [number for numbers in own for number in numbers] == list(range(n_groups)), "in the order of the batch"
    assert max(map(len, own)) - min(map(len, own)) <= 1
    assert {share.largest for share in shares} == {max(map(len, own))}
    numbers = [
        share.number(group)
        for share, numbers in zip(shares, own, strict=True)
        if numbers
        for group in range(len(numbers) + extra)
    ]
    assert sorted(numbers) == list(range(shares[0].n_planned(extra)))


@given(per_process=st.integers(1, 8), n_processes=st.integers(1, 9))
def test_whole_groups_lie_where_trl_deals_them(per_process: int, n_processes: int) -> None:
    for process in range(n_processes):
        share = ProcessShare(per_process * n_processes, n_processes, process)
        assert list(share.own) == list(range(process * per_process, (process + 1) * per_process))
