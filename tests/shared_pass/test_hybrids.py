"""Recurrent layers over prefix trees: deep trees, segments of one token, and what is private in Transformers."""

from __future__ import annotations

import faulthandler
import gc
import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from tests.shared_pass.test_prefix_sharing import (
    COLUMNS,
    HYBRIDS,
    VOCABULARY,
    Batch,
    Result,
    assert_equal,
    batch,
    cached,
    lengths_of,
    make,
    padded,
    shared,
)
from toolgrpo.errors import ModelError
from toolgrpo.shared_pass import recurrent_seam
from toolgrpo.shared_pass.packing import pack, rows_of_batch
from toolgrpo.shared_pass.recurrent_seam import RecurrentLayout, module_of, share_recurrences
from toolgrpo.shared_pass.scoring import SharedPass, forward_packing


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_deep_tree_whose_segments_have_one_token_or_some(family: str) -> None:
    """Branches at 1, 2, 3 and 40 tokens: segments shorter than the convolution that follows them."""
    model = cached(family)
    generator = torch.Generator().manual_seed(3)
    trunk = torch.randint(0, VOCABULARY, (40,), generator=generator)
    rows = [torch.cat([trunk[:n], torch.randint(0, VOCABULARY, (12,), generator=generator)]) for n in (1, 2, 3, 40, 40)]
    rows.append(trunk[:4])
    both = [torch.stack([row, torch.ones_like(row)], -1) for row in rows]
    ids, mask = pad_sequence(both, batch_first=True, padding_side="left").unbind(-1)
    last = torch.zeros_like(mask)
    last[:, -1] = 1
    packing = pack(rows_of_batch(ids, mask, last), min_shared=1)
    assert {1, 12 - 1} <= {segment.length for segment in packing.segments}
    assert max(len(segment.ancestors) for segment in packing.segments) >= 3

    tree, *_ = forward_packing(model, model.config, packing, ids.device)
    ours = gradient(model, tree)
    alone = padded_logps(model, Batch(ids, mask), last)[packing.rows, -1]
    torch.testing.assert_close(tree.detach(), alone.detach(), atol=1e-5, rtol=0)
    assert_near(ours, gradient(model, alone))


