"""The training pass over episodes of several segments: a row for each, and each token back in its place.

A row of TRL's batch stays an episode, also where its tokens are several sequences
(`toolgrpo/segments.py`). Only the forward pass reads them apart: `SegmentedRows.score` makes a row
of every segment, lets any pass score these, and puts log-probabilities and entropies where the
episode's row has the tokens. So advantages, weights, masks and denominators are those of an episode,
whatever the loss; and what segments have in common is a shared prefix like any other.

Where a token is no segment's own (the prompts of later ones) there stands 0; no loss reads it.

Every process makes the same number of forward calls, as FSDP and ZeRO-3 need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolgrpo.errors import ConfigError
from toolgrpo.trainer.live_rows import Scores
from toolgrpo.trajectory import Trajectory


@dataclass(frozen=True)
class SegmentedRows:
    """Starts of segments in the rows of a batch.

    `n_prompts` has, at the first token of a later segment, the number of tokens of its prompt; 0
    elsewhere. It travels with TRL's batch. `most` is the largest of a number in any process.
    """

    n_prompts: torch.Tensor  # (B, T)
    most: Callable[[int], int] = lambda n: n

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], device: torch.device) -> SegmentedRows:
        """Return where segments begin in these episodes."""
        width = max((len(one.ids) for one in trajectories), default=0)
        n_prompts = torch.zeros(len(trajectories), max(1, width), dtype=torch.long)
        for row, one in enumerate(trajectories):
            for at in one.segment_starts:
                n_prompts[row, at.start] = at.n_prompt
        return cls(n_prompts.to(device))

    def chosen(self, rows: torch.Tensor) -> SegmentedRows:
        """Return where segments begin in the rows of this mask, (B,)."""
        return replace(self, n_prompts=self.n_prompts[rows.to(self.n_prompts.device)])

    def score(
        self,
        score: Callable[..., Scores],
        input_ids: torch.Tensor,  # (B, P + T), prompts left padded, completions right padded
        attention_mask: torch.Tensor,  # (B, P + T)
        logits_to_keep: int,  # T
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Scores:
        """Score each segment by itself; the results have the places that the tokens have in the rows."""
        if not len(self.n_prompts):  # a process without a row to read reads two tokens instead
            return score(input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        if any(isinstance(value, torch.Tensor | list) for value in kwargs.values()):
            raise ConfigError(
                "a batch that holds more than text cannot hold episodes of several segments; leave `context` out"
            )
        n_rows, first = len(input_ids), input_ids.shape[1] - logits_to_keep
        pieces = self._pieces(attention_mask, first)
        n_scored = len(pieces)
        idle = _Piece(0, torch.tensor([first - 1]), torch.tensor([first]))
        # Nothing may be left to score here, or less than elsewhere, but every process makes its passes.
        n_wanted = max(1, n_scored if batch_size is None else self.most(n_scored))
        pieces += [idle] * (n_wanted - n_scored)
        prompt = max(len(piece.prompt) for piece in pieces)
        width = max(len(piece.own) for piece in pieces)
        ids = input_ids.new_zeros(len(pieces), prompt + width)
        read = torch.zeros_like(ids)
        for row, piece in enumerate(pieces):
            columns = torch.cat([piece.prompt, piece.own]).to(ids.device)
            start = prompt - len(piece.prompt)
            ids[row, start : start + len(columns)] = input_ids[piece.row, columns]
            read[row, start : start + len(columns)] = 1
        logps, entropies, own_loss = score(ids, read, width, batch_size=batch_size, **kwargs)

        def put_back(values: torch.Tensor) -> torch.Tensor:
            taken = read[:n_scored, prompt:].bool().to(values.device)
            places = torch.cat(
                [piece.row * logits_to_keep + piece.own - first for piece in pieces[:n_scored]] or [none]
            )
            whole = values.new_zeros(n_rows * logits_to_keep) + 0 * values[n_scored:].sum()
            return whole.index_put((places.to(values.device),), values[:n_scored][taken]).view(n_rows, logits_to_keep)

        none = torch.zeros(0, dtype=torch.long)
        return put_back(logps), None if entropies is None else put_back(entropies), own_loss

    def _pieces(self, attention_mask: torch.Tensor, first: int) -> list[_Piece]:
        """Return the segments that have tokens to score; `first` is the first column after the prompts."""
        read = attention_mask.cpu().bool()
        ends = (first + read[:, first:].sum(dim=1)).tolist()
        pieces = []
        for row, (end, n_prompts) in enumerate(zip(ends, self.n_prompts.cpu(), strict=True)):
            columns = [column for column in n_prompts.nonzero()[:, 0].tolist() if first + column < end]
            starts = [first + column for column in columns]
            owns = [first, *(first + column + int(n_prompts[column]) for column in columns)]
            prompts = [
                read[row, :first].nonzero()[:, 0],
                *(torch.arange(*of) for of in zip(starts, owns[1:], strict=True)),
            ]
            for prompt, own, stop in zip(prompts, owns, [*starts, end], strict=True):
                if own < stop:
                    pieces.append(_Piece(row, prompt, torch.arange(own, stop)))
        return pieces


@dataclass(frozen=True)
class _Piece:
    """One segment in its row: the columns of its prompt, and of its own tokens."""

    row: int
    prompt: torch.Tensor
    own: torch.Tensor
