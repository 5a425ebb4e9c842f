"""A batch of sequences that grow token by token in a transformers model;
rows join and leave between any two tokens.

Invariants:

* The last token of every row stands in the last column; what is left of its first token is padding,
  masked out. So one forward pass adds one token to each row, whatever their lengths.
* A row's log-probabilities do not depend on who else is in the batch, beyond fp32 rounding.
* The cache holds every token of a row except the last one, which is the next pass's input: keys and
  values in columns, and in layers with linear attention or a short convolution one state per row.

A token's log-probability is that of the distribution drawn from, after penalty, temperature, min_p,
top_k and top_p, in this order: what vLLM calls processed log-probabilities, and what TRL's
importance-sampling correction compares with its own log-softmax(logits / temperature). Greedy
drawing (temperature 0) is not scaled by a temperature. All of it is computed in fp32.

Not covered: models without any layer that keeps keys and values, and caches of other kinds (refused
with `ModelError`), models split over processes (refused by the engine), beams, images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from toolgrpo.engines.base import FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.errors import ModelError

_GREEDY_BELOW = 1e-5  # vLLM's own bound
_PREFILL_TOKENS = 16_384  # most tokens, padding included, that one pass over joining rows may have


@dataclass(eq=False, slots=True)
class DecodingRow:
    """One request on its way: all its ids so far, and what was drawn."""

    request: SampleRequest
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)

    @property
    def sampled(self) -> tuple[int, ...]:
        return tuple(self.ids[len(self.request.ids) :])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the row is done, or None if it is not."""
        if self.logprobs and self.ids[-1] in self.request.stop_ids:
            return FinishReason.STOP
        if len(self.logprobs) >= self.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def sample(self) -> Sample:
        assert self.finish_reason is not None
        return Sample(self.sampled, tuple(self.logprobs), self.finish_reason)


