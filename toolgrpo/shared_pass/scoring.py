"""The training pass that reads a shared prompt once:
TRL's per-token log-probabilities and entropies, for less.

`SharedPass.score` takes what TRL's padded forward pass takes (left-padded prompts,
right-padded completions) and gives its log-probabilities and entropies in TRL's shape, computed on
packed prefix trees (`packing.py`, `attention.py`). It goes through the model's own forward,
wrappers (DDP, FSDP, DeepSpeed, PEFT) and TRL's fused LM head included, so the policy, the old
policy and the reference all use it and every loss of TRL stays TRL's.

It answers None where the padded pass must or should be used: the architecture has something packed
attention cannot express (`unsupported`), inputs that are not text, or rows with so little in common
that nothing is gained. Each reason is logged once. With `mode="on"` an unsupported model is an
error instead.

Not covered: the load-balancing loss of mixture-of-experts models (it counts tokens, and a shared
token stands for several), for which TRL's pass runs; prompt tuning, which puts tokens of its own
before every row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from toolgrpo.errors import ConfigError, ModelError
from toolgrpo.shared_pass.attention import PrefixLayout, keep_for_backward, shared_attention
from toolgrpo.shared_pass.packing import PackedSegment, Packing, pack_in_passes, rows_of_batch
from toolgrpo.shared_pass.recurrent_seam import RecurrentLayout, is_known_hybrid, share_recurrences

logger = logging.getLogger(__name__)

MODES = ("auto", "on", "off")
# Tokens saved by a pass on a GPU: from a card's numbers, when a pass attended in several calls a layer. With one call it
# should be less; the first card that runs `speed_whole` decides.
_WORTH_LAUNCHING = 4096


def is_shared(device_type: str, packed: int, padded: int, n_passes: int) -> bool:
    """Return whether `auto` packs, from the tokens of both ways and the passes of the packed one, over all processes.

    On a CPU it must save a tenth (benchmarks/training_pass.py). A GPU computes small passes faster than a host
    launches their steps, of which the packed one had more, so there each must save so many tokens (`speed` and
    `speed_whole` of benchmarks/gpu_proof.py, on an H100).
    """
    if device_type != "cpu":
        return padded - packed >= _WORTH_LAUNCHING * n_passes
    return packed <= 0.9 * padded


def most_in_a_pass(device_type: str, packed: int) -> int:
    """Return the most tokens of a pass of `auto`, which may not pack it, if packed it has so many."""
    return packed + _WORTH_LAUNCHING if device_type != "cpu" else int(packed / 0.9)


class ScoredTokens(NamedTuple):
    """Values of the kept tokens, each (B, logits_to_keep); 0 where nothing is scored."""

    logps: torch.Tensor
    entropies: torch.Tensor | None
    is_top1: torch.Tensor | None = None  # where the model's head computes it, as TRL's supervised trainer asks


def unsupported(config: Any) -> str | None:
    """Return why models of this config cannot run on packed prefix trees, or None if they can.

    A model that also reads images can, on text; a batch with images never comes here.
    """
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if is_known_hybrid(text):
        return None
    if getattr(text, "block_types", None):
        return "it has recurrent layers"
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if odd:
        return f"it has layers of another kind ({', '.join(odd)})"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps its attention scores"
    both_ways = getattr(text, "use_bidirectional_attention", None)  # "vision": among the tokens of an image
    if both_ways not in (None, False, "vision") or not getattr(text, "is_causal", True):
        return "its attention is not causal"
    if text.model_type == "gpt_oss":
        return "it has attention sinks"
    if text.model_type == "nemotron":
        return "its layers do not hand the layout down to its attention"
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        return "it has no rotary positions"
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:
        return "its rotary positions depend on the length of the sequence"
    return None


class SharedPass:
    """Decides, pass by pass, whether to share prompts, and does it.

    `max_tokens` bounds the packed tokens of one forward pass, also where nothing is shared. What
    does not fit is cut into several; where gradients are wanted, each of them is computed again in
    the backward pass, so that only one is in memory at a time.
    """

    def __init__(self, *, mode: str = "auto", max_tokens: int | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(f"prefix_sharing must be one of {', '.join(MODES)}; got {mode!r}")
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens_per_pass must be a positive number of tokens, got {max_tokens}")
        self.mode, self.max_tokens = mode, max_tokens
        self._told: set[str] = set()

    def score(
        self,
        model: Any,
        input_ids: torch.Tensor,  # (B, T), as TRL has them: prompts left padded, completions right padded
        attention_mask: torch.Tensor,  # (B, T)
        logits_to_keep: int | None = None,  # None: all
        *,
        unwrapped: Any,
        scored_mask: torch.Tensor | None = None,  # (B, T)
        batch_size: int | None = None,
        compute_entropy: bool = False,
        autocast: AbstractContextManager[Any] | None = None,
    ) -> ScoredTokens | None:
        """Score the last `logits_to_keep` columns as TRL's padded pass does, or what of them is under `scored_mask`.

        None means that the padded pass should run. `model` is what to call, wrapped as it is, with TRL's
        fused LM head; `unwrapped` is the transformers or PEFT model inside. `batch_size` is the number of
        rows the padded pass would take at a time.
        """
        n_rows, width = input_ids.shape
        first = width - (logits_to_keep or width)
        if scored_mask is None:
            scored_mask = torch.zeros_like(attention_mask)
            scored_mask[:, first:] = 1
        packings = self._packed(input_ids, attention_mask, scored_mask, unwrapped, batch_size)
        if packings is None:
            return None
        config = unwrapped.config.get_text_config()
        # A wrapper's forward must not run again inside a backward pass, so with several processes the
        # activations of all passes stay; gradient checkpointing is what bounds them there.
        again = torch.is_grad_enabled() and len(packings) > 1 and not _several_processes()
        run: Callable[..., ScoredTokens] = forward_packing
        if again:
            run = partial(checkpoint, forward_packing, use_reentrant=False)
        with autocast or nullcontext():
            outputs = [run(model, config, packing, input_ids.device) for packing in packings]
        of_passes = [packing.rows * width + packing.columns for packing in packings]
        places = torch.from_numpy(np.concatenate(of_passes)).to(input_ids.device)

        def scatter(parts: list[torch.Tensor]) -> torch.Tensor:
            """Put every value where the padded pass would have it."""
            values = torch.cat(parts)
            whole = values.new_zeros(n_rows * width).index_put((places.to(values.device),), values)
            return whole.view(n_rows, width)[:, first:]

        logps = scatter([one.logps for one in outputs])
        entropies = [one.entropies for one in outputs if one.entropies is not None] if compute_entropy else []
        is_top1 = [one.is_top1 for one in outputs if one.is_top1 is not None]
        return ScoredTokens(logps, scatter(entropies) if entropies else None, scatter(is_top1) if is_top1 else None)

    def _packed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored_mask: torch.Tensor,
        unwrapped: Any,
        batch_size: int | None,
    ) -> list[Packing] | None:
        """Return the passes that read what rows have in common once, or None where the padded pass should run."""
        if self.mode == "off":
            return None
        reason = unsupported_model(unwrapped)
        if reason is not None:
            self.fall_back_to_padded(f"{type(unwrapped).__name__} cannot share prompts: {reason}")
            return None
        rows = rows_of_batch(input_ids, attention_mask, scored_mask)
        n_rows, width = input_ids.shape
        at_a_time = min(batch_size or n_rows, n_rows)
        # the padded pass would take so many rows at a time because more do not fit into memory
        budget = self.max_tokens or (None if at_a_time == n_rows else at_a_time * width)
        packings = pack_in_passes(rows, budget)
        # before the choice: processes that chose differently would wait for each other's passes for ever
        plan = _agree_on_plan(packings, n_rows * width, input_ids.device)
        device = input_ids.device.type
        fits = self.max_tokens is None or plan.most_padded_tokens <= self.max_tokens
        # the tokens are sums over all processes, so the passes are, too
        n_passes = plan.n_passes * (dist.get_world_size() if _several_processes() else 1)
        shared = is_shared(device, plan.packed_tokens, plan.padded_tokens, n_passes)
        if self.mode == "auto" and fits and not shared:
            self._tell("prefix sharing: rows with too little in common and little padding use the padded pass")
            return None
        return packings + [_idle_pass()] * (plan.n_passes - len(packings))

    def fall_back_to_padded(self, message: str) -> None:
        """Say once why the padded pass must run; raise where sharing was asked for."""
        if self.mode == "off":
            return
        if self.mode == "on":
            raise ModelError(f"{message}; set prefix_sharing to auto or off.")
        self._tell(f"prefix sharing is off: {message}")

    def _tell(self, message: str) -> None:
        if message in self._told:
            return
        self._told.add(message)
        if not _several_processes() or dist.get_rank() == 0:
            logger.warning(message)  # the level that is seen where nobody has set logging up


class _Plan(NamedTuple):
    packed_tokens: int  # of all processes
    padded_tokens: int  # of all processes
    most_padded_tokens: int  # of any process
    n_passes: int  # of every process


def _agree_on_plan(packings: list[Packing], padded_tokens: int, device: torch.device) -> _Plan:
    """Settle the passes of all processes: each is collective under DDP, FSDP and ZeRO-3."""
    totals = torch.tensor([sum(packing.n_tokens for packing in packings), padded_tokens], device=device)
    largest = torch.tensor([padded_tokens, max(1, len(packings))], device=device)
    if _several_processes():
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return _Plan(*torch.cat([totals, largest]).tolist())


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _idle_pass() -> Packing:
    """Return a pass that scores nothing, for a process that has fewer passes than another."""
    nothing = np.zeros(0, np.int64)
    token = np.zeros(1, np.int64)
    return Packing(token, token, token - 100, (PackedSegment(0, 1, 0, ()),), nothing, nothing, nothing)


def forward_packing(model: Any, config: Any, packing: Packing, device: torch.device) -> ScoredTokens:
    """Run one forward pass; return the values of the scored places, one after another."""
    recurrent: dict[str, RecurrentLayout] = {}
    if is_known_hybrid(config):
        share_recurrences(config.model_type)
        recurrent["seq_idx"] = RecurrentLayout(packing.segments)
    places = np.stack([packing.tokens, packing.positions, packing.labels])[:, None]
    tokens, positions, labels = torch.from_numpy(places).to(device)  # one copy
    with shared_attention(config):
        output = model(
            input_ids=tokens,
            # a mask over a packed sequence would be quadratic in the tokens of a whole group
            position_ids=positions,
            attention_mask=None,
            shift_labels=labels,
            fused_lm_head=True,
            prefix_layout=PrefixLayout(packing.segments),
            **recurrent,
        )
    for layout in recurrent.values():
        layout.check(config)
    scored = torch.from_numpy(packing.scored).to(output.log_probs.device)
    logps, *others = (
        None if value is None else value.flatten().index_select(0, scored)  # indexing would sort, backward
        for value in (output.log_probs, output.entropy, output.is_top1)
    )
    assert logps is not None
    found = ScoredTokens(logps, *others)
    for value in found:
        if value is not None and value.requires_grad:
            keep_for_backward(config, value)
    return found


def unsupported_model(unwrapped: Any) -> str | None:
    """Return why this model, with its adapters, cannot run on packed prefix trees, or None if it can."""
    adapters = getattr(unwrapped, "peft_config", {})
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return "its adapter puts its own tokens before every row"
    if any(name.rpartition(".")[2] in ("sinks", "sink") for name, _ in unwrapped.named_parameters()):
        return "it has attention sinks"
    if not (
        is_known_hybrid(unwrapped.config.get_text_config()) or getattr(unwrapped, "_supports_attention_backend", False)
    ):
        return "its attention cannot be replaced"  # it would run over the packed rows as if they were one
    return unsupported(unwrapped.config)
