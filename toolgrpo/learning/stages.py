"""From a graded batch to the loss: the stages between TRL's scoring and its loss, in their order.

A stage is a pure function of the batch and of what is known of its episodes. `WORTH` says what each
token is worth; `LOSS` says how much of that the loss sees. Nobody else writes advantages, masks,
weights or the denominator of a loss.

A row whose advantage is 0 on every token adds nothing to the loss of a policy: its pass can be left
out, where nothing else wants it. `NEEDS_EVERY_ROW` is the list of what does.

Invariant: without options of ours and without dropped episodes TRL's own tensors go through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from toolgrpo.learning.advantages import is_dead
from toolgrpo.learning.correction import (
    Correction,
    EpisodeWeights,
    kept,
    log_ratios,
    truncated,
    weights_of_rows,
)
from toolgrpo.learning.shaping import Member, Shaping
from toolgrpo.learning.turns import Credit, EpisodeTurns, turn_advantages, turn_metrics

TOKEN_LOSSES = frozenset(("dapo", "cispo", "vespo"))  # divided by the loss tokens of all processes
ROW_LOSSES = frozenset(("grpo", "dr_grpo", "sapo", "luspo"))  # divided by a number of rows

NEEDS_EVERY_ROW: dict[str, Callable[[Any], bool]] = {
    "beta holds every row to the reference model": lambda args: args.beta != 0,
    "the entropy bonus is taken over every row": lambda args: args.entropy_coef != 0 or args.use_adaptive_entropy,
    "top_entropy_quantile ranks the tokens of every row": lambda args: args.top_entropy_quantile < 1,
}
"""What gives a row without an advantage a part in the loss: the reason, and whether a config asks
for it. The load-balancing loss of a mixture of experts is known to the trainer alone, for its
coefficient may stand in the model.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Input of TRL's loss: this process's part of a batch of B episodes of up to T tokens."""

    advantages: torch.Tensor  # (B,), or (B, T)
    mask: torch.Tensor  # (B, T), the tokens that are trained on
    n_read: torch.Tensor  # (B,), the tokens that a pass reads
    denominator: torch.Tensor
    old_logps: torch.Tensor | None = None  # (B, T), of the old policy
    engine_logps: torch.Tensor | None = None  # (B, T)
    weights: torch.Tensor | None = None  # (B, 1) or (B, T), by which the loss is multiplied
    of_turns: tuple[tuple[float, ...], ...] | None = None  # advantages of each episode's turns, where these differ
    weighted: tuple[EpisodeWeights, ...] = ()  # what the correction does, for those who watch
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def live(self) -> torch.Tensor:
        """Return for each row, (B,), whether a token that is trained has an advantage."""
        return is_live(self.advantages, self.mask)

    def told(self, **metrics: float) -> TrainBatch:
        """Return the batch with these metrics, too."""
        return replace(self, metrics={**self.metrics, **metrics})


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRule:
    """Rule by which a run learns from its batches."""

    shaping: Shaping
    credit: Credit
    correction: Correction
    skips_rows: bool  # those without an advantage

    @property
    def dead_by_rewards_alone(self) -> bool:
        """Return whether a group whose combined rewards are all alike has no advantage, whatever else.

        Not where the rewards are normalised one by one: TRL compares those of the whole batch then.
        """
        return not self.shaping.normalize_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the episodes of a batch. `members` and `turns` are those of all processes, group by
    group, and `own` is this process's part of them; no `turns`: each has the advantage of its episode.
    """

    rule: LearningRule
    group_size: int
    members: Sequence[Member]
    own: slice
    turns: Sequence[EpisodeTurns] = ()
    spans: Sequence[Sequence[tuple[int, int]]] = ()  # of the tokens of each turn of each own episode
    unread: torch.Tensor | None = None  # (B,), rows that the old policy has not read
    summed: Callable[[torch.Tensor], torch.Tensor] = lambda of_one_process: of_one_process  # over all processes


Stage = Callable[[TrainBatch, Facts], TrainBatch]