class DecodeBatch:
    """The rows that decode now, and their cache."""

    def __init__(self, model: Any, *, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._device = next(model.parameters()).device
        self._rows: list[DecodingRow] = []
        self._joining: list[DecodingRow] = []
        self._cache = empty_cache(model)

    def __len__(self) -> int:
        return len(self._rows) + len(self._joining)

    def join(self, rows: Sequence[DecodingRow]) -> None:
        """Let rows decode from the next step on, or as soon as there is room."""
        self._joining.extend(rows)

    def leave(self, rows: Sequence[DecodingRow]) -> None:
        """Forget rows, wherever they are."""
        gone = set(rows)
        self._joining = [row for row in self._joining if row not in gone]
        self._keep([row for row in self._rows if row not in gone])

    @torch.no_grad()
    def step(self) -> list[DecodingRow]:
        """Draw one token for every row, the joining ones too, and return the rows that are done."""
        if self._rows:
            self._draw(self._rows, self._forward(self._rows, self._cache, n_new=1))
        finished = self._take_finished()
        joining = self._next_joining()
        if joining:
            # read apart, then merged: together, each decoding row would be read as wide as the longest prompt
            cache = empty_cache(self._model)
            self._draw(joining, self._forward(joining, cache, n_new=max(len(row.ids) for row in joining)))
            _refuse_other_caches(cache, self._model)
            self._merge(joining, cache)
            finished += self._take_finished()
        return finished

    def _next_joining(self) -> list[DecodingRow]:
        """Take those that join in this step: first come first served, within the room there is."""
        n_rows, longest = 0, 0
        for row in self._joining[: self._max_rows - len(self._rows)]:
            longest = max(longest, len(row.ids))
            # the first one always joins, however long: nothing else would ever make room for it
            if n_rows and longest * (n_rows + 1) > _PREFILL_TOKENS:
                break
            n_rows += 1
        joining, self._joining = self._joining[:n_rows], self._joining[n_rows:]
        return joining

    def _forward(self, rows: Sequence[DecodingRow], cache: Cache, *, n_new: int) -> torch.Tensor:
        """Run the last `n_new` columns through the model.

        Returns the logits that follow the last one, for each row.
        """
        lengths_B = torch.tensor([len(row.ids) for row in rows], device=self._device)
        width = max(len(row.ids) for row in rows)
        columns_T = torch.arange(width, device=self._device)
        positions_BT = columns_T - (width - lengths_B).unsqueeze(1)
        new_ids = [[0] * (n_new - len(row.ids)) + row.ids[-n_new:] for row in rows]
        outputs = self._model(
            input_ids=torch.tensor(new_ids, device=self._device),
            attention_mask=(positions_BT >= 0).long(),
            position_ids=positions_BT[:, -n_new:].clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = outputs.logits[:, -1]
        return logits_BV

    def _draw(self, rows: Sequence[DecodingRow], logits_BV: torch.Tensor) -> None:
        by_options: dict[SamplingOptions, list[int]] = {}
        for index, row in enumerate(rows):
            by_options.setdefault(row.request.options, []).append(index)
        for options, indices in by_options.items():
            chosen = [rows[index] for index in indices]
            drawn = draw(
                logits_BV if len(indices) == len(rows) else logits_BV[indices],
                options,
                [row.ids for row in chosen],
                [row.generator for row in chosen],
            )
            for row, token, logprob in zip(chosen, drawn.tokens, drawn.logprobs, strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)

    def _take_finished(self) -> list[DecodingRow]:
        finished = [row for row in self._rows if row.finish_reason is not None]
        if finished:
            self._keep([row for row in self._rows if row.finish_reason is None])
        return finished

    def _keep(self, rows: list[DecodingRow]) -> None:
        """Drop all other rows from the cache, and the columns that are padding in all that stay."""
        if len(rows) == len(self._rows):
            return
        if not rows:
            self._rows, self._cache = [], empty_cache(self._model)
            return
        kept = set(rows)
        indices = torch.tensor([i for i, row in enumerate(self._rows) if row in kept], device=self._device)
        # the last token is not in the cache yet
        width = max(len(row.ids) for row in rows) - 1
        for layer in self._cache.layers:
            if isinstance(layer, DynamicLayer):
                layer.keys = layer.keys[indices, :, -width:]
                layer.values = layer.values[indices, :, -width:]
            for states in _states(layer):
                states.update({number: state[indices] for number, state in states.items() if state is not None})
        self._rows = rows

    def _merge(self, rows: list[DecodingRow], cache: Cache) -> None:
        """Put freshly read rows under those that decode, aligned at the last column."""
        if self._rows:
            for layer, fresh in zip(self._cache.layers, cache.layers, strict=True):
                if isinstance(layer, DynamicLayer):
                    layer.keys = _stacked(layer.keys, fresh.keys)
                    layer.values = _stacked(layer.values, fresh.values)
                for states, joining in zip(_states(layer), _states(fresh), strict=True):
                    for number, state in joining.items():
                        if state is not None:
                            states[number] = torch.cat([states[number], state])
        else:
            self._cache = cache
        self._rows = [*self._rows, *rows]


def _stacked(upper_BHTD: torch.Tensor, lower_BHTD: torch.Tensor) -> torch.Tensor:
    """Join two batches.

    The narrower one is padded with zeros on the left, where the mask hides them.
    """
    width = max(upper_BHTD.shape[2], lower_BHTD.shape[2])
    return torch.cat(
        [torch.nn.functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in (upper_BHTD, lower_BHTD)]
    )


def _states(layer: Any) -> tuple[dict[int, Any], ...]:
    """Return the states of a layer that keeps any, a row of the batch in each row; some are not used (None)."""
    return (layer.conv_states, layer.recurrent_states) if isinstance(layer, LinearAttentionLayer) else ()


def empty_cache(model: Any) -> Cache:
    """Return a cache for this model, or refuse a model whose cache is of another kind.

    Attention with a sliding window keeps all keys here, as the mask hides those that are too old.
    """
    config = model.config.get_text_config()
    layers = DynamicCache(config=config).layers
    if not any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return DynamicCache()
    if not any(isinstance(layer, DynamicLayer) for layer in layers):
        raise ModelError(
            f"engine transformers decodes with a key-value cache, but each of the {len(layers)} layers of "
            f"{type(model).__name__} keeps a recurrent state only. Use engine vllm_colocate or vllm_server."
        )
    return Cache(layers=[layer if isinstance(layer, LinearAttentionLayer) else DynamicLayer() for layer in layers])


def bound_time_steps_as_trained(model: Any) -> None:
    """Let Mamba-2 layers bound their time steps as the model's config says: in decoding nothing else does.

    Nemotron-H of Transformers 5.17 to 5.19 bounds them in whole passes by `time_step_min`, which is where weights start.
    """
    for module in model.modules():
        bounds = getattr(module, "time_step_limit", None)
        if bounds is None or bounds[0] == 0:
            continue
        module.time_step_limit = tuple(getattr(module.config, "time_step_limit", None) or bounds)
        if module.time_step_limit[0] > 0:
            raise ModelError(
                f"{type(module).__name__} raises time steps to {module.time_step_limit[0]} when it reads a whole sequence "
                f"and not when it decodes, so no engine samples from the policy that would be trained; train another model."
            )


_KEPT = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def _refuse_other_caches(cache: Cache, model: Any) -> None:
    other = {type(layer).__name__ for layer in cache.layers if type(layer) not in _KEPT}
    if other or not cache.layers or not cache.get_seq_length():
        raise ModelError(
            f"engine transformers decodes with a key-value cache, which {type(model).__name__} does not keep "
            f"(found: {', '.join(sorted(other)) or 'none'}). Use engine vllm_colocate or vllm_server."
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    tokens: list[int]
    logprobs: list[float]


def draw(
    logits_BV: torch.Tensor,
    options: SamplingOptions,
    seen_ids: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
) -> SampledToken:
    """Draw one token per row.

    `seen_ids` (all ids of a row so far) matter for the repetition penalty only.
    """
    logprobs_BV = processed_logprobs(logits_BV.float(), options, seen_ids)
    if options.temperature < _GREEDY_BELOW:
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        tokens_B = _exponential_race(logprobs_BV, generators)
    drawn_B = logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
    return SampledToken(tokens_B.tolist(), drawn_B.tolist())


def processed_logprobs(
    logits_BV: torch.Tensor, options: SamplingOptions, seen_ids: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return log-probabilities of the distribution that `options` describe.

    Tokens that cannot be drawn have -inf.
    """
    if options.repetition_penalty != 1.0:
        logits_BV = _penalised(logits_BV, seen_ids, options.repetition_penalty)
    if options.temperature < _GREEDY_BELOW:
        return logits_BV.log_softmax(dim=-1)
    logits_BV = logits_BV / options.temperature
    if options.min_p > 0.0:
        probs_BV = logits_BV.softmax(dim=-1)
        too_small_BV = probs_BV < options.min_p * probs_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(too_small_BV, -torch.inf)
    if 0 < options.top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(options.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if options.top_p < 1.0:
        logits_BV = _nucleus(logits_BV, options.top_p)
    return logits_BV.log_softmax(dim=-1)


def _nucleus(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to at least `top_p`."""
    ascending = logits_BV.sort(dim=-1)
    below_BV = ascending.values.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    below_BV[:, -1] = False  # the most likely token always stays
    return logits_BV.masked_fill(below_BV.scatter(-1, ascending.indices, below_BV), -torch.inf)


def _penalised(logits_BV: torch.Tensor, seen_ids: Sequence[Sequence[int]], penalty: float) -> torch.Tensor:
    """Make every token that was seen less likely: positive logits divided,
    negative ones multiplied.
    """
    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    for row, ids in enumerate(seen_ids):
        seen_BV[row, torch.tensor(list(ids), dtype=torch.long, device=logits_BV.device)] = True
    penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalised_BV, logits_BV)


def _exponential_race(logprobs_BV: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw from each row with its own generator:
    of waiting times with rates p the shortest is token i with p_i.
    """
    times_BV = torch.empty_like(logprobs_BV)
    for times_V, generator in zip(times_BV, generators, strict=True):
        times_V.exponential_(generator=generator)
    return (logprobs_BV.exp() / times_BV).argmax(dim=-1)
