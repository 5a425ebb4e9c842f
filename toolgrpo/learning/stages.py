"""From a graded batch to the loss: the stages between TRL's scoring and its loss, in their order.

A stage is a pure function of the batch and of what is known of its episodes. `WORTH` says what each
token is worth; then come the stages of the user, behind checks; `LOSS` says how much of that the loss
sees. Nobody else writes advantages, masks, weights or the denominator of a loss.

A row whose advantage is 0 on every token adds nothing to the loss of a policy: its pass can be left
out, where nothing else wants it. `NEEDS_EVERY_ROW` is the list of what does.

Invariant: without options of ours, stages of the user and dropped episodes TRL's own tensors go through untouched.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from toolgrpo.errors import ConfigError, PluginError, RewardError
from toolgrpo.learning.advantages import ESTIMATORS, Member, Shaping, grouped_advantages, in_groups, is_dead
from toolgrpo.learning.correction import Correction, EpisodeWeights, kept, log_ratios, truncated, weights_of_rows
from toolgrpo.rewards.guard import RewardGuard, short
from toolgrpo.rollout.batch import Scored
from toolgrpo.support.plugin_files import import_file

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

LOSSES_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
"""The losses of TRL that take an advantage for each token."""

_EXAMPLE = "def stage(batch, facts): return batch"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Input of TRL's loss: this process's part of a batch of B episodes of up to T tokens after their prompts.

    A stage of yours is a function `(TrainBatch, Facts) -> TrainBatch`. Do not change the tensors: return
    `dataclasses.replace(batch, ...)` with other ones, of the same device and type. It may change

    * `rewards`, with the advantages that follow from them: `batch.with_rewards(facts, rewards)`;
    * `advantages`: (B,), or (B, T) for an advantage of each token, in a loss that takes these;
    * `mask`, where it takes tokens out of the loss: put 0 for 1;
    * `turn_rewards` and `turn_advantages`, which are recorded and shown;
    * `metrics`, by `batch.told(name=number)`, the same names in every process.

    It comes after dropped episodes (mask 0), `--advantage` and dead groups (advantages of 0), and before the
    off-policy correction and the denominator, which follow from what it returns. Stages run in their order, once
    a batch, also where several steps or passes use it. They keep nothing from one batch to the next: nothing of
    a stage is in a checkpoint, so a resumed run goes on as it would have gone.
    """

    advantages: torch.Tensor
    mask: torch.Tensor  # (B, T), the tokens that are trained on: 1 on tokens that the model sampled
    n_read: torch.Tensor  # (B,), the tokens that a pass reads
    denominator: torch.Tensor
    rewards: tuple[float | None, ...] = ()  # the combined reward of each row; None: it is not scored
    old_logps: torch.Tensor | None = None  # (B, T), of the old policy
    engine_logps: torch.Tensor | None = None  # (B, T)
    weights: torch.Tensor | None = None  # (B, 1) or (B, T), by which the loss is multiplied
    turn_rewards: tuple[tuple[float, ...], ...] | None = None  # for each row, one for each turn
    turn_advantages: tuple[tuple[float, ...], ...] | None = None  # likewise, where turns have their own
    weighted: tuple[EpisodeWeights, ...] = ()  # what the correction does, for those who watch
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def live(self) -> torch.Tensor:
        """Return for each row, (B,), whether a token that is trained has an advantage."""
        return is_live(self.advantages, self.mask)

    def told(self, **metrics: float) -> TrainBatch:
        """Return the batch with these metrics, too."""
        return replace(self, metrics={**self.metrics, **metrics})

    def with_rewards(self, facts: Facts, rewards: Iterable[float | None]) -> TrainBatch:
        """Return the batch with these rewards, and the advantages that the run's estimator makes of them.

        Every process must call it alike. Of the rewards of a dead group these are 0.
        """
        own = tuple(rewards)
        if facts.rule.shaping.normalize_first:
            raise ConfigError(
                "this stage changes the sum of an episode's rewards, and multi_objective_aggregation normalize_then_sum "
                "makes none; use sum_then_normalize, or leave the stage out"
            )
        return replace(self, rewards=own, advantages=facts.advantages(facts.gathered(own)).to(self.advantages))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRule:
    """Rule by which a run learns from its batches."""

    shaping: Shaping
    correction: Correction
    skips_rows: bool  # those without an advantage
    leaves_cut_out: bool = False  # episodes that ended by a limit
    stages: tuple[Stage, ...] = ()  # of the user

    @property
    def dead_by_rewards_alone(self) -> bool:
        """Return whether a group whose combined rewards are all alike has no advantage before the user's stages.

        Not where the rewards are normalised one by one: TRL compares those of the whole batch then.
        """
        return not self.shaping.normalize_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the episodes of a `TrainBatch`, for stages.

    * `episodes[i]` is the episode of row i: its data `row`, its `trajectory` with its `turns` (each from token
      `start` to `end` of the row), its `rewards`, `total` and `drop`.
    * `group_size`, `max_completion_length` and `scale` (by what the estimator divides: group, batch or none) are
      those of the run.
    * `gathered(values)` returns such values, one for each row, of the rows of all processes, group by group; and
      `gathered(values)[facts.own]` is this process's part again. Every process must call it equally often.

    The rows are those of one process. Where `per_device_train_batch_size * steps_per_generation` is no multiple of
    `num_generations`, a group is shared by several processes: whatever compares episodes of a group must gather
    them. Groups have `group_size` rows and stand one after the other, in the order of `episodes`.

    The rest is for the package's own stages.
    """

    episodes: Sequence[Scored] = ()
    group_size: int
    max_completion_length: int = 0
    gathered: Callable[[Sequence[Any]], list[Any]] = list
    own: slice
    rule: LearningRule
    members: Sequence[Member]  # of all processes
    unread: torch.Tensor | None = None  # (B,), rows that the old policy has not read
    summed: Callable[[torch.Tensor], torch.Tensor] = lambda of_one_process: of_one_process  # over all processes

    @property
    def scale(self) -> str:
        return self.rule.shaping.scale if ESTIMATORS[self.rule.shaping.advantage].divides_by_std else "none"

    def advantages(self, rewards_of_all: Sequence[float | None]) -> torch.Tensor:
        """Return the advantages of this process's rows, by the run's estimator."""
        shaping = self.rule.shaping
        return torch.tensor(
            grouped_advantages(rewards_of_all, self.group_size, shaping.advantage, shaping.scale)[self.own]
        )


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


def cut_episodes(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """No token of an episode that a limit ended is trained on, where the run leaves these out.

    TRL would go by the last token, which ends a turn also where the episode was to go on.
    """
    if not facts.rule.leaves_cut_out:
        return batch
    whole = [one.trajectory.ended_itself for one in facts.episodes]
    return replace(batch, mask=batch.mask * torch.tensor(whole, device=batch.mask.device).unsqueeze(1))


def estimator(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Rewards become advantages; TRL's own stay where its estimator is asked for."""
    batch = replace(batch, rewards=tuple(combined_rewards(facts)[facts.own]))
    if facts.rule.shaping.advantage == "grpo":
        return batch
    return replace(batch, advantages=facts.advantages(combined_rewards(facts)).to(batch.advantages))


