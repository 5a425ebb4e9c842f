"""Episodes of several segments: what they teach, what they cost, and what compaction does to a long chain.

    python benchmarks/segments.py                       # all parts
    python benchmarks/segments.py --part gradients      # one of them; the others' results stay as they are
    python benchmarks/segments.py --part step --before ../a_checkout_without_segments
    python benchmarks/segments.py --quick               # a few small steps of each, one seed

gradients   an episode that is cut against the whole one: gradients of a tiny model in float64, of every loss
step        a step of one-segment episodes on nano, in this tree and in another one, in turn
chain       20 pages of 300 tokens: whole in a large window, and in a third of it with drop_results and summarize

The chain's runs are kept as they are made, in `outputs/segments`, and one that is there is not made again.
Prints a table a part and writes benchmarks/results/segments.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

import _book
from _rows import Figure, Row

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "segments.json"
KEPT = ROOT / "outputs" / "segments"
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
TIME_LIMIT_S = 4 * 3600


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients(quick: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The largest difference of a gradient, over its norm, for each loss and each pass."""
    found: dict[str, dict[str, float]] = {}
    for sharing in ("on", "off"):
        whole, cut = (_gradients_of(sharing, cuts, LOSSES[:2] if quick else LOSSES) for cuts in (False, True))
        for loss, one, other in zip(LOSSES, whole, cut, strict=False):
            found.setdefault(loss, {})[sharing] = float((one - other).norm() / one.norm())
    return {"relative_difference": found}


def _gradients_of(sharing: str, cuts: bool, losses: tuple[str, ...]) -> list[Any]:
    """The gradient of a step of each loss, over episodes of one to three turns that are cut or whole."""
    import torch
    from transformers import TrainerCallback

    from toolgrpo.testing import ScriptedTools, tiny_trainer
    from toolgrpo.testing.episodes import cut_into_segments, of_several_turns
    from toolgrpo.trainer.trainer import ToolGRPOTrainer

    class Cutting(ToolGRPOTrainer):
        def rollout(self, *args: Any, **kwargs: Any) -> Any:
            batch = super().rollout(*args, **kwargs)
            if not cuts:
                return batch
            places = [(len(t.ids) // 4, len(t.ids) - 2) for t in batch.trajectories]
            cut = [cut_into_segments(t, *at) for t, at in zip(batch.trajectories, places, strict=True)]
            episodes = zip(batch.episodes, cut, strict=True)
            return replace(batch, episodes=tuple(replace(one, trajectory=by) for one, by in episodes))

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.loss_type = loss = losses[state.global_step]
            run.importance_sampling_level = "sequence" if loss == "luspo" else "token"

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))

    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        run = tiny_trainer(
            Path(folder),
            lambda completions, **_: [float(place % 3) for place in range(len(completions))],
            of_several_turns,
            kind=Cutting,
            parts={"callbacks": [Steps()], "tools": ScriptedTools({"look": lambda at: f"r{at}"})},
            max_steps=len(losses),
            learning_rate=1e-12,
            max_grad_norm=0.0,
            prefix_sharing=sharing,
            vllm_importance_sampling_correction=False,
        )
        _in_float64(run.model)
        run.train()
        run.close()
    return found


def _in_float64(model: Any) -> None:
    """Make a model compute in float64, its rotation angles too.

    Transformers computes those in float32, at positions that a row's padding shifts: that alone is a difference of
    about 1e-6 between two rows of other lengths.
    """
    import torch

    def angles(module: Any, x: Any, position_ids: Any) -> tuple[Any, Any]:
        of_half = position_ids[..., None].double() * module.inv_freq
        of_all = torch.cat((of_half, of_half), dim=-1)
        return of_all.cos() * module.attention_scaling, of_all.sin() * module.attention_scaling

    model.double()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.forward = partial(angles, module)


def show_gradients(results: dict[str, Any]) -> None:
    print(f"{'loss':>8} {'shared pass':>12} {'padded pass':>12}   |cut - whole| / |whole|")
    for loss, by in results["relative_difference"].items():
        print(f"{loss:>8} {by['on']:>12.1e} {by['off']:>12.1e}")


# --- a step of one-segment episodes ----------------------------------------------------------------------------------