def gradient(model: Any, logps: torch.Tensor) -> torch.Tensor:
    """Of what differs from token to token."""
    model.zero_grad()
    (logps * torch.linspace(-1, 2, logps.numel()).view_as(logps)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def padded_logps(model: Any, rows: Batch, scored: torch.Tensor) -> torch.Tensor:
    labels = rows.ids.masked_fill(scored == 0, -100)
    output = model(input_ids=rows.ids, attention_mask=rows.mask, labels=labels, fused_lm_head=True)
    logps: torch.Tensor = output.log_probs
    return logps


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.norm() > 0.1
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def episodes() -> tuple[Batch, torch.Tensor]:
    """Two groups of episodes with tools: their ids, padded on the right, and which tokens the model sampled.

    Calls and results of one token are among them. Results are alike in a group, and stand behind calls that are not.
    """
    generator = torch.Generator().manual_seed(7)

    def some(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()

    rows: list[list[tuple[int, list[int]]]] = []
    for n_prompt, turns in ((35, [(5, 9), (1, 20), (6, 0)]), (22, [(7, 1), (3, 0)])):
        prompt, results = some(n_prompt), [some(n_result) for _, n_result in turns]
        for extra in range(3):
            row = [(0, prompt)]
            for (n_sampled, _), result in zip(turns, results, strict=True):
                row += [(1, some(n_sampled + extra)), (0, result)]
            rows.append(row)
    rows[1][1] = rows[0][1]  # one call twice
    tokens = [torch.tensor([(token, sampled, 1) for sampled, part in row for token in part]) for row in rows]
    ids, sampled, mask = pad_sequence(tokens, batch_first=True).unbind(-1)
    return Batch(ids, mask), sampled


@pytest.mark.parametrize("family", HYBRIDS)
def test_tool_results_between_sampled_tokens(family: str) -> None:
    """Only sampled tokens are scored, from the state that the results before them leave."""
    model, (rows, sampled) = cached(family), episodes()
    scored = SharedPass(mode="on").score(model, *rows, scored_mask=sampled, unwrapped=model)
    assert scored is not None
    ours = scored.logps[:, 1:]
    found = gradient(model, ours)
    theirs = padded_logps(model, rows, sampled)
    torch.testing.assert_close(ours.detach(), theirs.detach(), atol=1e-5, rtol=0)
    assert torch.equal(ours != 0, sampled[:, 1:] > 0)
    assert_near(found, gradient(model, theirs))


N_FIRST = 6  # rows of the first of two processes, out of eight


def in_one_of_two_processes(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(400, exit=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(minutes=3)
    )
    found = {}
    for family in HYBRIDS:
        model, rows = make(family), batch([31, 23])
        wrapped = DistributedDataParallel(model)  # a name, since it must live until the backward pass
        own = slice(N_FIRST) if rank == 0 else slice(N_FIRST, None)
        passes = lengths_of(model)
        scored = SharedPass(mode="on", max_tokens=70).score(
            wrapped, rows.ids[own], rows.mask[own], COLUMNS, unwrapped=model, compute_entropy=True
        )
        assert scored is not None and scored.entropies is not None
        # DDP takes the mean over processes
        (2 * (scored.logps + 0.3 * scored.entropies) * rows.weights[own]).sum().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[family] = scored.logps.detach(), scored.entropies.detach(), flat, passes
    torch.save(found, folder / f"{rank}.pt")
    # DDP's reducer must not hold the group last: it would join the group's threads while it holds the lock of the
    # interpreter, which one of them may be waiting for (seen: one process in a few dozen hung).
    del wrapped
    gc.collect()
    dist.destroy_process_group()


def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    """Over gloo; one of them has more rows, and more passes of its own, than the other."""
    spawn(in_one_of_two_processes, (tmp_path,), nprocs=2)
    processes = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for family in HYBRIDS:
        one, other = (found[family] for found in processes)
        assert len(one[3]) == len(other[3]) > 1 and other[3][-1] == 1, "the second has no idle pass"
        assert torch.equal(one[2], other[2])
        logps, entropies = (torch.cat([one[part], other[part]]) for part in range(2))
        assert_equal(Result(logps, entropies, one[2]), padded(cached(family), batch([31, 23])))


def test_a_layer_that_computes_without_the_tree_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = cached("qwen3_5"), batch([31], 2)
    shared(model, rows)  # replaces the functions for good
    module = module_of("qwen3_5_text")
    monkeypatch.setattr(module, "causal_conv1d_fn", module.causal_conv1d_fn.__wrapped__)
    with pytest.raises(ModelError, match=r"0.*2.*qwen3_5_text.*`causal_conv1d_fn`.*prefix_s"):
        SharedPass(mode="on").score(model, rows.ids, rows.mask, COLUMNS, unwrapped=model)


@pytest.mark.contract
@pytest.mark.parametrize("family", recurrent_seam._FUNCTIONS)
def test_the_functions_of_transformers_take_what_the_seam_gives_them(family: str) -> None:
    share_recurrences(family)
    scan = "hidden_states dt A B C chunk_size initial_states return_final_states dt_bias dt_softplus dt_limit"
    taken = {
        "causal_conv1d_fn": "hidden_states weight bias activation",
        "torch_chunk_gated_delta_rule": "g beta initial_state output_final_state",
        "mamba2_chunk_scan": scan,
        "mamba2_split_conv1d_scan_combined": "zxbcdt",
    }
    for name in recurrent_seam._FUNCTIONS[family]:
        parameters = inspect.signature(inspect.unwrap(getattr(module_of(family), name))).parameters
        follow = (
            f"{name} of {module_of(family).__name__} takes other arguments: follow it in shared_pass/recurrent_seam.py"
        )
        assert set(taken[name].split()) <= set(parameters), follow
        used = inspect.getsource(module_of(family))
        assert used.count(f"{name}(") > 1, f"no layer of {family} calls {name} any more"


def test_a_kernel_for_a_whole_layer_is_passed_by_where_there_is_a_tree() -> None:
    def kernel(*args: Any, **kwargs: Any) -> str:
        return "computed"

    guarded = recurrent_seam._whole_layer(kernel)
    assert guarded(1, seq_idx=None) == "computed"
    assert guarded(1, seq_idx=RecurrentLayout([])) is None
