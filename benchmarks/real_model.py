"""A real language model that learns: SmolLM2-135M, shown the form of a call, then trained by GRPO, by seed.

    python benchmarks/real_model.py                    # three seeds: hours on two cores
    python benchmarks/real_model.py --seeds 42         # one of them
    python benchmarks/real_model.py --quick            # two steps, 16 questions

What runs is what a user runs: `toolgrpo sft` with 96 worked questions, `toolgrpo train`, as recipes/configs/sft/
smollm2_135m.yaml and recipes/configs/smollm2_135m.yaml say. The questions asked are held out: no example and no training step
has them. Success is that of the embedded arithmetic: the tools gave the answer, and the last message says it. Asked are the
model as it comes (greedy), the one that was shown the form, and the trained one (greedy, and with its tokens drawn).

A model is kept in --work as soon as it is made, in a folder of this recipe: where the recipe or its examples change, all are
made again. So seeds can be added later, one by one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from _reporting import progress, result_file, save
from _rows import Figure, Row
from _whole_step_learning import difference

NAME = "real_model"
ROOT = Path(__file__).resolve().parents[1]
CONFIG, SHOWN_BY = "recipes/configs/smollm2_135m.yaml", "recipes/configs/sft/smollm2_135m.yaml"
EXAMPLES = "recipes/data/arithmetic_examples.jsonl"
OF_THE_RECIPE = (CONFIG, SHOWN_BY, EXAMPLES)
WORK = ROOT / "outputs" / NAME
TIME_LIMIT_S = 4 * 3600
SEEDS = (42, 1, 2)
TWO_STEPS = ("--max_steps", "2", "--per_device_train_batch_size", "16")
QUICK = (*TWO_STEPS, "--eval_questions", "16")
WAYS = ("greedy", "sampled")


def made(done: Path, command: str, *arguments: str | Path) -> None:
    """Run a command of the package, if it has not left this behind before."""
    if not done.exists():
        ours = [sys.executable, "-m", "toolgrpo", command, *map(str, arguments), "--output_dir", str(done.parent)]
        subprocess.run(ours, cwd=ROOT, check=True, timeout=TIME_LIMIT_S)


def untrained(folder: Path, quick: bool) -> dict[str, Any]:
    """What the model does as it comes."""
    questions = QUICK[-2:] if quick else ()
    of = ("--model_name_or_path", "smollm2", "--samples", "1", "--temperature", "0")
    made(folder / "evaluation.json", "evaluate", "--config", CONFIG, *of, *questions)
    found = json.loads((folder / "evaluation.json").read_text())["model"]
    return {name: found[name] for name in ("pass@1", "turns")}


def shown(folder: Path) -> Path:
    """Show the model the form."""
    made(folder / "model.safetensors", "sft", "--config", SHOWN_BY)
    return folder


def trained(model: Path, seed: int, folder: Path, quick: bool) -> dict[str, Any]:
    of = ("--model_name_or_path", model, "--seed", str(seed))
    made(folder / "summary.json", "train", "--config", CONFIG, *of, *(QUICK if quick else ()))
    summary = json.loads((folder / "summary.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = [{"step": entry["step"], "success": entry["success"]} for entry in history if "success" in entry]
    found = {name: summary[name] for name in ("before", "after", "steps", "seconds_per_step", "seconds_in_all")}
    return {"seed": seed, "curve": curve, **found}


def recipe() -> str:
    """What it was measured with; another recipe is another measurement."""
    texts = [(ROOT / name).read_text() for name in OF_THE_RECIPE]
    said = [
        yaml.safe_load(text) if name.endswith(".yaml") else text
        for name, text in zip(OF_THE_RECIPE, texts, strict=True)
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]


def kept(quick: bool) -> list[dict[str, Any]]:
    """Runs of this recipe that were measured before, here or on another machine."""
    path = result_file(NAME)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not quick else {}
    return found["runs"] if found.get("recipe") == recipe() else []


def kept_in(quick: bool, work: Path = WORK) -> Path:
    """Where the models of this recipe are."""
    return work / (recipe() + ("-quick" if quick else ""))


def measure(seeds: list[int], work: Path, quick: bool) -> dict[str, Any]:
    folder = kept_in(quick, work)
    progress("the model as it comes")
    results: dict[str, Any] = {"recipe": recipe(), "untrained": untrained(folder / "untrained", quick)}
    progress("showing it the form")
    model = shown(folder / "shown")
    runs = kept(quick)
    for number, seed in enumerate(seeds, 1):
        progress(f"GRPO, seed {seed} ({number} of {len(seeds)})")
        run = trained(model, seed, folder / f"seed{seed}", quick)
        runs = [one for one in runs if one["seed"] != seed] + [run]
        results["runs"] = runs
        save(NAME, results, quick=quick, number_type="bfloat16")
        plot(runs, result_file(NAME).with_suffix(".png"))
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
    found = []
    for way in WAYS:
        gain = difference(gains(runs, way))
        interval = "" if gain is None or gain["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*gain["interval"])
        told = "" if gain is None else f": {gain['mean']:+.3f}{interval}"
        found.append(
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
        ("SmolLM2-135M, GRPO, both measurements included", [run["seconds_in_all"] for run in runs]),
        ("SmolLM2-135M, a step of GRPO", [run["seconds_per_step"]["all"] for run in runs]),
    ):
        found.append(Row(benchmark=NAME, what=what, ours=Figure.of(of)))
    return found


def show(results: dict[str, Any]) -> None:
    print(f"\nas it comes, greedy: {results['untrained']['pass@1']['value']:.3f}")
    print(f"{'seed':>5} {'':>8} {'shown':>22} {'after GRPO':>22} {'minutes':>8} {'s/step':>7}")
    for run in results["runs"]:
        for way in WAYS:
            told = [
                "{:.3f} [{:.3f}, {:.3f}]".format(run[when][way]["rate"], *run[when][way]["interval"])
                for when in ("before", "after")
            ]
            print(
                f"{run['seed']:>5} {way:>8} {told[0]:>22} {told[1]:>22} {run['seconds_in_all'] / 60:>8.1f} "
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
    parser.add_argument("--work", type=Path, default=WORK, help="where the models are kept")
    options = parser.parse_args()
    show(measure(options.seeds[:1] if options.quick else options.seeds, options.work, options.quick))


if __name__ == "__main__":
    main()
