"""Seconds a step: TRL's trainer and ours with each staleness, on the same job (two parts of `whole_step.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run, label
from _whole_step_runs import Job, Phase, measured


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

    def rows(self, runs: list[Run]) -> list[Row]:
        """Means over the steps of all rounds."""
        check_same_job(runs)
        made, said = [], label(runs)
        for latency in self.latencies:
            tools = f"a tool call takes {latency} s" if self.tools == "wait" else "eight financial tools (long schemas)"
            job = f"a step of {runs[0]['of']['episodes']} episodes, {tools}, max_staleness"
            of = {kind: Figure.of_steps(steps_of(runs, kind, latency)) for kind in self.kinds}
            for k in self.staleness:
                made.append(Row(f"{job} {k}{said}", of[str(k)], "s", of["TRL"], "TRL"))
                if k:
                    made.append(Row(f"{job} {k}{said}", of[str(k)], "s", of["0"], "max_staleness 0"))
        return made


def check_same_job(runs: list[Run]) -> None:
    """All trainers had the same calls and the same number of sampled tokens in the steps that they have in common."""
    for what in ("calls", "sampled_tokens"):
        least = min(len(run[what]) for run in runs)
        told = {tuple(run[what][:least]) for run in runs}
        assert len(told) == 1, f"{what} of the first {least} steps differ: {[(run['of'], run[what]) for run in runs]}"


def steps_of(runs: list[Run], kind: str, latency: float) -> list[float]:
    """Seconds of the steps of all rounds; the keys of a JSON are texts."""
    of = [run["seconds"] for run in runs if run["of"]["kind"] == kind]
    return [value for seconds in of for value in seconds.get(str(latency), [])]


def part(comparison: Comparison) -> Part:
    return Part(comparison.plan, comparison.measure, comparison.rows)


SPEED = part(Comparison("wait", (0.0, 0.1, 0.5), (0, 1, 2), 64, 32))
SCHEMA = part(Comparison("financial", (0.0,), (0, 1), 16, 16))
