"""Turn-level credit: episodes until a policy that is a table learns chains of four calls. No language model, 20 seconds.

    python benchmarks/credit.py
    python benchmarks/credit.py --quick      # one seed, a few steps

A state is how many calls of the chain are right so far, and whether the last one was wrong. In each state the policy draws
one of ten actions by a softmax over a row of its table: the right call, eight wrong ones, or the answer. A wrong call can be
made good by the right one. The reward is 1 if all four calls were right before the answer, within eight turns. Four groups of
eight episodes make a step; the table moves along the policy gradient with the advantages of `toolgrpo.learning`. Both ways are
tuned alike: each learning rate of RATES is tried on every seed, and the way is shown with its best one.

Success is that of a drawn episode, from the last 128 of them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from _reporting import benchmark, parser_of
from _rows import Figure, Row

from toolgrpo.learning.advantages import grouped_advantages
from toolgrpo.support.plugin_files import import_file
from toolgrpo.support.shipped_files import shipped_root

CREDIT = import_file(shipped_root() / "recipes/stages/turn_credit.py")

CALLS, MOST_TURNS, WRONG = 4, 8, 8
ANSWER = 1 + WRONG  # action 0 is the right call
GROUP, GROUPS = 8, 4
MOST_STEPS = 150
HEAD_START = 0.5
RATES = (64.0, 256.0, 1024.0)
TARGETS = (0.5, 0.9)
WINDOW = 128
SEEDS = 10

WAYS = ("episode", "gold_call")

State = tuple[int, bool]


@dataclass(frozen=True, slots=True)
class Walk:
    """One episode of the table."""

    states: tuple[State, ...]
    actions: tuple[int, ...]
    reward: float

    def gold_calls(self) -> tuple[float, ...]:
        """Return the rewards by turn: each right call is paid for once."""
        first = [place for place, action in enumerate(self.actions) if action == 0][:CALLS]
        return tuple(1 / CALLS if place in first else 0.0 for place in range(len(self.actions)))


def _chances(row: Sequence[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    total = sum(weights)
    return [weight / total for weight in weights]


def _walk(table: dict[State, list[float]], rng: random.Random) -> Walk:
    state: State = (0, False)
    states: list[State] = []
    actions: list[int] = []
    while len(actions) < MOST_TURNS:
        (action,) = rng.choices(range(ANSWER + 1), _chances(table[state]))
        states.append(state)
        actions.append(action)
        if action == ANSWER:
            break
        state = (min(CALLS, state[0] + 1), False) if action == 0 else (state[0], True)
    right = sum(action == 0 for action in actions)
    return Walk(tuple(states), tuple(actions), float(actions[-1] == ANSWER and right == CALLS))


def _learn(way: str, rate: float, seed: int, steps: int) -> dict[float, int | None]:
    """The episodes until each target was reached; None: it was not."""
    rng = random.Random(f"{seed}")
    table = {(n, wrong): [0.0] * (ANSWER + 1) for n in range(CALLS + 1) for wrong in (False, True)}
    for row in table.values():
        row[0] += HEAD_START  # it calls right more often than anything else, as after a warm-up
    seen: deque[float] = deque(maxlen=WINDOW)
    found: dict[float, int | None] = dict.fromkeys(TARGETS)
    for step in range(steps):
        walks = [_walk(table, rng) for _ in range(GROUP * GROUPS)]
        seen.extend(walk.reward for walk in walks)
        for target in TARGETS:
            if found[target] is None and len(seen) == WINDOW and fmean(seen) >= target:
                found[target] = (step + 1) * GROUP * GROUPS
        if all(found.values()):
            break
        advantages = _advantages(way, walks)
        n_turns = sum(len(walk.actions) for walk in walks)
        moves = {state: [0.0] * (ANSWER + 1) for state in table}
        for walk, of in zip(walks, advantages, strict=True):
            for state, action, value in zip(walk.states, walk.actions, of, strict=True):
                for other, chance in enumerate(_chances(table[state])):
                    moves[state][other] += value * ((other == action) - chance)
        for state, row in table.items():
            for action, move in enumerate(moves[state]):
                row[action] += rate * move / n_turns
    return found


def _advantages(way: str, walks: Sequence[Walk]) -> list[tuple[float, ...]]:
    if way == "gold_call":
        episodes = [CREDIT.EpisodeTurns(one.reward, one.gold_calls()) for one in walks]
        return CREDIT.turn_advantages(episodes, GROUP)  # type: ignore[no-any-return]
    of_episodes = grouped_advantages([one.reward for one in walks], GROUP, "grpo")
    return [(value,) * len(one.actions) for value, one in zip(of_episodes, walks, strict=True)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every way with every learning rate on every seed."""
    n_seeds, steps = (1, 20) if options.quick else (SEEDS, MOST_STEPS)
    ways: dict[str, Any] = {}
    for way in WAYS:
        by_rate: dict[float, dict[str, Any]] = {}
        for rate in RATES[:1] if options.quick else RATES:
            runs = [_learn(way, rate, seed, steps) for seed in range(n_seeds)]
            by_rate[rate] = {str(target): [run[target] or steps * GROUP * GROUPS for run in runs] for target in TARGETS}
            by_rate[rate]["reached"] = {str(target): sum(run[target] is not None for run in runs) for target in TARGETS}
        means = {rate: fmean(of[str(TARGETS[-1])]) for rate, of in by_rate.items()}
        best = min(means, key=lambda rate, means=means: means[rate])  # type: ignore[misc]  # mypy cannot infer it
        ways[way] = {"rate": best, **by_rate[best], "of_rates": {str(rate): mean for rate, mean in means.items()}}
    return {"table": {"seeds": n_seeds, "most_episodes": steps * GROUP * GROUPS, "ways": ways}}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    of = results["table"]["ways"]
    made = []
    for target in map(str, TARGETS):
        other, ours = of["episode"][target], of["gold_call"][target]
        ratio = Figure.of_ratios(zip(other, ours, strict=True))
        what = f"a table in place of the model, mean episodes to {target}, gold_call"
        made.append(Row(what, Figure(fmean(ours)), "", Figure(fmean(other)), "credit by episode", ratio))
    return made


if __name__ == "__main__":
    benchmark("credit", parser_of(__doc__, "one seed, a few steps"), measure, rows)
