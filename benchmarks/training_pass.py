"""The training pass: TRL's padded method and the prefix-shared one on the same model and batch, in one run.

    python benchmarks/training_pass.py                     # every size; ten minutes on two cores
    python benchmarks/training_pass.py --quick             # a tiny model, one round
    python benchmarks/training_pass.py --default-malloc    # without what toolgrpo.startup does about memory

One row per size: seconds of forward + backward through TRL's `_compute_loss` shape (fused LM head, entropies), and the
most memory one pass adds (high-water mark of resident memory, each pass in a process of its own). Ratios compare medians of
alternating rounds, so a busy machine disturbs both alike. Completion lengths are either all the longest ("full") or
spread evenly from a quarter of it to all of it ("spread"). Writes benchmarks/results/training_pass.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolgrpo.startup import prepare

if "--default-malloc" not in sys.argv:
    prepare()

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from toolgrpo.trainer.prefix_sharing import SharedPass

RESULT = Path(__file__).parent / "results" / "training_pass.json"
SIZES = [(1200, 200, 8), (400, 400, 8), (200, 1000, 8), (20, 300, 8), (400, 100, 1)]
MODES = ("padded", "shared")


@dataclass(frozen=True, slots=True)
class Case:
    prompt: int
    completion: int
    group: int
    lengths: str  # full or spread
    hidden: int
    layers: int


@dataclass(frozen=True, slots=True)
class Measured:
    case: Case
    padded_s: float
    shared_s: float
    padded_mib: float
    shared_mib: float

    @property
    def speedup(self) -> float:
        return self.padded_s / self.shared_s


def build(case: Case) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8000,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=max(1, case.hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(0, 8000, (case.group, case.prompt + case.completion))
    ids[:, : case.prompt] = ids[0, : case.prompt].clone()
    mask = torch.ones_like(ids)
    if case.lengths == "spread":
        for i, row in enumerate(mask):
            part = 0.25 + 0.75 * (i + 1) / case.group
            row[case.prompt + int(part * case.completion) :] = 0
    return model, ids, mask


def one_pass(mode: str, case: Case, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """Forward and backward once; seconds."""
    model.zero_grad()
    start = time.perf_counter()
    scored = None
    if mode == "shared":
        scored = SharedPass(mode="auto").score_completions(
            model, ids, mask, case.completion, unwrapped=model, compute_entropy=True
        )
    if scored is None:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : -case.completion] = -100
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        logps = output.log_probs[:, -case.completion :]
    else:
        logps = scored.logps
    (logps * mask[:, -case.completion :]).sum().backward()
    return time.perf_counter() - start


def peak_mib(mode: str, case: Case) -> float:
    """What the high-water mark of a fresh process grows by in one pass."""

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(_peak, (mode, case)))


def _peak(mode: str, case: Case) -> float:
    model, ids, mask = build(case)
    one_pass(mode, Case(40, 20, 2, "full", case.hidden, case.layers), model, ids[:2, :60], mask[:2, :60])  # libraries
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status_mib("VmRSS")
    one_pass(mode, case, model, ids, mask)
    return _status_mib("VmHWM") - before


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def measure(case: Case, rounds: int) -> Measured:
    model, ids, mask = build(case)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for mode in MODES:
            taken = one_pass(mode, case, model, ids, mask)
            if number:  # the first round warms up
                seconds[mode].append(taken)
    medians = {mode: statistics.median(seconds[mode]) for mode in MODES}
    return Measured(case, medians["padded"], medians["shared"], peak_mib("padded", case), peak_mib("shared", case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--default-malloc", action="store_true", help="memory as glibc manages it by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hidden, layers, rounds = (128, 2, 1) if args.quick else (args.hidden, args.layers, args.rounds)
    results = []
    print(
        f"{'prompt':>6} {'compl.':>6} {'group':>5} {'lengths':>7} {'padded':>8} {'shared':>8} {'faster':>7} {'MiB':>13}"
    )
    for prompt, completion, group in SIZES:
        for lengths in ("full", "spread") if group > 1 else ("full",):
            found = measure(Case(prompt, completion, group, lengths, hidden, layers), rounds)
            results.append({**asdict(found), "speedup": found.speedup})
            print(
                f"{prompt:6d} {completion:6d} {group:5d} {lengths:>7} {found.padded_s:7.2f}s {found.shared_s:7.2f}s "
                f"{found.speedup:6.2f}x {found.padded_mib:6.0f} {found.shared_mib:6.0f}",
                flush=True,
            )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"threads": args.threads, "device": "cpu", "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
