"""A real language model that learns: SmolLM2-135M, shown the form of a call, then trained by GRPO, by seed.

    python benchmarks/real_model.py                    # three seeds: hours on two cores
    python benchmarks/real_model.py --seeds 42         # one; those measured already stay, so that sessions can be joined
    python benchmarks/real_model.py --quick            # two steps, 16 questions

What runs is what a user runs: `toolgrpo sft` with 64 worked questions, `toolgrpo train`, as recipes/configs/sft/
smollm2_135m.yaml and recipes/configs/smollm2_135m.yaml say. The questions asked are held out: no example and no training step
has them. Success is that of the embedded arithmetic: the tools gave the answer, and the last message says it. Asked are the
model as it comes (greedy), the one that was shown the form, and the trained one (greedy, and with its tokens drawn).

A run is kept as soon as it has ended; where the recipe or its examples change, nothing of before is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _other_work import OtherWork
from _reporting import progress, result_file, save
from _rows import Figure, Row
from _whole_step_learning import difference

NAME = "real_model"
ROOT = Path(__file__).resolve().parents[1]
CONFIG, SHOWN_BY = "recipes/configs/smollm2_135m.yaml", "recipes/configs/sft/smollm2_135m.yaml"
OF_THE_RECIPE = (CONFIG, SHOWN_BY, "recipes/data/arithmetic_examples.jsonl")
TIME_LIMIT_S = 4 * 3600
SEEDS = (42, 1, 2)
QUICK = ("--max_steps", "2", "--per_device_train_batch_size", "16", "--eval_questions", "16")
WAYS = ("greedy", "sampled")


def toolgrpo(command: str, *arguments: str | Path) -> float:
    """Run a command of the package; return its seconds, process start included."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "toolgrpo", command, *map(str, arguments)], cwd=ROOT, check=True, timeout=TIME_LIMIT_S
    )
    return time.monotonic() - started


def untrained(folder: Path, quick: bool) -> dict[str, Any]:
    """What the model does as it comes, and how long the questions take."""
    questions = ("--eval_questions", "16") if quick else ()
    ours = ("--model_name_or_path", "smollm2", "--samples", "1", "--temperature", "0", "--output_dir", folder)
    wall_s = toolgrpo("evaluate", "--config", CONFIG, *ours, *questions)
    found = json.loads((folder / "evaluation.json").read_text())
    return {"wall_s": wall_s, "greedy": found["model"]}


def shown(folder: Path) -> dict[str, Any]:
    """Show the model the form."""
    return {"wall_s": toolgrpo("sft", "--config", SHOWN_BY, "--output_dir", folder)}


def trained(model: Path, seed: int, folder: Path, quick: bool) -> dict[str, Any]:
    with OtherWork() as other:
        wall_s = toolgrpo(
            *("train", "--config", CONFIG, "--model_name_or_path", model, "--seed", str(seed)),
            *("--output_dir", folder, *(QUICK if quick else ())),
        )
    summary = json.loads((folder / "summary.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = [{"step": entry["step"], "success": entry["success"]} for entry in history if "success" in entry]
    found = {name: summary[name] for name in ("before", "after", "steps", "seconds_per_step")}
    return {"seed": seed, "wall_s": wall_s, "other_work": other.share, "curve": curve, **found}


def recipe() -> str:
    """What it was measured with; another recipe is another measurement."""
    digest = hashlib.sha256()
    for name in OF_THE_RECIPE:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


def kept(quick: bool) -> dict[str, Any]:
    path = result_file(NAME)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not quick else {}
    return found if found.get("recipe") == recipe() else {}


def measure(seeds: list[int], quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {"recipe": recipe(), "runs": [], **kept(quick)}
    with tempfile.TemporaryDirectory() as work:
        if "untrained" not in results:
            progress("the model as it comes")
            results["untrained"] = untrained(Path(work) / "untrained", quick)
        model = Path(work) / "shown"
        progress("shown the form")
        results["shown"] = shown(model)
        for number, seed in enumerate(seeds, 1):
            progress(f"GRPO, seed {seed} ({number} of {len(seeds)})")
            run = trained(model, seed, Path(work) / f"seed{seed}", quick)
            results["runs"] = [one for one in results["runs"] if one["seed"] != seed] + [run]
            save(NAME, results, quick=quick, number_type="float32")
            plot(results["runs"], result_file(NAME).with_suffix(".png"))
    return results


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for run in runs:
        steps = [point["step"] for point in run["curve"]]
        (line,) = axes.plot(
            steps, [point["success"] for point in run["curve"]], linewidth=1.2, label=f"seed {run['seed']}"
        )
        ends = [0, run["steps"]]
        held_out = [run[when]["sampled"]["rate"] for when in ("before", "after")]
        axes.plot(ends, held_out, "o", color=line.get_color(), markersize=6)
    axes.set(
        xlabel="step of GRPO (dots: held-out questions)",
        ylabel="success, tokens drawn (temperature 1)",
        ylim=(0, 1),
        title="SmolLM2-135M learns to use tools on two cores",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def gains(runs: list[dict[str, Any]], way: str) -> list[float]:
    """By how much GRPO improves on what was shown the form, by seed."""
    return [run["after"][way]["rate"] - run["before"][way]["rate"] for run in runs]


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    runs = results["runs"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    made = []
    for way in WAYS:
        gain = difference(gains(runs, way))
        interval = "" if gain is None or gain["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*gain["interval"])
        told = "" if gain is None else f": {gain['mean']:+.3f}{interval}"
        made.append(
            Row(
                benchmark=NAME,
                what=f"SmolLM2-135M, held-out success after GRPO, {way}, seeds {seeds}{told}",
                unit="",
                ours=Figure.of([run["after"][way]["rate"] for run in runs]),
                other=Figure.of([run["before"][way]["rate"] for run in runs]),
                other_name="shown the form, no GRPO",
                more_is_better=True,
                target="+0.30",
            )
        )
    for what, of in (
        ("showing SmolLM2-135M the form", [results["shown"]["wall_s"]]),
        ("its GRPO, both measurements included", [run["wall_s"] for run in runs]),
        ("a step of its GRPO", [run["seconds_per_step"]["all"] for run in runs]),
    ):
        made.append(Row(benchmark=NAME, what=what, ours=Figure.of(of)))
    return made


def show(results: dict[str, Any]) -> None:
    of = results["untrained"]["greedy"]["pass@1"]
    print(f"\nas it comes: greedy {of['rate']:.3f}; shown the form in {results['shown']['wall_s']:.0f} s")
    print(f"{'seed':>5} {'':>8} {'shown':>22} {'after GRPO':>22} {'minutes':>8} {'s/step':>7}")
    for run in results["runs"]:
        for way in WAYS:
            told = [
                "{:.3f} [{:.3f}, {:.3f}]".format(run[when][way]["rate"], *run[when][way]["interval"])
                for when in ("before", "after")
            ]
            print(
                f"{run['seed']:>5} {way:>8} {told[0]:>22} {told[1]:>22} {run['wall_s'] / 60:>8.1f} "
                f"{run['seconds_per_step']['all']:>7.2f}"
            )
    for way in WAYS:
        gain = difference(gains(results["runs"], way))
        if gain is not None:
            interval = "" if gain["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*gain["interval"])
            print(f"{way}: {gain['mean']:+.3f}{interval} over what was shown the form ({gain['seeds']} seeds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps, 16 questions, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = parser.parse_args()
    show(measure(options.seeds[:1] if options.quick else options.seeds, options.quick))


if __name__ == "__main__":
    main()
