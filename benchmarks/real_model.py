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
from _machine import ROOT
from _reporting import benchmark, kept, parser_of, progress, result_file, save
from _rows import Figure, Row

NAME = "real_model"
CONFIG, SHOWN_BY = "recipes/configs/smollm2_135m.yaml", "recipes/configs/sft/smollm2_135m.yaml"
EXAMPLES = "recipes/data/arithmetic_examples.jsonl"
OF_THE_RECIPE = (CONFIG, SHOWN_BY, EXAMPLES)
TIME_LIMIT_S = 4 * 3600
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    quick, made_by = options.quick, recipe()
    folder: Path = options.work / (made_by + ("-quick" if quick else ""))  # the models of this recipe
    progress("the model as it comes")
    results: dict[str, Any] = {"recipe": made_by, "untrained": untrained(folder / "untrained", quick)}
    progress("showing it the form")
    model = shown(folder / "shown")
    before = {} if quick else kept(NAME, quick)  # here or on another machine
    results["runs"] = before["runs"] if before.get("recipe") == made_by else []
    for seed in options.seeds[: 1 if quick else None]:
        progress(f"GRPO, seed {seed}")
        run = trained(model, seed, folder / f"seed{seed}", quick)
        results["runs"] = [one for one in results["runs"] if one["seed"] != seed] + [run]
        save(NAME, results, quick=quick, number_type="bfloat16")
        plot(results["runs"], result_file(NAME, quick).with_suffix(".png"))
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


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    runs, made = results["runs"], []
    seeds = ", ".join(str(run["seed"]) for run in runs)
    for way in WAYS:
        after, before = ([run[when][way]["rate"] for run in runs] for when in ("after", "before"))
        gain = Figure.of_seeds([one - other for one, other in zip(after, before, strict=True)]).signed
        what = f"SmolLM2-135M, held-out success after GRPO, {way}, seeds {seeds}: {gain}"
        shown, target = "shown the form, no GRPO", "+0.30"
        made.append(Row(what, Figure.of(after), "", Figure.of(before), shown, more_is_better=True, target=target))
    seconds = Figure.of([run["seconds_in_all"] for run in runs])
    made.append(Row("SmolLM2-135M, GRPO, both measurements included", seconds))
    return [*made, Row("a step of it", Figure.of([run["seconds_per_step"]["all"] for run in runs]))]


def main() -> None:
    parser = parser_of(__doc__, "two steps, 16 questions, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / NAME, help="where the models are kept")
    benchmark(NAME, parser, measure, rows, number_type="bfloat16")


if __name__ == "__main__":
    main()