def dead_groups(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """The advantages of a dead group are exactly 0: TRL's are what rounding left there."""
    dead = torch.tensor(dead_rows(facts), device=batch.advantages.device)
    return replace(batch, advantages=batch.advantages.masked_fill(dead, 0.0))


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
    read = ~batch.old_logps.isnan().all(dim=1)
    lost = read & trained.any(dim=1) & ~((weights.expand(trained.shape) != 0) & trained).any(dim=1)
    lost_rows, rows = facts.summed(torch.stack([lost.sum(), read.sum()])).tolist()
    weighted = weights_of_rows(log_ratio[read], weights[read], batch.mask[read])
    batch = replace(batch, weights=weights, weighted=tuple(weighted))
    return batch.told(**{"sampling/dropped_episodes": lost_rows / rows if rows else 0.0})


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


WORTH: tuple[Stage, ...] = (drops, cut_episodes, estimator, dead_groups)
LOSS: tuple[Stage, ...] = (correction, left_out, denominator)


def applied(stages: Sequence[Stage], batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Return what these stages make of a batch."""
    for stage in stages:
        batch = stage(batch, facts)
    return batch


def combined_rewards(facts: Facts) -> list[float | None]:
    """Return the combined reward of each episode of all processes."""
    return facts.rule.shaping.rewards(facts.members, facts.group_size)


def dead_rows(facts: Facts) -> list[bool]:
    """Return which of this process's rows are of a dead group, by the combined rewards of all processes.

    None is where an advantage is no function of the combined reward.
    """
    if not facts.rule.dead_by_rewards_alone:
        return [False] * len(facts.members[facts.own])
    groups = in_groups(combined_rewards(facts), facts.group_size)
    return [dead for group in groups for dead in [is_dead(group)] * len(group)][facts.own]


def why_every_row(args: Any) -> str | None:
    """Return what needs the rows without an advantage in the training pass, or None."""
    if args.skip_dead_rows == "off":
        return "skip_dead_rows is off"
    return next((reason for reason, asks in NEEDS_EVERY_ROW.items() if asks(args)), None)


def rows_may_move(args: Any) -> bool:
    """Return whether the loss is a sum over rows: no mean over those of one micro-batch, and no choice among them."""
    of_several = args.entropy_coef != 0 or args.use_adaptive_entropy or args.top_entropy_quantile < 1
    return args.loss_type in TOKEN_LOSSES | ROW_LOSSES and not of_several


def check_by_token(args: Any) -> None:
    """Raise ConfigError unless the loss takes an advantage for each token."""
    why = None
    if args.loss_type not in LOSSES_BY_TOKEN:
        why = f"loss_type {args.loss_type} takes one for each episode; use {', '.join(LOSSES_BY_TOKEN)}"
    elif args.importance_sampling_level != "token":
        why = f"importance_sampling_level {args.importance_sampling_level} has one ratio for all tokens; use token"
    elif args.off_policy_mask_threshold is not None:
        why = "off_policy_mask_threshold drops a whole episode by the sign of its one advantage; leave it out"
    if why is not None:
        raise ConfigError(f"a stage gave each token its own advantage, but {why}")


@dataclass(frozen=True)
class UserStage:
    """A stage of the user, behind checks. `source` is its file; `timeout_s` is the config's `reward_timeout`."""

    function: Callable[..., Any]
    source: str
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise PluginError(
                f"{self.source}: a stage must be a function, as in `{_EXAMPLE}`; got {short(self.function)}"
            )
        try:
            inspect.signature(self.function).bind(None, None)
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"{self.source}: {self.name} must take batch and facts, as in `{_EXAMPLE}`: {error}"
            ) from None

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, batch: TrainBatch, facts: Facts) -> TrainBatch:
        guard = RewardGuard(f"stage {self.name} ({self.source})", self.source, self.timeout_s, logger.warning)
        return guard.ask(lambda: self.function(batch, facts), lambda after: self._checked(batch, after))

    def _checked(self, before: TrainBatch, after: Any) -> TrainBatch:
        if not isinstance(after, TrainBatch):
            raise self._wrong(f"returned {short(after)}; return the batch, or dataclasses.replace(batch, ...)")
        if after.advantages.shape not in (before.mask.shape, before.mask.shape[:1]):
            raise self._wrong(
                f"returned advantages of shape {tuple(after.advantages.shape)}; they must be one for each of the "
                f"{len(before.mask)} rows, or one for each token, {tuple(before.mask.shape)}"
            )
        if not after.advantages.isfinite().all():
            raise self._wrong("returned an advantage that is not a finite number; for nothing to learn, return 0")
        if after.mask.shape != before.mask.shape or ((after.mask != 0) & (before.mask == 0)).any():
            raise self._wrong("put tokens into the mask; a stage may only take some out, by 0 for 1")
        return after

    def _wrong(self, what: str) -> RewardError:
        return RewardError(f"stage {self.name} ({self.source}) {what}")


def user_stages(
    files: Iterable[str], functions: Iterable[Any] = (), timeout_s: float | None = None
) -> tuple[Stage, ...]:
    """Return the stages of these files, then these functions, checked. A file has a list `STAGES`, or one function `stage`."""
    found = []
    for file in files:
        module = import_file(Path(file))
        stages = getattr(module, "STAGES", [module.stage] if hasattr(module, "stage") else None)
        if not isinstance(stages, list | tuple) or not stages:
            raise PluginError(
                f"{file} needs a function `stage` or a list of them, STAGES. Write one, e.g. `{_EXAMPLE}`"
            )
        found += [UserStage(one, file, timeout_s) for one in stages]
    return (*found, *(UserStage(one, "stages", timeout_s) for one in functions))
