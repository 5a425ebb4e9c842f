"""The training pass: TRL's padded method and the prefix-shared one on the same model and batch, in one run.

    python benchmarks/training_pass.py            # every size; a quarter of an hour on two cores
    python benchmarks/training_pass.py --quick    # a tiny model, and sizes with much, little and nothing to share
    python benchmarks/training_pass.py --real     # a vocabulary of 151,936, an adapter, checkpointing: some minutes
    python benchmarks/training_pass.py --hybrids  # models with recurrent layers: some minutes

Three ways, each in a process of its own, which take turns, so that a busy machine disturbs all alike:

    trl       TRL's padded pass in a plain process, as it comes
    padded    ours with `prefix_sharing: off`: TRL's pass with what toolgrpo.support.process_setup does about memory and OpenMP and a
              tuned output head; what is left is the sharing alone
    shared    ours, as a training run has it

One row per size: seconds of forward + backward as TRL's loss needs them (fused LM head, entropies), of the whole optimizer step
(with clipping and AdamW), and the most memory the first pass adds (high-water mark of resident memory). Medians of
the rounds. Completion lengths are either all the longest ("full") or spread evenly from a quarter of it to all of it
("spread"). `--real` takes the first pass alone of layers as wide as those of Qwen2.5-0.5B, and a fourth way, `heap`: ours
with all memory from the heap and 33 MB tiles of the head, as before; a fifth, `kept`: without checkpointing; and two with
weights in bf16 under an adapter in fp32: `bf16` as a run has it (`toolgrpo/models/adapter_step.py`), `bf16_peft` with
PEFT's own layers. Writes benchmarks/results/training_pass.json.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _machine import stamp_of
from _reporting import STAMP, benchmark, kept, parser_of, progress, save
from _rows import Figure, Row

if __name__ == "__main__" and "--serve" in sys.argv and "trl" not in sys.argv:
    from toolgrpo.support.process_setup import prepare

    prepare()  # before PyTorch is imported, which only the serving processes do
    if "heap" in sys.argv:
        os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX

if TYPE_CHECKING:
    import torch

SIZES = [(1200, 200, 8), (400, 400, 8), (200, 1000, 8), (20, 300, 8), (400, 100, 1)]
QUICK_SIZES = [SIZES[0], SIZES[2], SIZES[3]]
NAME = "training_pass"
WAYS = ("trl", "padded", "shared")
REAL_WAYS = ("trl", "heap", "shared", "kept", "bf16_peft", "bf16")


@dataclass(frozen=True, slots=True)
class Case:
    prompt: int
    completion: int
    group: int
    lengths: str  # full or spread
    hidden: int
    layers: int
    vocabulary: int = 8000
    adapter: bool = False  # LoRA and gradient checkpointing, and no step after the first pass
    family: str = "qwen3"


REAL = Case(1200, 128, 4, "spread", 896, 6, vocabulary=151_936, adapter=True)
HYBRIDS = [
    Case(prompt, 200, 8, lengths, 256, 8, family=family)
    for family in ("qwen3_5", "lfm2", "granitemoehybrid")
    for prompt, lengths in ((1200, "full"), (20, "full"), (20, "spread"))
]


@dataclass(frozen=True, slots=True)
class Measured:
    """One way's medians for one case, and what they are the medians of."""

    pass_s: float
    step_s: float
    peak_mib: float
    all_pass_s: list[float]
    all_step_s: list[float]


# --- in the serving processes ----------------------------------------------------------------------------------------


def serve(way: str, threads: int) -> None:
    """Take cases from stdin, each in a fork that has computed nothing before, so that its memory starts from nothing."""
    logging.disable()  # what the shared pass steps aside for stands in the table
    import torch
    import transformers  # noqa: F401  # imported once, for all forks
    import trl.trainer.utils

    if way != "trl":
        from toolgrpo.trainer.trl.trainer import tune_fused_head

        tune_fused_head(torch.device("cpu"))  # for all forks
    if way == "heap":
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 32768
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(threads)
            _serve_case(way, Case(**json.loads(line)))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status != 0:
            raise SystemExit(
                f"{way}: the process of a case ended with status {status} (9: killed, for want of memory?)"
            )


