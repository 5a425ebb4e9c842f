"""Turn-level credit assignment: each turn of an episode gets its own advantage, as a stage.

    --stage_fn recipes/stages/turn_credit.py         rewards by turn: 1/n for each of the row's n gold calls

    G[i, t] = r[i, t] + G[i, t + 1]          G[i, last] = r[i, last] + R[i]
    advantage[i, t] = (G[i, t] - mean of G[j, t] over the others j alive at turn t) / std

`r` are the rewards by turn, `R` is the reward of the whole episode. Episode j is alive at turn t if it has a turn t; with
fewer than two alive, the mean `R` of the group's other episodes is the baseline. `std` is one number for the whole group.

The baseline of an episode is made of other episodes alone, so it leaves the mean of the gradient as it is, and another
turn costs the same as stopping. Rewards normalised turn by turn lose the cost of a turn with its mean
(`tests/learning/test_bandit.py` shows both).

For rewards of yours, change `turn_reward_func` in a copy, or call `credit_turns` in a file beside it. The function returns
for each trajectory a list with one finite number for each of its turns; the columns of the data are its keywords, as lists.
`environment` pays what `step_reward()` of the environment gave; `turn_credit_environment.py` uses it.

Measured: a policy that is a table needs 2.60 times fewer episodes [1.54, 4.38]; nano on chains of three calls showed no
difference (docs/background/credit.md). A dropped episode has advantage 0 and is nobody's baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import isfinite, sqrt
from statistics import fmean, pstdev
from typing import Any

import torch

from toolgrpo import Trajectory
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.learning import Facts, TrainBatch
from toolgrpo.learning.advantages import in_groups, is_dead
from toolgrpo.rewards.gold_calls import listed_calls, made_calls

_EPSILON = 1e-4  # TRL adds it to a standard deviation before it divides
_MOST_TURNS = 16  # that have metrics


def gold_call(trajectories: Sequence[Trajectory], gold_calls: Sequence[Any], **_: Any) -> list[list[float]]:
    """Pay for each gold call of the row once, in the turn that makes it first; a row without any pays nothing."""
    found = []
    for row, (trajectory, gold) in enumerate(zip(trajectories, gold_calls, strict=True)):
        wanted = [] if gold is None else listed_calls(gold, row)
        n = len(wanted)
        of_turns = []
        for turn in trajectory.turns:
            hits = 0
            for call in made_calls(turn.attempts):
                if call in wanted:
                    wanted.remove(call)
                    hits += 1
            of_turns.append(hits / n if n else 0.0)
        found.append(of_turns)
    return found


def environment(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
    """Return what each episode's environment gave after each turn with calls; a turn that it was not asked about has 0."""
    acted = [turn for one in trajectories for turn in one.turns if turn.results]
    if acted and all(turn.reward is None for turn in acted):
        raise RewardError("an environment gives no reward by turn; use a class that has `step_reward()`")
    return [[turn.reward or 0.0 for turn in one.turns] for one in trajectories]


turn_reward_func = gold_call


