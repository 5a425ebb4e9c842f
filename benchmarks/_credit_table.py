"""Credit alone, with no language model: a policy that is a table learns chains of four calls (a part of `credit.py`).

A state is how many calls of the chain are right so far, and whether the last one was wrong. In each state the policy draws
one of ten actions by a softmax over a row of its table: the right call, eight wrong ones (half of them fail with an error,
half give a wrong result), or the answer. A wrong call can be made good by the right one. The outcome is 1 if all four calls
were right before the answer, within eight turns. Four groups of eight episodes make a step; the table moves along the
policy gradient with the advantages of `toolgrpo.credit`, with `advantage: grpo`. Every way is tuned alike: each learning
rate of RATES is tried on every seed, and the way is shown with its best one.

Success is that of a drawn episode, from the last 128 of them. `info_gain` is not here: it asks a language model.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from toolgrpo.credit.episodes import EpisodeTurns
from toolgrpo.credit.options import Credit
from toolgrpo.signal.advantages import grouped_advantages

__all__ = ["measure", "show"]

CALLS, MOST_TURNS, WRONG = 4, 8, 8
ANSWER = 1 + WRONG  # action 0 is the right call
GROUP, GROUPS = 8, 4
MOST_STEPS = 150
HEAD_START = 0.5
RATES = (64.0, 256.0, 1024.0)
TARGETS = (0.5, 0.9)
WINDOW = 128
SEEDS = 10
T_975 = {10: 2.262}  # by the number of seeds

WAYS: dict[str, tuple[Credit, str | None]] = {
    "episode": (Credit(), None),
    "turns": (Credit("turns", has_rewards=True), "call_ok"),
    "anchor": (Credit("anchor"), None),
    "gold_call": (Credit("turns", has_rewards=True), "gold_call"),
}

State = tuple[int, bool]


@dataclass(frozen=True, slots=True)
class Walk:
    """One episode of the table."""

    states: tuple[State, ...]
    actions: tuple[int, ...]
    outcome: float

    def rewards(self, kind: str | None) -> tuple[float, ...]:
        if kind == "call_ok":
            return self._changes_of_share()
        if kind == "gold_call":
            first = [place for place, action in enumerate(self.actions) if action == 0][:CALLS]  # each is paid once
            return tuple(1 / CALLS if place in first else 0.0 for place in range(len(self.actions)))
        return (0.0,) * len(self.actions)

    def _changes_of_share(self) -> tuple[float, ...]:
        """What each turn changed in the share of calls without an error; the second half of the wrong calls fail."""
        good = made = 0
        share, changes = 0.0, []
        for action in self.actions:
            made += action != ANSWER
            good += action <= WRONG // 2
            now = good / made if made else 0.0
            changes.append(now - share)
            share = now
        return tuple(changes)


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
    credit, kind = WAYS[way]
    rng = random.Random(f"{seed}")
    table = {(n, wrong): [0.0] * (ANSWER + 1) for n in range(CALLS + 1) for wrong in (False, True)}
    for row in table.values():
        row[0] += HEAD_START  # it calls right more often than anything else, as after a warm-up
    seen: deque[float] = deque(maxlen=WINDOW)
    found: dict[float, int | None] = dict.fromkeys(TARGETS)
    for step in range(steps):
        walks = [_walk(table, rng) for _ in range(GROUP * GROUPS)]
        seen.extend(walk.outcome for walk in walks)
        for target in TARGETS:
            if found[target] is None and len(seen) == WINDOW and fmean(seen) >= target:
                found[target] = (step + 1) * GROUP * GROUPS
        if all(found.values()):
            break
        turns = [EpisodeTurns(one.outcome, one.rewards(kind), tuple(map(str, one.states))) for one in walks]
        outcomes = grouped_advantages([one.outcome for one in walks], GROUP, "grpo")
        advantages = credit.advantages(turns, GROUP, outcomes)
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


def measure(quick: bool) -> dict[str, Any]:
    """Every way with every learning rate on every seed."""
    n_seeds = 1 if quick else SEEDS
    steps = 20 if quick else MOST_STEPS
    ways: dict[str, Any] = {}
    for way in WAYS:
        by_rate: dict[float, dict[str, Any]] = {}
        for rate in RATES[:1] if quick else RATES:
            runs = [_learn(way, rate, seed, steps) for seed in range(n_seeds)]
            by_rate[rate] = {str(target): [run[target] or steps * GROUP * GROUPS for run in runs] for target in TARGETS}
            by_rate[rate]["reached"] = {str(target): sum(run[target] is not None for run in runs) for target in TARGETS}
        means = {rate: fmean(of[str(TARGETS[-1])]) for rate, of in by_rate.items()}
        best = min(means, key=lambda rate, means=means: means[rate])  # type: ignore[misc]  # mypy cannot infer it
        ways[way] = {"rate": best, **by_rate[best], "of_rates": {str(rate): mean for rate, mean in means.items()}}
    return {"seeds": n_seeds, "most_episodes": steps * GROUP * GROUPS, "ways": ways, "compared": _compared(ways)}


def _compared(ways: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, own in ways.items():
        found[way] = {}
        for target in map(str, TARGETS):
            logs = [math.log(a / b) for a, b in zip(ways["episode"][target], own[target], strict=True)]
            half = T_975[len(logs)] * stdev(logs) / math.sqrt(len(logs)) if len(logs) in T_975 else None
            ends = None if half is None else [math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)]
            found[way][target] = {"times_fewer": math.exp(fmean(logs)), "interval": ends}
    return found


def show(results: dict[str, Any]) -> None:
    print(
        f"a table learns chains of {CALLS} calls: mean episodes over {results['seeds']} seeds, each way at its best rate"
    )
    for way, own in results["ways"].items():
        texts = []
        for target in map(str, TARGETS):
            ratio = results["compared"][way][target]
            ends = "" if ratio["interval"] is None else " [{:.2f}, {:.2f}]".format(*ratio["interval"])
            texts.append(
                f"{fmean(own[target]):>7.0f} to {target} ({own['reached'][target]} seeds; {ratio['times_fewer']:.2f}{ends} times fewer)"
            )
        print(f"{way:>10} rate {own['rate']:>4.0f}: " + ";".join(texts))
