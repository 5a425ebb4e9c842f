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

Each point is the median of its repetitions (TRL's loop: one), which take turns, after one of each that is not counted. Writes benchmarks/results/scaling_curves.json
after each curve, and scaling_curves.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import training_pass
from _reporting import progress, result_file, save
from _rollout_loops import Decide, NativeLoop, OurLoop, decision, prepare_vllm
from _rows import Figure, Row
from training_pass import Case

if __name__ == "__main__":
    prepare_vllm()

Point = dict[str, Any]  # x, and the seconds of both by repetition
Measure = Callable[[str, float], Point]

LATENCY_S, ROLLOUTS = 0.05, 32
CASE = Case(prompt=600, completion=100, group=8, lengths="full", hidden=128, layers=2)
CURVES: dict[str, tuple[float, ...]] = {
    "latency": (0.0, 0.05, 0.1, 0.2),
    "turns": (1, 2, 4, 8),
    "rollouts": (8, 16, 32, 64, 128),
    "group": (1, 2, 4, 8, 16),
    "prompt": (100, 300, 600, 1200, 2400),
}
OF_LOOP, OF_PASS = ("latency", "turns", "rollouts"), ("group", "prompt")
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
        from toolgrpo.models import NANO

        self.native = NativeLoop(str(NANO))
        self.ours = OurLoop(self.native)
        for run in (self.native.run, self.ours.run):
            run(range(ROLLOUTS))  # warm up

    def point(self, curve: str, x: float) -> Point:
        n = int(x) if curve == "rollouts" else ROLLOUTS
        decide: Decide = decision if curve != "turns" else lambda uid, turn: 1.0 if turn + 1 < x else None
        both = (("trl", self.native), ("ours", self.ours))
        for _, loop in both:  # vLLM may not have met steps of so many tokens
            loop.latency_s, loop.decide = 0.0, decide
            loop.run(range(n))
            loop.latency_s = x if curve == "latency" else LATENCY_S
        times: dict[str, list[float]] = {"trl": [], "ours": []}
        sampled: dict[str, int] = {}
        for number in range(REPETITIONS):
            for name, loop in both:
                if name == "ours" or number == 0:
                    self.native.llm.reset_prefix_cache()
                    seconds, sampled[name] = loop.run(range(n))
                    times[name].append(seconds)
        assert sampled["trl"] == sampled["ours"], f"both must sample the same number of tokens: {sampled}"
        return {"x": x, **times}


@contextmanager
def of_loop() -> Iterator[Measure]:
    """What measures a point of the loops, in this process."""
    loops = Loops()
    try:
        yield loops.point
    finally:
        loops.ours.tools.close()


@contextmanager
def of_pass() -> Iterator[Measure]:
    """What measures a point of the passes, in processes of their own, which load while nothing is measured."""
    with training_pass.servers(min(2, len(os.sched_getaffinity(0)))) as by_way:
        ways = {way: server for way, server in by_way.items() if way != "padded"}
        training_pass.measure(by_way, CASE, 1)

        def point(curve: str, x: float) -> Point:
            case = replace(CASE, group=int(x)) if curve == "group" else replace(CASE, prompt=int(x))
            found = training_pass.measure(ways, case, REPETITIONS)
            return {"x": x, "trl": found["trl"].all_pass_s, "ours": found["shared"].all_pass_s}

        yield point


def points_of(curve: str, measure: Measure, quick: bool) -> list[Point]:
    xs = CURVES[curve][0:3:2] if quick else CURVES[curve]
    progress(f"{AXES[curve]}: {', '.join(f'{x:g}' for x in xs)}")
    found = []
    for x in xs:
        found.append(measure(curve, x))
        trl, ours = (statistics.median(found[-1][name]) for name in ("trl", "ours"))
        print(f"{curve:>10} {x:>7g}: TRL {trl:7.2f} s, ours {ours:6.2f} s, {trl / ours:5.1f} times", flush=True)
    return found


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
    for of, opened in ((OF_LOOP, of_loop), (OF_PASS, of_pass)):
        chosen = [curve for curve in options.curves if curve in of]
        if not chosen:
            continue
        with opened() as measure:
            for curve in chosen:
                found[curve] = points_of(curve, measure, options.quick)
                save("scaling_curves", {"curves": found}, quick=options.quick, number_type="float32")
    plot(found, result_file("scaling_curves").with_suffix(".png"))


if __name__ == "__main__":
    main()
