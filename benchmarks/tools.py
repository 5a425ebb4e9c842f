"""Tool calls: what a worker costs, how many slow calls overlap, and how soon a lost worker is replaced.

    python benchmarks/tools.py            # table on the terminal, JSON in benchmarks/results/tools.json
    python benchmarks/tools.py --quick    # fewer repetitions

The plain way stands beside ours where it has one: calls in this thread, one after the other, as TRL's tool loop makes them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from _reporting import benchmark, parser_of, progress, save
from _rows import Figure, Row

from tests.support.tool_calls import attempt
from toolgrpo.episode.tool_calls import ToolResult
from toolgrpo.tools import Toolbox, load_tools, tool


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return a + b


async def add_async(a: int, b: int) -> int:
    """Add on the loop.

    Args:
        a: A.
        b: B.
    """
    return a + b


@tool(isolate=True)
def add_isolated(a: int, b: int) -> int:
    """Add in a process of its own.

    Args:
        a: A.
        b: B.
    """
    return a + b


def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "slept"


@tool(timeout=1.0)
def hang() -> str:
    """Hang."""
    time.sleep(10**9)
    return ""


def process_id() -> int:
    """Give the id of the process this runs in."""
    return os.getpid()


def in_session(toolbox: Toolbox, work: Callable[[Any], Any]) -> Any:
    async def run() -> Any:
        async with toolbox.session({}) as session:
            return await work(session)

    return asyncio.run(run())


def overhead_ms(toolbox: Toolbox, name: str, calls: int) -> dict[str, float]:
    """How long a call of an instant tool takes, one after the other."""

    async def work(session: Any) -> list[float]:
        times = []
        for i in range(calls + 20):
            started = time.perf_counter()
            (result,) = await session.call([attempt(name, a=i, b=1)])
            times.append((time.perf_counter() - started) * 1000)
            assert result.content == str(i + 1)
        return sorted(times[20:])

    times = in_session(toolbox, work)
    at_95 = times[int(len(times) * 0.95)]
    return {"p50": statistics.median(times), "p95": at_95, "least": times[0], "most": times[-1], "n": len(times)}


def throughput(toolbox: Toolbox, calls: int) -> float:
    """Instant calls per second, 64 in flight."""

    async def work(session: Any) -> float:
        started = time.perf_counter()
        for _ in range(calls // 64):
            await session.call([attempt("add", a=1, b=1)] * 64)
        return calls / (time.perf_counter() - started)

    return float(in_session(toolbox, work))


def naps_s(toolbox: Toolbox, count: int) -> float:
    """How long `count` simultaneous sleeps of a second take."""

    async def work(session: Any) -> float:
        started = time.perf_counter()
        results: tuple[ToolResult, ...] = await session.call([attempt("nap", seconds=1.0)] * count)
        assert all(result.ok for result in results)
        return time.perf_counter() - started

    return float(in_session(toolbox, work))


def replacement_s(load: Callable[[], Toolbox]) -> dict[str, float]:
    """One worker, lost to a hang while others keep calling: when its successor answers, and the longest gap meanwhile."""
    with load() as toolbox:

        async def work(session: Any) -> dict[str, float]:
            (first,) = await session.call([attempt("process_id")])
            hanging = asyncio.create_task(session.call([attempt("hang")]))
            gaps, lost_at, replaced_at = [], 0.0, 0.0
            while not replaced_at:
                started = time.perf_counter()
                (result,) = await session.call([attempt("process_id")])
                gaps.append(time.perf_counter() - started)
                if hanging.done() and not lost_at:
                    lost_at = time.perf_counter()
                if result.content != first.content:
                    replaced_at = time.perf_counter()
            return {"replaced_after_s": max(0.0, replaced_at - (lost_at or replaced_at)), "longest_gap_s": max(gaps)}

        found: dict[str, float] = in_session(toolbox, work)
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    quick = options.quick
    calls = 300 if quick else 3000
    tools: list[Callable[..., Any]] = [add, add_async, add_isolated, nap, hang, process_id]
    started = time.perf_counter()
    with load_tools(tools, workers=4) as toolbox:
        loaded_s = time.perf_counter() - started
        in_session(toolbox, lambda session: session.call([attempt("add", a=1, b=1)]))
        first_answer_s = time.perf_counter() - started
        shared = overhead_ms(toolbox, "add", calls)
        results: dict[str, Any] = {
            "load_s": loaded_s,
            "first_answer_s": first_answer_s,
            "call_ms": shared,
            "async_call_ms": overhead_ms(toolbox, "add_async", calls),
            "isolated_call_ms": overhead_ms(toolbox, "add_isolated", calls // 10),
            "calls_per_s": throughput(toolbox, calls // 64 * 64),
        }
        save("tools", results, quick=quick)
        progress("256 simultaneous sleeps")
        results["all_naps_256_s"] = [naps_s(toolbox, 256) for _ in range(1 if quick else 3)]
        results["naps_256_s"] = min(results["all_naps_256_s"])
    plain_started = time.perf_counter()
    for _ in range(3):
        nap(1.0)
    results["naps_256_one_by_one_s"] = (time.perf_counter() - plain_started) / 3 * 256  # extrapolated from three
    results["replacement"] = replacement_s(lambda: load_tools(tools, workers=1))
    return results


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""

    def call(name: str) -> Figure:
        one = results[name]
        return Figure(one["p50"], one.get("least"), one.get("most"), one.get("n"))

    made = []
    if one_by_one := results.get("naps_256_one_by_one_s"):
        ours, other = Figure.kept(results["naps_256_s"], results.get("all_naps_256_s")), Figure(one_by_one, n=3)
        name = "one after the other, as TRL's loop calls (from three of them)"
        made.append(Row("256 simultaneous sleeps of 1 s", ours, "s", other, name, bound=1.0, target="under 2 s"))
    made += [
        Row("a call of an instant tool through a worker", call("call_ms"), "ms", target="under 1 ms"),
        Row("the same, an async function", call("async_call_ms"), "ms"),
        Row("the same, isolate=True", call("isolated_call_ms"), "ms"),
        Row("instant calls, 64 in flight", Figure(results["calls_per_s"], n=1), "a second"),
    ]
    if lost := results.get("replacement"):
        made.append(Row("a worker lost to a hang is replaced", Figure(lost["replaced_after_s"], n=1)))
        made.append(Row("the longest wait of another call meanwhile", Figure(lost["longest_gap_s"], n=1)))
    return [*made, Row("loading tools until the first answer", Figure(results["first_answer_s"], n=1))]


if __name__ == "__main__":
    benchmark("tools", parser_of(__doc__, "fewer repetitions"), measure, rows)
