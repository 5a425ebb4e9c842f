"""Episodes of several segments: what dropping old results does to a long chain of calls.

    python benchmarks/segments.py                       # --seeds 42 43
    python benchmarks/segments.py --quick               # a few small steps, one seed

20 pages of 300 tokens: whole in a large window, and in a third of it with `context`. The runs are kept as they are made, in
`outputs/segments`, and one that is there is not made again. Writes benchmarks/results/segments.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from toolgrpo.support.process_setup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

import _book
from _machine import ROOT
from _reporting import benchmark, parser_of
from _rows import Figure, Row

KEPT = ROOT / "outputs" / "segments"
TIME_LIMIT_S = 4 * 3600


WINDOW = 2300  # tokens: a third of what the whole chain needs
ARMS: dict[str, tuple[str, ...]] = {
    "whole, large window": ("--vllm_max_model_length", "8000"),
    "drop_results": (
        *("--vllm_max_model_length", str(WINDOW)),
        *("--context", json.dumps({"max_tokens": WINDOW - 60, "keep_last_turns": 1})),
    ),
}
TRAINING = (
    *("--environment", "benchmarks/_book.py:Book", "--reward", "exact_match"),
    *("--max_turns", str(_book.PAGES + 4), "--max_turn_tokens", "48", "--max_completion_length", "7600"),
    *("--num_generations", "8", "--learning_rate", "2e-4", "--lr_scheduler_type", "constant_with_warmup"),
    *("--warmup_steps", "5", "--adam_beta2", "0.95", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--report_to", "none", "--save_strategy", "no", "--logging_steps", "1", "--temperature", "1.0"),
)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Held-out success before and after training, of each arm, from one model that was shown the form."""
    quick = options.quick
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
                    *("train", "--model_name_or_path", str(model), "--dataset_id_or_path", str(data)),
                    *("--eval_dataset_id_or_path", str(heldout), "--eval_questions", asked),
                    *(*TRAINING, *flags, "--seed", str(seed), "--output_dir", str(out)),
                    *("--max_steps", size[0], "--per_device_train_batch_size", size[1]),
                    *("--gradient_accumulation_steps", size[2]),
                )
                kept.write_text(json.dumps(_result(out)))
            runs.append({"arm": name, "seed": seed, **json.loads(kept.read_text())})
    found = {"pages": _book.PAGES, "page_tokens": _page_tokens(model), "window": WINDOW, "runs": runs}
    return {"chain": found}


def _shown_model(folder: Path, quick: bool) -> Path:
    """nano with room for long contexts, that was shown how a book is read."""
    from toolgrpo.models import NANO
    from toolgrpo.rollout.compaction import STUB

    base, shown = folder / "nano", folder / "shown"
    if not (shown / "config.json").exists():
        shutil.copytree(NANO, base, dirs_exist_ok=True)
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
        data = _book.write(folder / "shown.jsonl", _book.demonstrations(20 if quick else 1000, STUB))
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


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    what = f"a chain of {results['chain']['pages']} pages"
    return [
        Row(f"{what}, {run['arm']}, seed {run['seed']}: success {label}", Figure(value), "")
        for run in results["chain"]["runs"]
        for label, value in run["heldout"].items()
    ]


def main() -> None:
    parser = parser_of(__doc__, "a few small steps, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    benchmark("segments", parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
