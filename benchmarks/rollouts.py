"""Rollouts: TRL's own tool loop and ours, side by side on one engine, with the same weights and scripted decisions.

    python benchmarks/rollouts.py            # table on the terminal, JSON in benchmarks/results/rollouts.json
    python benchmarks/rollouts.py --quick    # one repetition, two latencies
    python benchmarks/rollouts.py --models nano    # one of the two models

What is compared: 64 rollouts of up to 5 turns of 32 tokens. Whether a turn calls the tool, and how long the tool takes, is
scripted per rollout and turn, the same for both; the tokens are really sampled by one colocated vLLM engine, with the
block size that toolgrpo asks for (both loops gain from it), and on a CPU in fp32, which is what training uses there (vLLM's
own choice for TRL is bf16, which most CPUs emulate; `--number_type bfloat16` measures that). TRL calls the tool in its own thread; ours calls it in worker
processes. `bound` is the larger of the engine alone on the same tokens in one batch (prompts and tool results read, as
many tokens sampled, no turns), and the slowest trajectory run on its own. TRL's loop is repeated 3 times, the rest 9.

Two models, each in a process of its own: nano, where a step of the engine is so short (2 ms) that every loop's own Python
shows, and a Qwen3 of 20 million random weights, where the engine has something to do.

Then: what the scheduler itself costs on a simulated engine, and the largest difference between the engine's and the
trainer's log-probabilities in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _reporting import benchmark, parser_of, progress, save
from _rollout_loops import NUMBER_TYPES, N, NativeLoop, OurLoop, decision, prepare_vllm, turns_of
from _rows import Figure, Row

if __name__ == "__main__":
    prepare_vllm()

MODELS = ("nano", "20m")
OURS_PER_TRL = 3  # TRL's takes minutes, and the machine's noise shows more in short runs


def engine_alone(native: NativeLoop, trajectories: Sequence[Any]) -> float:
    """The tokens of these trajectories in one batch, without turns or tools: what is context is read, the rest sampled."""
    from vllm import SamplingParams

    prompts = [
        [*t.prompt_ids, *(token for token, sampled in zip(t.ids, t.mask, strict=True) if not sampled)]
        for t in trajectories
    ]
    params = [
        SamplingParams(max_tokens=t.n_sampled, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False)
        for t in trajectories
    ]
    native.llm.reset_prefix_cache()
    started = time.perf_counter()
    native.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - started


def compare(native: NativeLoop, ours: OurLoop, latency_s: float, repeats: int) -> dict[str, Any]:
    native.latency_s = ours.latency_s = latency_s
    slowest = max(range(N), key=lambda uid: sum(decision(uid, turn) or 0.0 for turn in range(turns_of(uid))))
    times: dict[str, list[float]] = {"TRL": [], "ours": [], "engine": [], "path": []}
    tokens = {}

    def measure(name: str, run: Callable[[], tuple[float, int]]) -> None:
        native.llm.reset_prefix_cache()
        seconds, tokens[name] = run()
        times[name].append(seconds)

    ours.run()  # TRL's steps hold the same tokens at every latency, ours do not: these numbers of tokens are new to vLLM
    for _ in range(repeats):
        measure("TRL", native.run)
        for _ in range(OURS_PER_TRL):
            measure("ours", ours.run)
            whole = ours.trajectories
            measure("path", lambda: ours.run([slowest]))
            times["engine"].append(engine_alone(native, whole))
    assert tokens["TRL"] == tokens["ours"], f"both must sample the same number of tokens: {tokens}"
    return {"latency_s": latency_s, "sampled_tokens": tokens["ours"], "all_s": times}


def scheduler_cost(n: int) -> dict[str, float]:
    """Our own cost per turn, with an engine and tools that answer at once."""
    from toolgrpo.rollout import Episode, Scheduler
    from toolgrpo.rollout.scheduler import run_all, run_blocking
    from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, scripted_runner

    call, end = ByteChat.say('call f {"a": 1}'), ByteChat.say("the answer is 3")
    engine = ScriptedEngine(lambda request, _: end if len(request.ids) > 120 else call)
    runner = scripted_runner(engine, ScriptedTools({"f": lambda a: "3"}))
    episodes = [Episode(messages=({"role": "user", "content": "q"},)) for _ in range(n)]
    started = time.process_time()
    result = run_blocking(run_all(episodes, Scheduler(runner)))
    seconds = time.process_time() - started
    turns = sum(len(t.turns) for t in result.trajectories)
    engine.requests.clear()
    tracemalloc.start()
    kept = run_blocking(run_all(episodes, Scheduler(runner)))
    engine.requests.clear()
    held = tracemalloc.get_traced_memory()[0] / len(kept.trajectories)
    tracemalloc.stop()
    return {"episodes": n, "turns": turns, "us_per_turn": seconds / turns * 1e6, "bytes_per_episode": held}


def logprob_difference(model: str, min_tokens: int) -> dict[str, float]:
    """Largest difference between engine and trainer in fp32, over multi-turn trajectories with real tool calls."""
    import torch
    from datasets import Dataset

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.data.arithmetic import arithmetic_rows
    from toolgrpo.options import RecordedShare

    rows = arithmetic_rows("train", 512, seed=1)
    config = ToolGRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=N,
        num_generations=8,
        max_completion_length=224,
        report_to="none",
        use_cpu=True,
        gradient_checkpointing=False,
        record_episodes=RecordedShare(False),
        vllm_max_model_length=1024,
    )
    tools = Path(__file__).parent.parent / "tools_funcs" / "arithmetic_tools.py"
    trainer = ToolGRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, Dataset.from_list(rows), tools=tools
    )
    try:
        trajectories = trainer.rollout(rows).trajectories
    finally:
        trainer.close()
    worst, tokens = 0.0, 0
    for trajectory in trajectories:
        if tokens >= min_tokens:
            break
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.ids]])
        with torch.no_grad():
            logits = trainer.model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, torch.tensor(trajectory.ids)[:, None])[:, 0].tolist()
        pairs = [(a, b) for a, b in zip(own, trajectory.logprobs, strict=True) if b is not None]
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
        tokens += len(pairs)
    return {"tokens": tokens, "largest_difference": worst}


def model_folder(name: str) -> Path:
    """nano, or a larger model of random weights with nano's tokenizer."""
    from toolgrpo.models import NANO

    if name == "nano":
        return NANO
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(NANO)
    shape = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_hidden_layers": 6}
    config.update({**shape, "num_attention_heads": 8, "num_key_value_heads": 4})
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    return folder