def step(quick: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Step times of both trees, run in turn; the first step of a run warms up and is left out."""
    trees = {"here": ROOT, "before": Path(options.before).resolve() if options.before else ROOT}
    times: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(1 if quick else 4):
        for name in sorted(trees, reverse=bool(number % 2)):
            times[name].append(statistics.median(_steps_of(trees[name], 3 if quick else 12)))
    ratios = [here / before for here, before in zip(times["here"], times["before"], strict=True)]
    return {"seconds": times, "before": str(options.before or "this tree"), "ratio": statistics.median(ratios)}


def _steps_of(tree: Path, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        asked = ("--config", "recipes/configs/nano.yaml", "--max_steps", str(steps), "--eval_questions", "0")
        where = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "toolgrpo", "train", *asked, "--quiet", "true", "--output_dir", folder]
        subprocess.run(command, check=True, cwd=tree, env=where, timeout=TIME_LIMIT_S, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "steps.jsonl").read_text().splitlines()]
    found = [line["metrics"]["step_time"] for line in lines if "step_time" in line.get("metrics", {})]
    return found[1:]


def show_step(results: dict[str, Any]) -> None:
    print(f"a step of one-segment episodes takes {results['ratio']:.3f} of that of {results['before']}")


# --- a long chain ----------------------------------------------------------------------------------------------------

WINDOW = 2300  # tokens: a third of what the whole chain needs
ARMS: dict[str, tuple[str, ...]] = {
    "whole, large window": ("--vllm_max_model_length", "8000"),
    "drop_results": (
        *("--vllm_max_model_length", str(WINDOW)),
        *("--context", json.dumps({"max_tokens": WINDOW - 60, "keep_last_turns": 1})),
    ),
    "summarize": (
        *("--vllm_max_model_length", str(WINDOW)),
        *("--context", json.dumps({"max_tokens": WINDOW - 400, "keep_last_turns": 2, "strategy": "summarize"})),
    ),
}
TRAINING = (
    *("--environment", "benchmarks/_book.py:Book", "--reward", "exact_match"),
    *("--max_turns", str(_book.PAGES + 4), "--max_turn_tokens", "48", "--max_completion_length", "7600"),
    *("--num_generations", "8", "--learning_rate", "2e-4", "--lr_scheduler_type", "constant_with_warmup"),
    *("--warmup_steps", "5", "--adam_beta2", "0.95", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--report_to", "none", "--save_strategy", "no", "--logging_steps", "1", "--temperature", "1.0"),
)


def chain(quick: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Held-out success before and after training, of each arm, from one model that was shown the form."""
    folder = KEPT / ("quick" if quick else "full")
    model = _shown_model(folder, quick)
    data = _book.write(folder / "train.jsonl", _book.rows(8 if quick else 400, "train"))
    heldout = _book.write(folder / "heldout.jsonl", _book.rows(2 if quick else 40, "heldout"))
    runs = []
    for seed in options.seeds[: 1 if quick else None]:
        for name, flags in ARMS.items():
            out = folder / f"{name.replace(' ', '_').replace(',', '')}_{seed}"
            kept = out / "result.json"
            if not kept.exists():
                size = ("1", "8", "1") if quick else ("12", "4", "4")  # 16 episodes of 6,700 tokens at once take 17 GB
                asked = "2" if quick else "40"
                _run(
                    *(
                        "train",
                        "--model_name_or_path",
                        str(model),
                        "--dataset_id_or_path",
                        str(data),
                        *TRAINING,
                        *flags,
                    ),
                    *(
                        "--eval_dataset_id_or_path",
                        str(heldout),
                        "--eval_questions",
                        asked,
                        "--seed",
                        str(seed),
                        "--output_dir",
                        str(out),
                    ),
                    *("--max_steps", size[0], "--per_device_train_batch_size", size[1]),
                    *("--gradient_accumulation_steps", size[2]),
                )
                kept.write_text(json.dumps(_result(out)))
            runs.append({"arm": name, "seed": seed, **json.loads(kept.read_text())})
    return {"pages": _book.PAGES, "page_tokens": _page_tokens(model), "window": WINDOW, "runs": runs}


def _shown_model(folder: Path, quick: bool) -> Path:
    """nano with room for long contexts, that was shown how a book is read."""
    from toolgrpo.models import NANO
    from toolgrpo.rollout.compaction import STUB, SUMMARY_REQUEST

    base, shown = folder / "nano", folder / "shown"
    if not (shown / "config.json").exists():
        shutil.copytree(NANO, base, dirs_exist_ok=True)
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
        data = _book.write(folder / "shown.jsonl", _book.demonstrations(20 if quick else 1000, SUMMARY_REQUEST, STUB))
        schema = folder / "open_page.py"
        schema.write_text("from benchmarks._book import Book\n\nTOOL_FUNCTIONS = [Book().open_page]\n")
        _run(
            *("sft", "--model_name_or_path", str(base), "--dataset_id_or_path", str(data), "--max_length", "8192"),
            *("--tools_script", str(schema), "--output_dir", str(shown), "--bf16", "false", "--report_to", "none"),
            # one conversation at a time: beside a whole book all others would be padded to its length
            *("--max_steps", "2" if quick else "250", "--per_device_train_batch_size", "1"),
            *("--gradient_accumulation_steps", "8"),
        )
    return shown


def _run(*flags: str) -> None:
    where = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "toolgrpo", *flags], check=True, cwd=ROOT, timeout=TIME_LIMIT_S, env=where)