def _serve_case(way: str, case: Case) -> None:
    """The first pass tells the memory; then one step for each line, until the line that says it is over."""
    import torch

    model, ids, mask = build(case, torch.bfloat16 if "bf16" in way else torch.float32)
    if way == "bf16":
        from toolgrpo.models.adapter_step import join_adapters

        join_adapters(model)
    if way == "kept":
        model.gradient_checkpointing_disable()
    if case.adapter and way not in ("trl", "heap"):
        from toolgrpo.support.process_setup import map_large_blocks

        map_large_blocks()  # as a run of this size does
    small = replace(case, prompt=40, completion=20, group=2, lengths="full")
    score(way, small, model, ids[:2, :60], mask[:2, :60]).backward()  # type: ignore[no-untyped-call]  # loads what is loaded on first use
    model.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before, start = _status_mib("VmRSS"), time.perf_counter()
    score(way, case, model, ids, mask).backward()  # type: ignore[no-untyped-call]
    first_s, peak_mib = time.perf_counter() - start, _status_mib("VmHWM") - before
    _say([first_s, peak_mib] if case.adapter else peak_mib)
    if case.adapter:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    while sys.stdin.readline() == "step\n":
        optimizer.zero_grad()
        start = time.perf_counter()
        score(way, case, model, ids, mask).backward()  # type: ignore[no-untyped-call]
        passed = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _say([passed - start, time.perf_counter() - start])
    _say("over")  # answered, so that no process reads what is meant for the next one


def build(case: Case, dtype: torch.dtype | None = None) -> tuple[Any, torch.Tensor, torch.Tensor]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        {"qwen3_5": "qwen3_5_text"}.get(case.family, case.family),
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=4864 if case.adapter else 3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=max(1, case.hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
        pad_token_id=None,
        **_recurrent_layers(case),
    )
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype or torch.float32).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if case.adapter:
        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, *batch_of(case)


def batch_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a group."""
    import torch

    ids = torch.randint(0, case.vocabulary, (case.group, case.prompt + case.completion))
    ids[:, : case.prompt] = ids[0, : case.prompt].clone()
    mask = torch.ones_like(ids)
    if case.lengths == "spread":
        for i, row in enumerate(mask):
            part = 0.25 + 0.75 * (i + 1) / case.group
            row[case.prompt + int(part * case.completion) :] = 0
    return ids, mask


def _recurrent_layers(case: Case) -> dict[str, Any]:
    """Three of four layers, with heads as wide as those of attention."""
    if case.family == "qwen3":
        return {}
    heads = case.hidden // 64
    of_family: dict[str, dict[str, Any]] = {
        "qwen3_5": {
            **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
            **{"linear_num_key_heads": heads, "linear_num_value_heads": heads},
        },
        "lfm2": {"conv_dim": case.hidden, "block_auto_adjust_ff_dim": False},
        "granitemoehybrid": {  # Mamba-2, without experts, as Granite 4 Micro
            **{"mamba_n_heads": 2 * heads, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
            **{"num_local_experts": 0, "shared_intermediate_size": 3 * case.hidden, "position_embedding_type": "nope"},
        },
    }
    recurrent = "conv" if case.family == "lfm2" else "linear_attention"
    kinds = [recurrent if number % 4 != 2 else "full_attention" for number in range(case.layers)]
    return {**of_family[case.family], "layer_types": kinds}


def score(way: str, case: Case, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The forward pass; a sum to go backward from."""
    scored = None
    if way not in ("trl", "padded"):
        scored = _shared_pass().score(model, ids, mask, case.completion, unwrapped=model, compute_entropy=True)
    if scored is None:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : -case.completion] = -100
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        logps = output.log_probs[:, -case.completion :]
    else:
        logps = scored.logps
    summed: torch.Tensor = (logps * mask[:, -case.completion :]).sum()
    return summed


@functools.cache
def _shared_pass() -> Any:
    from toolgrpo.shared_pass.scoring import SharedPass

    return SharedPass(mode="auto")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


# --- in the process that compares ------------------------------------------------------------------------------------