def compare_loops(
    model: str, number_type: str, latencies: Sequence[float], *, repeats: int
) -> Iterator[dict[str, Any]]:
    """A row for each latency, as soon as it is measured."""
    native = NativeLoop(str(model_folder(model)), number_type)
    ours = OurLoop(native)
    for run in (native.run, *[ours.run] * OURS_PER_TRL):
        run()  # warm up
    computed = str(native.llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    for latency in latencies:
        row = compare(native, ours, latency, repeats)
        yield {"model": model, "number_type": computed, **row}
    ours.tools.close()


def compare_in_process(model: str, number_type: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """vLLM has one engine a process, which writes a line for each row."""
    with tempfile.NamedTemporaryFile() as answer:
        command = [sys.executable, __file__, "--rows-of", model, "--number_type", number_type, "--json", answer.name]
        process = subprocess.Popen([*command, *(["--quick"] if quick else [])])
        read = 0
        while True:
            ended = process.poll() is not None
            lines = Path(answer.name).read_text().splitlines(keepends=True)
            for line in lines[read:]:
                if line.endswith("\n"):
                    yield json.loads(line)
                    read += 1
            if ended:
                break
            time.sleep(0.5)
        if process.returncode:
            raise SystemExit(
                f"the process of {model} ended with status {process.returncode}; what it said stands above"
            )


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for row in results["rollouts"]:
        said = "no time" if row["latency_s"] == 0 else f"{row['latency_s']} s"
        what = f"{N} rollouts, {row['model']} in {row['number_type']}, a tool call takes {said}"
        trl, ours, engine, path = (Figure.of(row["all_s"][name]) for name in ("TRL", "ours", "engine", "path"))
        made.append(Row(what, ours, "s", trl, "TRL's loop", bound=max(engine.value, path.value)))
    for row in results.get("scheduler", ()):
        what = f"the scheduler alone, {row['episodes']} episodes, a turn"
        made.append(Row(what, Figure(row["us_per_turn"], n=1), "us"))
    if (logprobs := results.get("logprobs")) is not None:
        what = f"largest log-probability difference of engine and trainer, {logprobs['tokens']} tokens"
        made.append(Row(what, Figure(logprobs["largest_difference"], n=1), ""))
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    quick, results = options.quick, dict[str, Any](rollouts=[])

    def keep() -> None:
        save("rollouts", results, quick=quick, number_type=options.number_type)

    for model in options.models:
        progress(f"{model}: starting the engine, and a first run of both loops")
        for row in compare_in_process(model, options.number_type, quick=quick):
            results["rollouts"].append(row)
            keep()
    progress("the scheduler's own cost")
    results["scheduler"] = [scheduler_cost(n) for n in ((64, 1024) if quick else (256, 1024, 4096))]
    keep()
    progress("log-probabilities of engine and trainer")
    results["logprobs"] = logprob_difference(str(model_folder("nano")), 2_000 if quick else 10_000)
    return results


def main() -> None:
    parser = parser_of(__doc__, "one repetition, latencies 0 and 0.1 s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--number_type", choices=NUMBER_TYPES, default="float32", help="of the engine, for both loops")
    parser.add_argument("--latencies", nargs="+", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows-of", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rows_of:
        benchmark("rollouts", parser, measure, rows, number_type=options.number_type)
        return
    with options.json.open("a") as answer:
        latencies = options.latencies or ((0.0, 0.1) if options.quick else (0.0, 0.1, 0.5))
        for row in compare_loops(options.rows_of, options.number_type, latencies, repeats=1 if options.quick else 3):
            answer.write(json.dumps(row) + "\n")
            answer.flush()


if __name__ == "__main__":
    main()
