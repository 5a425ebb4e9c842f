"""Seconds a step: TRL's trainer and ours with each staleness, on the same job (two parts of `whole_step.py`)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from _rollout_loops import MAX_TURNS, decision
from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run, label
from _whole_step_runs import GROUP, Job, Phase, measured

TURN_S = 0.05  # of decoding, as the simulation has it
TIMES_TRL = {"wait": {0.0: 1.5, 0.1: 4.0}, "financial": {}}  # what staleness 0 is to be
TIMES_0 = {0.5: {1: 1.6, 2: 2.2}}  # what overlap is to give, or SHARE of what it could
SHARE = 0.85


@dataclass(frozen=True)
class Comparison:
    """The same job for all: tools, their latencies, episodes a step."""

    tools: str
    latencies: tuple[float, ...]
    staleness: tuple[int, ...]
    episodes: int
    quick_episodes: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("TRL", *map(str, self.staleness))

    def plan(self, asked: Asked) -> list[dict[str, Any]]:
        n, rounds = (self.quick_episodes, 1) if asked.quick else (self.episodes, asked.rounds)
        return [
            {"kind": kind, "round": number, "episodes": n, "tools": self.tools, "quick": asked.quick}
            for number in range(rounds)
            for kind in self.kinds
        ]

    def phases(self, kind: str, quick: bool) -> tuple[Phase, ...]:
        """TRL calls tools one after the other, so its slow phases have fewer steps."""
        if kind == "TRL":
            fast = Phase(0.0, 1, 1 if quick else 3 if self.tools == "wait" else 2)
            return (fast, *(Phase(latency, 0, 2 if latency < 0.5 else 1) for latency in self.latencies[1:]))
        last = Phase(self.latencies[-1] + 1e-9, max(self.staleness), 0)  # nothing is begun ahead in the last steps
        return (*(Phase(latency, 1 + int(kind), 4 if quick else 6) for latency in self.latencies), last)

    def measure(self, of: dict[str, Any]) -> dict[str, Any]:
        trainer, staleness = ("TRL", 0) if of["kind"] == "TRL" else ("ours", int(of["kind"]))
        phases = self.phases(of["kind"], of["quick"])
        return measured(
            Job(trainer=trainer, episodes=of["episodes"], phases=phases, staleness=staleness, tools=self.tools)
        )

    def summary(self, runs: list[Run]) -> dict[str, Any]:
        """Means over the steps of all rounds; `simulated` has the engine and the pass that were measured."""
        check_same_job(runs)
        n = runs[0]["of"]["episodes"]
        seconds = {
            kind: {latency: steps_of(runs, kind, "seconds", latency) for latency in self.latencies}
            for kind in self.kinds
        }
        engine_s = statistics.fmean(steps_of(runs, "0", "rollout_s", 0.0))
        train_s = statistics.fmean(seconds["0"][0.0]) - engine_s
        table = []
        for latency in self.latencies:
            ideal = {k: simulated(latency, n, engine_s, train_s, k) for k in self.staleness}
            table.append(
                {
                    "latency_s": latency,
                    "all_seconds": {kind: seconds[kind][latency] for kind in self.kinds},
                    "seconds": {kind: statistics.fmean(seconds[kind][latency]) for kind in self.kinds},
                    "processor_s": {
                        kind: statistics.fmean(steps_of(runs, kind, "processor_s", latency)) for kind in self.kinds
                    },
                    "simulated_faster_than_0": {str(k): ideal[0] / ideal[k] for k in self.staleness},
                }
            )
        return {"episodes_a_step": n, "group_size": GROUP, "engine_s": engine_s, "train_s": train_s, "steps": table}

    def rows(self, result: dict[str, Any]) -> list[Row]:
        made, found, said = [], result["summary"], label(result)
        for step in found["steps"]:
            latency, of = step["latency_s"], step["all_seconds"]
            tools = f"a tool call takes {latency} s" if self.tools == "wait" else "eight financial tools (long schemas)"
            job = f"a step of {found['episodes_a_step']} episodes, {tools}, max_staleness"
            wanted = TIMES_TRL[self.tools].get(latency)
            for k in self.staleness:
                target = f"{wanted} times better" if wanted is not None and k == 0 else ""
                ours, what = Figure.of_steps(of[str(k)]), f"{job} {k}{said}"
                other = Figure.of_steps(of["TRL"])
                made.append(
                    Row(benchmark="whole_step", what=what, ours=ours, other=other, other_name="TRL", target=target)
                )
                if k:
                    ideal = step["simulated_faster_than_0"][str(k)]
                    least = TIMES_0.get(latency, {}).get(k)
                    made.append(
                        Row(
                            benchmark="whole_step",
                            what=what,
                            ours=ours,
                            other=Figure.of_steps(of["0"]),
                            other_name="max_staleness 0",
                            bound=step["seconds"]["0"] / ideal,
                            target="at least 0.97"
                            if least is None
                            else f"{min(least, SHARE * ideal):.3g} times better",
                        )
                    )
        return made

    def show(self, result: dict[str, Any]) -> None:
        found = result["summary"]
        print(f"\nseconds a step of {found['episodes_a_step']} episodes (mean), nano, {self.tools}{label(result)}")
        columns = [f"{f'ours, {k}':>8}" for k in self.staleness]
        ratios = [f"{f'{k}/0':>6} {'could':>6}" for k in self.staleness[1:]]
        print(f"{'tool':>5} {'TRL':>8} {' '.join(columns)} {'0/TRL':>6} {' '.join(ratios)}")
        for step in found["steps"]:
            of = step["seconds"]
            line = f"{step['latency_s']:>5.1f} {of['TRL']:>8.2f} " + " ".join(
                f"{of[str(k)]:>8.2f}" for k in self.staleness
            )
            line += f" {of['TRL'] / of['0']:>5.1f}x"
            for k in map(str, self.staleness[1:]):
                line += f" {of['0'] / of[k]:>5.2f}x {step['simulated_faster_than_0'][k]:>5.2f}x"
            print(line)
        for step in found["steps"]:
            shown = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in step["processor_s"].items())
            print(f"processor seconds a step, tools of {step['latency_s']} s: {shown}")
        print(f"engine {found['engine_s']:.2f} s and the rest {found['train_s']:.2f} s a step, at staleness 0")


def check_same_job(runs: list[Run]) -> None:
    """All trainers had the same calls and the same number of sampled tokens in the steps that they have in common."""
    for what in ("calls", "sampled_tokens"):
        least = min(len(run[what]) for run in runs)
        told = {tuple(run[what][:least]) for run in runs}
        assert len(told) == 1, f"{what} of the first {least} steps differ: {[(run['of'], run[what]) for run in runs]}"


def steps_of(runs: list[Run], kind: str, what: str, latency: float) -> list[float]:
    """The steps of all rounds; the keys of a JSON are texts."""
    of = [run for run in runs if run["of"]["kind"] == kind]
    return [value for run in of for value in run[what].get(str(latency), [])]


def simulated(latency_s: float, n: int, engine_s: float, train_s: float, staleness: int, steps: int = 60) -> float:
    """Seconds a step, had engine and pass a machine each: batch b begins when the pass of batch b - 1 - staleness ends."""
    ends: list[float] = []
    busy = 0.0
    for batch in range(steps):
        start = ends[batch - 1 - staleness] if batch > staleness else 0.0
        busy = max(busy, start) + engine_s
        slowest = max(path_s(batch * n + place, latency_s) for place in range(n))
        ends.append(max(start + slowest, busy, ends[-1] if ends else 0.0) + train_s)
    return ends[-1] / steps


def path_s(uid: int, latency_s: float) -> float:
    factors = (decision(uid, turn) for turn in range(MAX_TURNS))
    seconds = 0.0
    for factor in factors:
        seconds += TURN_S
        if factor is None:
            break
        seconds += factor * latency_s
    return seconds


def part(comparison: Comparison) -> Part:
    return Part(comparison.plan, comparison.measure, comparison.summary, comparison.show, comparison.rows)


SPEED = part(Comparison("wait", (0.0, 0.1, 0.5), (0, 1, 2), 64, 32))
SCHEMA = part(Comparison("financial", (0.0,), (0, 1), 16, 16))
