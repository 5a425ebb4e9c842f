"""Turn-level credit: episodes until a policy that is a table learns chains of four calls. No language model, 20 seconds.

    python benchmarks/credit.py
    python benchmarks/credit.py --quick      # one seed, a few steps; keeps nothing

A state is how many calls of the chain are right so far, and whether the last one was wrong. In each state the policy draws
one of ten actions by a softmax over a row of its table: the right call, eight wrong ones, or the answer. A wrong call can be
made good by the right one. The reward is 1 if all four calls were right before the answer, within eight turns. Four groups of
eight episodes make a step; the table moves along the policy gradient with the advantages of `toolgrpo.credit`. Both ways are
tuned alike: each learning rate of RATES is tried on every seed, and the way is shown with its best one.

Success is that of a drawn episode, from the last 128 of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from _rows import Figure, Row

from toolgrpo.credit.turns import EpisodeTurns, turn_advantages
from toolgrpo.signal.advantages import grouped_advantages

RESULT = Path(__file__).with_name("results") / "credit.json"

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
        return turn_advantages([EpisodeTurns(one.reward, one.gold_calls()) for one in walks], GROUP)
    of_episodes = grouped_advantages([one.reward for one in walks], GROUP, "grpo")
    return [(value,) * len(one.actions) for value, one in zip(of_episodes, walks, strict=True)]


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


def rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of the table of all measurements."""
    table = results["table"]["compared"]["gold_call"]
    found = [(target, of["times_fewer"], *(of["interval"] or (None, None))) for target, of in table.items()]
    return [
        Row(
            benchmark="credit",
            what=f"a table in place of the model, episodes to {target}, gold_call",
            unit="",
            ratio=Figure(ratio, least, most, results["table"]["seeds"]),
            other_name="credit by episode",
        )
        for target, ratio, least, most in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and a few steps, of which nothing is kept")
    quick = parser.parse_args().quick
    measured = measure(quick)
    show(measured)
    if not quick:
        RESULT.parent.mkdir(exist_ok=True)
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        RESULT.write_text(json.dumps({"table": measured, "machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
