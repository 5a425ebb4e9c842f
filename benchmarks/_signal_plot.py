"""The picture of `learning_signal.py`: a panel for each part that has been measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = ("C0", "C1", "C2", "C3", "C4")


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"skipped_rows": _skipped_rows, "backfill": _backfill, "chains": _chains}
    shown = [name for name in panels if name in results]
    figure, all_axes = pyplot.subplots(1, len(shown), figsize=(5.5 * len(shown), 4), squeeze=False)
    for axes, name in zip(all_axes[0], shown, strict=True):
        panels[name](axes, results[name])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _skipped_rows(axes: Any, part: dict[str, Any]) -> None:
    for run, color in zip(part["runs"], COLORS, strict=False):
        for way, line in (("whole", ":"), ("live", "-")):
            steps = [step["step"] for step in run["steps"]]
            seconds = [sum(step[way].values()) for step in run["steps"]]
            axes.plot(steps, seconds, line, color=color, linewidth=1.2, label=f"seed {run['seed']}, {way} rows")
    axes.set(xlabel="step", ylabel="seconds of the training pass", title="rows without an advantage left out")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _backfill(axes: Any, part: dict[str, Any]) -> None:
    named = set()
    for run in part["runs"]:
        points = [{"episodes": 0, "success": run["before"]}, *run["curve"]]
        label = None if run["way"] in named else f"{run['way']}, a line a seed"
        _curve(axes, points, "C0" if run["way"] == "off" else "C1", label)
        named.add(run["way"])
    _finish(axes, part["target"], "nano with and without backfill")


def _chains(axes: Any, part: dict[str, Any]) -> None:
    arms = list(dict.fromkeys(run["arm"] for run in part["runs"]))
    named = set()
    for run in part["runs"]:
        for n, line in zip(run["reached"], ("-", "--"), strict=False):
            points = [
                {"episodes": point.get("episodes", 0), "success": point["by_calls"][n]}
                for point in [run["before"], *run["curve"]]
            ]
            label = f"{run['arm']}, {n} calls"
            _curve(axes, points, COLORS[arms.index(run["arm"])], None if label in named else label, line)
            named.add(label)
    _finish(axes, part["target"], "chains of three and four calls")


def _curve(axes: Any, points: list[dict[str, Any]], color: str, label: str | None, line: str = "-") -> None:
    episodes = [point["episodes"] for point in points]
    axes.plot(episodes, [point["success"] for point in points], line, color=color, label=label, linewidth=1.2)


def _finish(axes: Any, target: float, title: str) -> None:
    axes.axhline(target, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="episodes", ylabel="held-out success (greedy)", ylim=(0, 1), title=title)
    axes.legend(fontsize=7)