class Server:
    """One way's process, seen from here."""

    def __init__(self, way: str, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", way, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> Any:
        """Every line has an answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a serving process has ended; what it said stands above")
        return json.loads(answer)


@contextmanager
def servers(threads: int, ways: Sequence[str] = WAYS) -> Iterator[dict[str, Server]]:
    opened = {way: Server(way, threads) for way in ways}
    try:
        yield opened
    finally:
        for server in opened.values():
            server.process.kill()
            server.process.wait()


def measure_case(by_way: dict[str, Server], case: Case, rounds: int) -> dict[str, Measured]:
    peaks = {way: server.ask(json.dumps(asdict(case))) for way, server in by_way.items()}  # also the warm-up
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in by_way}
    for _ in range(rounds):
        for way, server in by_way.items():
            times[way].append(tuple(server.ask("step")))
    for server in by_way.values():
        server.ask("over")
    return {
        way: Measured(
            pass_s=statistics.median(passed for passed, _ in times[way]),
            step_s=statistics.median(stepped for _, stepped in times[way]),
            peak_mib=peaks[way],
            all_pass_s=[passed for passed, _ in times[way]],
            all_step_s=[stepped for _, stepped in times[way]],
        )
        for way in by_way
    }


def measure_real(threads: int) -> dict[str, Any]:
    """The first pass of each way, one after the other: none has its memory while another is measured."""
    with servers(threads, REAL_WAYS) as by_way:
        answers = {way: server.ask(json.dumps(asdict(REAL))) for way, server in by_way.items()}
    return {**asdict(REAL), **{way: {"pass_s": s, "peak_mib": mib} for way, (s, mib) in answers.items()}}


def measure_sizes(options: argparse.Namespace) -> dict[str, Any]:
    quick = options.quick
    hidden, layers, rounds = (128, 2, min(options.rounds, 2)) if quick else (384, 6, options.rounds)
    before = before_here(quick)
    others: dict[str, Any] = {name: before[name] for name in ("real", "hybrids") if name in before}
    found: dict[str, Any] = {"threads": options.threads, "rounds": rounds, "results": [], **others}
    with servers(options.threads) as by_way:
        for prompt, completion, group in QUICK_SIZES if quick else SIZES:
            for lengths in ("full", "spread") if group > 1 else ("full",):
                case = Case(prompt, completion, group, lengths, hidden, layers)
                progress(f"prompt {prompt}, {group} x {completion} ({lengths})")
                ways = measure_case(by_way, case, rounds)
                found["results"].append({**asdict(case), **{way: asdict(of) for way, of in ways.items()}})
                save(NAME, found, quick=quick, number_type="float32")
    return found


def measure_hybrids(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    with servers(options.threads) as by_way:
        for case in HYBRIDS:
            progress(f"{case.family}, prompt {case.prompt}, {case.group} x {case.completion} ({case.lengths})")
            ways = measure_case(by_way, case, options.rounds)
            found.append({**asdict(case), **{way: asdict(of) for way, of in ways.items()}})
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The sizes; or the real shape or the hybrids, beside the sizes that were measured on this machine."""
    if not options.real and not options.hybrids:
        return measure_sizes(options)
    measured = {"real": measure_real(options.threads)} if options.real else {"hybrids": measure_hybrids(options)}
    return {"results": [], **before_here(options.quick), **measured}


def before_here(quick: bool) -> dict[str, Any]:
    """What was measured before on this machine."""
    before = kept(NAME, quick)
    same = before.get(STAMP, {}).get("machine", {}).get("name") == stamp_of(quick=False).as_json()["machine"]["name"]
    return before if same else {}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for one in filter(None, [results.get("real"), *results["results"], *results.get("hybrids", ())]):
        size = f"prompt {one['prompt']}, {one['group']} x {one['completion']} ({one['lengths']}), width {one['hidden']}"
        size += f", vocabulary {one['vocabulary']:,}, LoRA, checkpointing" if one.get("adapter") else ""
        size += f", {one['family']}" if one.get("family", "qwen3") != "qwen3" else ""
        compared = [("pass_s", "shared", "trl", "TRL"), ("peak_mib", "shared", "trl", "TRL")]
        if "padded" in one:
            compared += [("pass_s", "shared", "padded", "ours, not sharing"), ("step_s", "shared", "trl", "TRL")]
        for mine, way, name in (
            ("shared", "heap", "ours, all from the heap"),
            ("shared", "kept", "ours, activations kept"),
            ("bf16", "bf16_peft", "ours with PEFT's layers, both in bf16"),
        ):
            compared += [(of, mine, way, name) for of in ("pass_s", "peak_mib") if way in one]
        for what, mine, way, name in compared:
            ours, other = (Figure.kept(one[of][what], one[of].get(f"all_{what}"), 1) for of in (mine, way))
            said = {"pass_s": "forward and backward", "step_s": "the whole step", "peak_mib": "memory"}[what]
            made.append(Row(f"{size}: {said}", ours, "MiB" if what == "peak_mib" else "s", other, name))
    return made


def main() -> None:
    parser = parser_of(__doc__, "a tiny model, three of the sizes")
    parser.add_argument("--real", action="store_true", help="the first pass alone at the shape of a real model")
    parser.add_argument("--hybrids", action="store_true", help="models with recurrent layers")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices={*WAYS, *REAL_WAYS}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
    else:
        benchmark(NAME, parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