def _result(out: Path) -> dict[str, Any]:
    """Success by label, as the run recorded it, and what its training episodes were like."""
    from toolgrpo.observe.records import read_episodes

    found: dict[str, list[bool]] = {}
    for record in read_episodes(out / "heldout.jsonl"):
        found.setdefault(str(record["label"]), []).append(bool(record["success"]))
    trained = read_episodes(out / "episodes.jsonl")
    segments = [1 + len(record.get("segment_starts") or ()) for record in trained]
    return {
        "heldout": {label: statistics.fmean(of) for label, of in found.items()},
        "trained": statistics.fmean(bool(record["success"]) for record in trained),
        "segments": statistics.fmean(segments),
        "ended": {end: [r["stop_reason"] for r in trained].count(end) for end in {r["stop_reason"] for r in trained}},
    }


def _page_tokens(model: Path) -> int:
    from transformers import AutoTokenizer

    book = _book.Book()
    book.reset()
    return len(AutoTokenizer.from_pretrained(model).encode(book.open_page(0), add_special_tokens=False))


def show_chain(results: dict[str, Any]) -> None:
    print(f"{results['pages']} pages of {results['page_tokens']} tokens, a window of {results['window']}")
    for run in results["runs"]:
        heldout = ", ".join(f"{label} {value:.2f}" for label, value in run["heldout"].items())
        print(f"{run['arm']:>20} seed {run['seed']:>3}: {heldout}; {run['segments']:.1f} segments an episode")


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for loss, by in results.get("gradients", {}).get("relative_difference", {}).items():
        for sharing, name in (("on", "shared pass"), ("off", "padded pass")):
            what = f"gradient of cut episodes less that of whole ones, over that of whole ones: {loss}, {name}"
            made.append(Row(benchmark="segments", what=what, unit="", ours=Figure(by[sharing]), target="1e-6"))
    if step := results.get("step"):
        what = "a step of one-segment episodes, of that before segments"
        made.append(Row(benchmark="segments", what=what, unit="", ours=Figure(step["ratio"]), target="0.98 to 1.02"))
    for run in results.get("chain", {}).get("runs", ()):
        for label, value in run["heldout"].items():
            what = f"a chain of {results['chain']['pages']} pages, {run['arm']}, seed {run['seed']}: success {label}"
            made.append(Row(benchmark="segments", what=what, unit="", ours=Figure(value), more_is_better=True))
    return made


PARTS = {"gradients": (gradients, show_gradients), "step": (step, show_step), "chain": (chain, show_chain)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small steps of each part, one seed")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument("--before", help="a checkout of before, whose steps `step` is compared with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    options = parser.parse_args()
    RESULT.parent.mkdir(exist_ok=True)
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in options.part or PARTS:
        measure, show = PARTS[name]
        measured = measure(options.quick, options)
        show(measured)
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "quick": options.quick}
        results[name] = {**measured, "machine": machine}
        RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
