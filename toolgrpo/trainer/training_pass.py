"""The training pass: how much it reads at a time, and of which rows. The trainer's constructor opens it; `trl/calls.py`
says of each forward pass what it reads: live rows only, and a row for each segment of an episode.

It is opened for the longest rows, by what the model needs for each token (`memory.py`) and the memory that is free now.

Live rows have an advantage on a token that is trained. What a dead row adds to the loss is 0 times a function of its
log-probabilities. So its pass is left out and a number stands in for each of them; the loss itself sees the whole
batch, and all its denominators are those of the full pass, whichever they are.

A row of TRL's batch stays an episode, also where its tokens are several sequences (`toolgrpo/episode/segments.py`). Only the
forward pass reads them apart: `SegmentedRows.score` makes a row of every segment, lets any pass score these, and puts
log-probabilities and entropies where the episode's row has the tokens. So advantages, weights, masks and denominators
are those of an episode, whatever the loss; and what segments have in common is a shared prefix like any other. Where a
token is no segment's own (the prompts of later ones) there stands 0; no loss reads it.

Every process makes the same number of forward and backward calls, as DDP, FSDP and ZeRO need: a process without a live
row reads two tokens, of which one is scored, with weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from accelerate.utils import gather_object

from toolgrpo.build import Parts
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.learning.stages import rows_may_move
from toolgrpo.models.adapter_step import join_adapters
from toolgrpo.shared_pass.scoring import SharedPass, most_in_a_pass, unsupported_model
from toolgrpo.shared_pass.torch_seam import attention_name
from toolgrpo.support.process_setup import map_large_blocks
from toolgrpo.tools import Toolbox
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.memory import Device, PassShape, RunShape, free_bytes, keeps_activations, most_tokens

Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities and entropies, both (B, T), and a loss of the model's own."""


