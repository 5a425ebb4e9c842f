"""How the cost grows: the rollout loop and the training pass, TRL's and ours, along one quantity at a time.

    python benchmarks/scaling_curves.py            # about five minutes on two cores
    python benchmarks/scaling_curves.py --quick    # two points a curve

The loops are those of `rollouts.py`: nano, one engine, the same decisions and tokens for both. 32 rollouts of up to five turns,
whose calls take 0.05 s, and one of the three is varied:

    latency    seconds that a call takes
    turns      of every rollout: all but the last one call
    rollouts   at a time

The pass is that of `training_pass.py`, forward and backward, TRL's padded one and the shared one: a model of width 128, a
group of 8 completions of 100 tokens behind a prompt of 600, and one of two is varied:

    group      completions of one prompt
    prompt     tokens

Each point is the median of its repetitions (TRL's loop: one), which take turns. Writes benchmarks/results/scaling_curves.json
after each curve, and scaling_curves.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import training_pass
from _reporting import progress, result_file, save
from _rollout_loops import NativeLoop, OurLoop, decision
from _rows import Figure, Row
from training_pass import Case

Point = dict[str, Any]  # x, and the seconds of both by repetition
Decide = Callable[[int, int], float | None]

LATENCY_S, ROLLOUTS = 0.05, 32
CASE = Case(prompt=600, completion=100, group=8, lengths="full", hidden=128, layers=2)
CURVES: dict[str, tuple[float, ...]] = {
    "latency": (0.0, 0.05, 0.1, 0.2),
    "turns": (1, 2, 4, 8),
    "rollouts": (8, 16, 32, 64, 128),
    "group": (1, 2, 4, 8, 16),
    "prompt": (100, 300, 600, 1200, 2400),
}
OF_LOOP = ("latency", "turns", "rollouts")
AXES = {
    "latency": "seconds that a tool call takes",
    "turns": "turns of a rollout",
    "rollouts": "rollouts at a time",
    "group": "completions of one prompt",
    "prompt": "tokens of the prompt",
}
REPETITIONS = 3


class Loops:
    """Both loops over one engine."""

    def __init__(self) -> None:
        from toolgrpo.models.nano import ensure_nano

        self.native = NativeLoop(str(ensure_nano()))
        self.ours = OurLoop(self.native)
        for run in (self.native.run, self.ours.run):
            run(range(ROLLOUTS))  # warm up

    def point(self, curve: str, x: float) -> Point:
        n = int(x) if curve == "rollouts" else ROLLOUTS
        decide: Decide = decision if curve != "turns" else lambda uid, turn: 1.0 if turn + 1 < x else None
        for loop in (self.native, self.ours):
            loop.latency_s, loop.decide = x if curve == "latency" else LATENCY_S, decide
        times: dict[str, list[float]] = {"trl": [], "ours": []}
        sampled: dict[str, int] = {}
        self.ours.run(range(n))  # vLLM may not have met steps of so many tokens
        for number in range(REPETITIONS):
            for name, loop in (("trl", self.native), ("ours", self.ours)):
                if name == "ours" or number == 0:
                    self.native.llm.reset_prefix_cache()
                    seconds, sampled[name] = loop.run(range(n))
                    times[name].append(seconds)
        assert sampled["trl"] == sampled["ours"], f"both must sample the same number of tokens: {sampled}"
        return {"x": x, **times}


@contextmanager
def measuring(curves: Sequence[str]) -> Iterator[Callable[[str, float], Point]]:
    """What measures a point of a curve; the loops share this process, the passes have some of their own."""
    loops = Loops() if set(curves) & set(OF_LOOP) else None
    threads = min(2, len(os.sched_getaffinity(0)))
    with training_pass.servers(threads) as by_way:

        def measure(curve: str, x: float) -> Point:
            if curve in OF_LOOP:
                assert loops is not None
                return loops.point(curve, x)
            ways = {way: server for way, server in by_way.items() if way != "padded"}
            case = replace(CASE, group=int(x)) if curve == "group" else replace(CASE, prompt=int(x))
            found = training_pass.measure(ways, case, REPETITIONS)
            return {"x": x, "trl": found["trl"].all_pass_s, "ours": found["shared"].all_pass_s}

        try:
            yield measure
        finally:
            if loops is not None:
                loops.ours.tools.close()


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    return [
        Row(
            benchmark="scaling_curves",
            what=f"{'rollouts' if curve in OF_LOOP else 'training pass'}, {AXES[curve]}: {point['x']:g}",
            ours=Figure.of(point["ours"]),
            other=Figure.of(point["trl"]),
            other_name="TRL",
        )
        for curve, points in results["curves"].items()
        for point in points
    ]


def plot(curves: dict[str, list[Point]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(curves), figsize=(3.4 * len(curves), 3.2), squeeze=False)
    for axes, (curve, points) in zip(all_axes[0], curves.items(), strict=True):
        xs = [point["x"] for point in points]
        for name, shown, line in (("trl", "TRL", "o:"), ("ours", "toolgrpo", "o-")):
            axes.plot(xs, [statistics.median(point[name]) for point in points], line, markersize=4, label=shown)
        what = "rollouts" if curve in OF_LOOP else "training pass"
        axes.set(xlabel=AXES[curve], title=what, ylim=(0, None), xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].set_ylabel("seconds")
    all_axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first and the third point of each curve")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    options = parser.parse_args()
    found: dict[str, list[Point]] = {}
    with measuring(options.curves) as measure:
        for curve in options.curves:
            points = CURVES[curve][0:3:2] if options.quick else CURVES[curve]
            progress(f"{AXES[curve]}: {', '.join(f'{x:g}' for x in points)}")
            found[curve] = []
            for x in points:
                point = measure(curve, x)
                trl, ours = (statistics.median(point[name]) for name in ("trl", "ours"))
                print(f"{curve:>10} {x:>7g}: TRL {trl:7.2f} s, ours {ours:6.2f} s, {trl / ours:5.1f} times", flush=True)
                found[curve].append(point)
            save("scaling_curves", {"curves": found}, quick=options.quick, number_type="float32")
    plot(found, result_file("scaling_curves").with_suffix(".png"))


if __name__ == "__main__":
    main()