def stage(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Give each turn's tokens their own advantage."""
    return credit_turns(batch, facts, turn_reward_func)


@dataclass(frozen=True, slots=True)
class EpisodeTurns:
    """The rewards of one episode. Small, because processes send these to each other."""

    total: float | None  # of the whole episode; None if it was dropped
    rewards: tuple[float, ...]  # one per turn


Returns = list[tuple[float, ...] | None]
"""The returns-to-go of each episode of a group; None if it was dropped."""


def credit_turns(batch: TrainBatch, facts: Facts, function: Callable[..., Any]) -> TrainBatch:
    """Return the batch with an advantage for each turn, by these rewards by turn; tokens of no turn have 0."""
    if facts.rule.shaping.normalize_first:
        raise ConfigError(
            "rewards by turn are added to an episode's own reward, and multi_objective_aggregation normalize_then_sum makes "
            "none; use sum_then_normalize, or leave the stage out"
        )
    rewards = turn_rewards(facts, function)
    own = [EpisodeTurns(*of) for of in zip(batch.rewards, rewards, strict=True)]
    episodes = facts.gathered(own)
    advantages = turn_advantages(episodes, facts.group_size, facts.scale)
    by_token = torch.zeros(batch.mask.shape, dtype=batch.advantages.dtype)
    for row, (one, of_turns) in enumerate(zip(facts.episodes, advantages[facts.own], strict=True)):
        for turn, value in zip(one.trajectory.turns, of_turns, strict=True):
            by_token[row, turn.start : turn.end] = value
    return replace(
        batch,
        advantages=by_token.to(batch.advantages.device),
        turn_rewards=tuple(rewards),
        turn_advantages=tuple(advantages[facts.own]),
    ).told(**turn_metrics(episodes, advantages, facts.group_size))


def turn_rewards(facts: Facts, function: Callable[..., Any]) -> list[tuple[float, ...]]:
    """Return the rewards by turn of this process's episodes; those that were dropped are not asked about."""
    asked = [one for one in facts.episodes if one.drop is None]
    names = dict.fromkeys(name for one in asked for name in one.row)
    columns = {name: [one.row.get(name) for one in asked] for name in names}
    given = iter(function(trajectories=[one.trajectory for one in asked], **columns) if asked else ())
    found = []
    for number, one in enumerate(facts.episodes):
        n_turns = len(one.trajectory.turns)
        of_turns = (0.0,) * n_turns if one.drop is not None else tuple(float(value) for value in next(given, ()))
        if len(of_turns) != n_turns or not all(map(isfinite, of_turns)):
            raise RewardError(
                f"the rewards by turn of episode {number} are {of_turns}, and it has {n_turns} turns; return one finite "
                f"number for each turn, also for one without a call"
            )
        found.append(of_turns)
    if next(given, None) is not None:
        raise RewardError(
            f"there are more lists of rewards by turn than the {len(asked)} trajectories; return one for each"
        )
    return found


def turn_advantages(episodes: Sequence[EpisodeTurns], group_size: int, scale: str = "group") -> list[tuple[float, ...]]:
    """Return the advantage of each turn of each episode, in whole groups.

    `scale` is TRL's `scale_rewards`: divide by the standard deviation of the group's returns-to-go,
    of the whole batch's, or by nothing.
    """
    groups = in_groups(episodes, group_size)
    returns_of = [_group_returns(group) for group in groups]
    found: list[tuple[float, ...]] = []
    whole = _spread(list(chain.from_iterable(returns_of))) if scale == "batch" else 0.0
    for group, returns in zip(groups, returns_of, strict=True):
        divisor = 1.0 if scale == "none" else _EPSILON + (whole if scale == "batch" else _spread(returns))
        for one, differences in zip(group, _differences(group, returns), strict=True):
            found.append(tuple(value / divisor for value in differences) or (0.0,) * len(one.rewards))
    return found


def turn_metrics(
    episodes: Sequence[EpisodeTurns], advantages: Sequence[tuple[float, ...]], group_size: int
) -> dict[str, float]:
    """Return the spread within an episode, the advantages by turn number, and the share of groups that
    teach by their turns alone.
    """
    several = [of for of in advantages if len(of) > 1]
    metrics = {"credit/spread_within_episode": fmean(pstdev(of) for of in several) if several else 0.0}
    for turn in range(min(_MOST_TURNS, max(map(len, advantages), default=0))):
        own = [of[turn] for of in advantages if len(of) > turn]
        metrics[f"credit/turn_{turn + 1}/mean"] = fmean(own)
        metrics[f"credit/turn_{turn + 1}/size"] = fmean(map(abs, own))
    scored = [one for one in episodes if one.total is not None]
    metrics["credit/turn_reward"] = fmean(sum(one.rewards) for one in scored) if scored else 0.0
    groups = zip(in_groups(episodes, group_size), in_groups(advantages, group_size), strict=True)
    revived = [is_dead(one.total for one in group) and any(map(any, of)) for group, of in groups]
    metrics["credit/groups_revived"] = fmean(revived)
    return metrics


def _group_returns(group: Sequence[EpisodeTurns]) -> Returns:
    return [None if one.total is None else _returns_to_go(one.rewards, one.total) for one in group]


def _returns_to_go(rewards: Sequence[float], total: float) -> tuple[float, ...]:
    return tuple(accumulate(reversed(rewards), initial=total))[:0:-1]


def _spread(returns: Returns) -> float:
    """Return the standard deviation of returns-to-go, with each episode counted once.

    If the turns of an episode are alike, it is the sample standard deviation of the episodes' rewards.
    """
    given = [of for of in returns if of]
    if len(given) < 2 or is_dead(chain.from_iterable(given)):
        return 0.0
    mean = fmean(fmean(of) for of in given)
    squares = sum(fmean((value - mean) ** 2 for value in of) for of in given)
    return sqrt(squares / (len(given) - 1))


def _differences(group: Sequence[EpisodeTurns], returns: Returns) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in group]
    for turn in range(max((len(of) for of in returns if of is not None), default=0)):
        alive = {place: of[turn] for place, of in enumerate(returns) if of is not None and len(of) > turn}
        if len(alive) == 1:
            ((place, value),) = alive.items()
            others = [one.total for other, one in enumerate(group) if one.total is not None and other != place]
            found[place].append(value - fmean(others) if others else 0.0)
            continue
        total, alike = sum(alive.values()), is_dead(alive.values())
        for place, value in alive.items():
            found[place].append(0.0 if alike else value - (total - value) / (len(alive) - 1))
    return found