@dataclass(frozen=True)
class RowChoice:
    """Rows of a micro-batch to score, and the stand-ins for the others."""

    live: torch.Tensor  # (B,)
    stand_in: torch.Tensor | float  # log-probabilities (B, T), or one for all

    def score(
        self,
        score: Callable[..., Scores],
        input_ids: torch.Tensor,  # (B, P + T)
        attention_mask: torch.Tensor,  # (B, P + T)
        logits_to_keep: int,  # T
        **kwargs: Any,
    ) -> Scores:
        """Score the live rows; the results have the places that a pass over all rows gives them.

        A batch that holds more than text is scored whole.
        """
        rows = self.live.nonzero()[:, 0]
        only_text = not any(isinstance(value, torch.Tensor | list) for value in kwargs.values())
        if len(rows) == len(self.live) or not only_text:
            return score(input_ids, attention_mask, logits_to_keep, **kwargs)
        if len(rows) == 0:
            end = input_ids.shape[1] - logits_to_keep + 1  # of the prompt's last token and the one after it
            two = input_ids[:1, end - 2 : end]
            logps, entropies, _ = score(two, torch.ones_like(two), 1, **kwargs)
            # 0 times, and not left out: backward hooks of DDP and ZeRO wait for every parameter's gradient
            logps, entropies = 0 * logps, None if entropies is None else 0 * entropies
            whole = self._dead_logps(logps, logits_to_keep) + logps
            return whole, None if entropies is None else entropies.expand_as(whole), None
        logps, entropies, _ = score(input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
        whole = self._dead_logps(logps, logits_to_keep).index_put((rows,), logps)
        if entropies is None:
            return whole, None, None
        return whole, torch.zeros_like(whole, dtype=entropies.dtype).index_put((rows,), entropies), None

    def _dead_logps(self, like: torch.Tensor, width: int) -> torch.Tensor:
        if isinstance(self.stand_in, torch.Tensor):
            return self.stand_in.to(like.dtype)
        return like.new_full((len(self.live), width), self.stand_in)


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
            # the idle rows take part with weight 0, so that their backward pass is made in every process
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


def open_pass(given: Parts, rows: Any, say: Callable[[str], None]) -> SharedPass:
    """Return the training pass that the config asks for; on a CPU, cut to what fits into memory."""
    args: ToolGRPOConfig = given.config
    policy, free = given.policy, free_bytes()
    if not (policy.backend.splits_parameters or args.torch_compile):  # a compiler joins them itself
        join_adapters(policy.model)
    shape = PassShape.of(policy.model, checkpointing=args.gradient_checkpointing)
    is_whole = policy.device.type == "cpu" and not policy.backend.splits_parameters
    sizes = PassSizes.of(given, rows) if is_whole else None
    if sizes is None or shape is None or free is None:
        return args.shared_pass()
    if shape.is_large(min(sizes.largest, args.max_tokens_per_pass or sizes.largest)):
        map_large_blocks()
    most = most_tokens(shape, **sizes._asdict(), free=free, given=args.max_tokens_per_pass, say=say)
    # One for all: the forward passes of a batch are as many in every process.
    found = [one for one in gather_object([most]) if one is not None]
    return SharedPass(mode=args.prefix_sharing, max_tokens=min(found, default=None))


class PassSizes(NamedTuple):
    """The most tokens of a training pass, those of one row, and whether prompts are shared."""

    largest: int
    of_a_row: int
    shares: bool

    @classmethod
    def of(cls, given: Parts, rows: Any) -> Self | None:
        """Return the sizes for these rows; None for those of a stream."""
        args, limits = given.config, given.config.episode_limits()
        sized = rows if hasattr(rows, "__len__") else ()
        window = given.prompts.window(sized, limits.max_completion_length, given.prompt_room)
        if window is None:
            return None
        whole = args.prefix_sharing == "off" or args.torch_compile or unsupported_model(given.policy.model) is not None
        n_rows: int = args.per_device_train_batch_size
        group: int = args.num_generations

        def spanned(n: int) -> int:
            """Return how many groups n adjacent rows can have a part in."""
            return -(-(n + group - math.gcd(n, group)) // group)

        # Rows of a prompt are put together among the passes of one step alone.
        gathered = args.gradient_accumulation_steps % args.steps_per_generation == 0 and rows_may_move(args)
        shuffled = min(n_rows, spanned(n_rows * args.steps_per_generation))
        n_prompts = n_rows if whole else spanned(n_rows) if gathered else shuffled
        prompt, completion = window.longest_prompt + window.room, window.max_completion_length
        return cls(n_prompts * prompt + n_rows * completion, prompt + completion, not whole)


def settled_checkpointing(given: Parts, engine: str, rows: Any, say: Callable[[str], None]) -> Parts:
    """Return the parts with `gradient_checkpointing: auto` settled; until here TRL took it for true."""
    if given.config.gradient_checkpointing != "auto":
        return given
    # One for all: processes that differed would make other collective calls in their backward passes.
    keeps = all(gather_object([may_keep_activations(given, engine, rows, say)]))
    return replace(given, config=given.config.changed(gradient_checkpointing=not keeps))


def may_keep_activations(given: Parts, engine: str, rows: Any, say: Callable[[str], None]) -> bool:
    """Return whether a training pass of this process may keep all activations (`gradient_checkpointing: auto`).

    Not where the sizes are not known beforehand: agents, environments, compaction, shared-out weights, experts.
    """
    args, tools, policy = given.config, given.toolbox, given.policy
    config = policy.base_model.config
    grows = given.player or args.context or (isinstance(tools, Toolbox) and tools.has_environment)
    odd = getattr(config.get_text_config(), "num_experts_per_tok", None) or attention_name(config) == "eager"
    is_plain = policy.backend.kind in ("NO", "MULTI_CPU", "MULTI_GPU") and not (grows or odd)
    sizes, n_processes = PassSizes.of(given, rows) if is_plain else None, policy.backend.n_processes
    run, tokens = None, 0
    if sizes is not None:
        tokens = sizes.largest
        if args.prefix_sharing == "auto" and sizes.shares:
            unshared = args.per_device_train_batch_size * sizes.of_a_row
            tokens = min(unshared, most_in_a_pass(policy.device.type, tokens))
        if args.max_tokens_per_pass and sizes.shares and n_processes == 1:
            tokens = min(tokens, max(args.max_tokens_per_pass, sizes.of_a_row))
        asked: dict[str, Any] = {"dtype": policy.dtype, "engine": engine, "at_a_time": args.engine_options().max_rows}
        run = RunShape.of(policy.model, args, context=sizes.of_a_row, **asked)
    free, device = free_bytes(policy.device), Device.here(policy.device)
    return keeps_activations(run, device, tokens=tokens, free=free, n_processes=n_processes, say=say)