def is_live(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return for each row (B,) whether any token that is trained has an advantage, (B,) or (B, T)."""
    per_token = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    return ((per_token != 0) & (mask != 0)).any(dim=1)


def drops(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """No token of a dropped episode is trained on."""
    if all(member.drop is None for member in facts.members):
        return batch
    kept_rows = [member.drop is None for member in facts.members[facts.own]]
    return replace(batch, mask=batch.mask * torch.tensor(kept_rows, device=batch.mask.device).unsqueeze(1))


def estimator(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Rewards less their penalties become advantages; TRL's own stay where nothing else is asked for."""
    if facts.rule.shaping.is_of_trl:
        return batch
    shaped = facts.rule.shaping.advantages(facts.members, facts.group_size)
    own = torch.tensor(shaped.advantages[facts.own]).to(batch.advantages)
    return replace(batch, advantages=own).told(**shaped.metrics)


def dead_groups(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """The advantages of a dead group are exactly 0: TRL's are what rounding left there."""
    dead = torch.tensor(dead_rows(facts), device=batch.advantages.device)
    return replace(batch, advantages=batch.advantages.masked_fill(dead, 0.0))


def turn_credit(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Each turn's tokens have its own advantage; tokens of no turn have 0."""
    if not facts.turns:
        return batch
    outcomes = facts.rule.shaping.rewards(facts.members, facts.group_size)
    turns = [replace(one, total=total) for one, total in zip(facts.turns, outcomes, strict=True)]
    advantages = turn_advantages(turns, facts.group_size, facts.rule.credit.scale)
    own = advantages[facts.own]
    by_token = torch.zeros(batch.mask.shape, dtype=batch.advantages.dtype)
    for row, (spans, of_turns) in enumerate(zip(facts.spans, own, strict=True)):
        for (start, end), value in zip(spans, of_turns, strict=True):
            by_token[row, start:end] = value
    metrics = turn_metrics(turns, advantages, facts.group_size)
    return replace(batch, advantages=by_token.to(batch.advantages.device), of_turns=tuple(own)).told(**metrics)


def correction(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Tokens that another policy drew are weighted, or measured by the engine's own log-probabilities."""
    rule = facts.rule.correction
    if rule.method == "bypass":
        return batch if batch.engine_logps is None else replace(batch, old_logps=batch.engine_logps)
    if batch.weights is None or batch.old_logps is None or batch.engine_logps is None:
        return batch
    log_ratio = log_ratios(batch.old_logps, batch.engine_logps, batch.mask)
    weights = batch.weights
    if rule.method == "geo_tis":
        weights = truncated(log_ratio, rule.cap) * kept(log_ratio, batch.mask, rule.rule).unsqueeze(1)
    trained = batch.mask.bool()
    lost = trained.any(dim=1) & ~((weights.expand(trained.shape) != 0) & trained).any(dim=1)
    lost_rows, rows = facts.summed(torch.stack([lost.sum(), torch.tensor(len(lost), device=lost.device)])).tolist()
    read = ~batch.old_logps.isnan().all(dim=1)
    weighted = weights_of_rows(log_ratio[read], weights[read], batch.mask[read])
    batch = replace(batch, weights=weights, weighted=tuple(weighted))
    return batch.told(**{"sampling/dropped_episodes": lost_rows / rows})


def left_out(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Rows that the old policy has not read have numbers, and those that `geo_tis` leaves out no advantage."""
    if facts.unread is not None and batch.old_logps is not None:
        unread = facts.unread.to(batch.advantages.device)
        if (batch.live & unread).any():
            raise RuntimeError(
                "a row that the old policy has not read has an advantage; whatever gives one to a group whose rewards are "
                "all alike must be known to `dead_by_rewards_alone`"
            )
        batch = replace(batch, old_logps=batch.old_logps.masked_fill(unread.unsqueeze(1), 0.0))
    if facts.rule.correction.method != "geo_tis" or batch.weights is None:
        return batch
    masked = ~((batch.weights != 0) & (batch.mask != 0)).any(dim=1)
    advantages = batch.advantages
    return replace(
        batch, advantages=advantages.masked_fill(masked if advantages.dim() == 1 else masked.unsqueeze(1), 0.0)
    )


def denominator(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """The loss is divided by the tokens of all rows, those without an advantage too, over all processes."""
    live = batch.live
    counts = (torch.tensor(len(live), device=live.device), live.sum(), batch.mask.sum())
    read = (batch.n_read.sum(), batch.n_read[live].sum())
    rows, live_rows, tokens, read_tokens, live_read = facts.summed(torch.stack([*counts, *read]))
    skips = facts.rule.skips_rows
    shares = {
        "signal/rows_skipped": 1 - (live_rows / rows).item() if skips else 0.0,
        "signal/tokens_skipped": 1 - (live_read / read_tokens).item() if skips else 0.0,
    }
    return replace(batch, denominator=tokens).told(**shares)


WORTH: tuple[Stage, ...] = (drops, estimator, dead_groups, turn_credit)
LOSS: tuple[Stage, ...] = (correction, left_out, denominator)


def applied(stages: Sequence[Stage], batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Return what these stages make of a batch."""
    for stage in stages:
        batch = stage(batch, facts)
    return batch


def dead_rows(facts: Facts) -> list[bool]:
    """Return which of this process's rows are of a dead group, by the combined rewards of all processes.

    None is where an advantage is no function of the combined reward.
    """
    if not facts.rule.dead_by_rewards_alone:
        return [False] * len(facts.members[facts.own])
    combined, size = facts.rule.shaping.rewards(facts.members, facts.group_size), facts.group_size
    dead = [is_dead(combined[start : start + size]) for start in range(0, len(combined), size)]
    return [dead[place // size] for place in range(len(combined))][facts.own]


def why_every_row(args: Any) -> str | None:
    """Return what needs the rows without an advantage in the training pass, or None."""
    if args.skip_dead_rows == "off":
        return "skip_dead_rows is off"
    return next((reason for reason, asks in NEEDS_EVERY_ROW.items() if asks(args)), None)
