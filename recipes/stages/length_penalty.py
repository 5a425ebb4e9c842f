"""A penalty on episodes that are long beside their group (prime-rl's linear penalty), as a stage.

    --stage_fn recipes/stages/length_penalty.py

Each episode loses, for each kind of length in WEIGHTS,

    weight * value / largest value of its group * mean reward of its group

so nothing is taken where nothing succeeds, and a group that was solved in different lengths teaches. Copy the file to
change WEIGHTS; above 1 in sum an episode could lose more than its group earned. `shaping/penalty` is the mean.

Measured: nothing yet; no recipe uses it. Not for `--advantage max_rl`, which needs rewards of at least 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from toolgrpo import Trajectory
from toolgrpo.learning import Facts, TrainBatch
from toolgrpo.learning.advantages import in_groups

KINDS: Mapping[str, Callable[[Trajectory], int]] = {
    "output_tokens": lambda episode: episode.n_sampled,
    "context_tokens": lambda episode: episode.n_context,  # tool results and what frames them
    "turns": lambda episode: len(episode.turns),
    "calls": lambda episode: len(episode.results),
}
WEIGHTS = {"output_tokens": 0.1, "turns": 0.1}


def taken_off(
    rewards: Sequence[float | None], sizes: Sequence[Mapping[str, int]], weights: Mapping[str, float]
) -> list[float]:
    """Return what each episode of one group loses."""
    scored = [(reward, size) for reward, size in zip(rewards, sizes, strict=True) if reward is not None]
    mean = max(0.0, fmean(reward for reward, _ in scored)) if scored else 0.0
    largest = {kind: max((size[kind] for _, size in scored), default=0) for kind in weights}
    return [
        0.0
        if reward is None
        else mean * sum(weight * size[kind] / largest[kind] for kind, weight in weights.items() if largest[kind])
        for reward, size in zip(rewards, sizes, strict=True)
    ]


def stage(batch: TrainBatch, facts: Facts) -> TrainBatch:
    """Take the penalties off the rewards."""
    sizes = [{kind: KINDS[kind](one.trajectory) for kind in WEIGHTS} for one in facts.episodes]
    rewards, all_sizes = facts.gathered(batch.rewards), facts.gathered(sizes)
    taken: list[float] = []
    groups = (in_groups(rewards, facts.group_size), in_groups(all_sizes, facts.group_size))
    for of_group, own_sizes in zip(*groups, strict=True):
        taken += taken_off(of_group, own_sizes, WEIGHTS)
    of_scored = [loss for loss, reward in zip(taken, rewards, strict=True) if reward is not None]
    own = zip(batch.rewards, taken[facts.own], strict=True)
    shaped = batch.with_rewards(facts, [None if reward is None else reward - loss for reward, loss in own])
    return shaped.told(**{"shaping/penalty": fmean(of_scored)}) if of_scored else shaped
