"""What a schedule could reach: the rollouts of `rollouts.py` again, on an engine of which only the costs are known.

On a CPU a step takes longer the more rollouts it holds, so the slowest rollout cannot go as fast in company as alone, and
`bound` may be out of reach. How near a schedule could get is simulated here with costs measured in the same run: every open
rollout in every step, as vLLM does it, and a schedule that knows all decisions beforehand and lets only those with the
longest way to go decode. The first, beside the measured time, tells how far the simulation can be trusted.

Not covered: a step's cost does not depend on how long its conversations are; and longest first is a good order, not proven
the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from _rollout_loops import TURN_TOKENS, N, decision, turns_of

_WIDTHS = (4, 8, 12, 16, 24, 32, 48, N)  # rollouts that decode at a time; the best is taken


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    step: float
    rollout: float  # more for each rollout in a step
    joining: float  # and for each that joins, whose new tokens have to be read
    turn: float  # of the loop: parsing, bridging, handing over

    def of_step(self, rollouts: int, joined: int) -> float:
        return self.step + self.rollout * rollouts + self.joining * joined


def fitted(log: Sequence[tuple[int, int, float]], outside_s: float) -> Costs:
    """The costs behind these steps; `outside_s` is what a rollout without waiting took besides them."""
    import numpy as np  # here, because the scheduler's own cost is measured without a heap full of other modules

    counts = np.array([(1.0, rollouts, joined) for rollouts, joined, _ in log])
    solution = np.linalg.lstsq(counts, np.array([seconds for *_, seconds in log]), rcond=None)[0]
    step, rollout, joining = (max(0.0, float(cost)) for cost in solution)
    turns = sum(turns_of(uid) for uid in range(N))
    return Costs(step, rollout, joining, turn=max(0.0, outside_s) / turns)


def simulated(costs: Costs, latency_s: float) -> tuple[float, float]:
    """Seconds of the whole, with everybody in every step, and with foresight."""
    return _run(costs, latency_s, N), min(_run(costs, latency_s, width) for width in _WIDTHS)


def _run(costs: Costs, latency_s: float, width: int) -> float:
    waits = {uid: [(decision(uid, turn) or 0.0) * latency_s for turn in range(turns_of(uid) - 1)] for uid in range(N)}
    left = dict.fromkeys(waits, TURN_TOKENS)

    def way_to_go(uid: int) -> float:
        tokens = left[uid] + TURN_TOKENS * len(waits[uid])
        return sum(waits[uid], tokens * costs.of_step(width // 2, 0))

    ready, joined, in_tools, now = set(waits), set(waits), dict[int, float](), 0.0
    while ready or in_tools:
        if not ready:
            now = max(now, min(in_tools.values()))
        back = {uid for uid, until in in_tools.items() if until <= now}
        ready, joined = ready | back, joined | back
        in_tools = {uid: until for uid, until in in_tools.items() if uid not in back}
        decoding = set(sorted(ready, key=way_to_go, reverse=True)[:width])
        now += costs.of_step(len(decoding), len(joined & decoding))
        joined -= decoding
        for uid in decoding:
            left[uid] -= 1
            if left[uid] == 0:
                ready.remove(uid)
                now += costs.turn
                if waits[uid]:
                    in_tools[uid], left[uid] = now + waits[uid].pop(0), TURN_TOKENS
    return now
