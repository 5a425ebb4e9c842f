"""Several processes and long runs: what they cost.

    python benchmarks/scale.py [--quick]

Prints one table and writes benchmarks/results/scale.json:

* two processes (DDP over gloo), first with fast tools, then with slow ones in one of them: how long each one's rollout takes;
* handing the weights to vLLM in a step, for full training and for LoRA merged or as an adapter alone, with the largest
  difference between vLLM's log-probabilities and the trainer's (fp32);
* recording episodes and saving checkpoints, as shares of the training time, on the embedded job's model and batch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _reporting import progress, run
from _rows import Figure, Row

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"
SAVE_EVERY = 100  # steps; Transformers' default is 500


def slow_process(steps: int, tool_s: float) -> dict[str, Any]:
    """Median seconds of a rollout in each process; in the second run every episode of process 1 calls a slow tool."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(f"{folder}/model")
        job = {"model": f"{folder}/model", "config": {"max_steps": steps}}
        jobs = {
            "fast": {**job, "out": f"{folder}/fast"},
            "slow": {**job, "out": f"{folder}/slow", "slow_tool_s": tool_s},
        }
        subprocess.run(
            [
                *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"),
                *("--config_file", "recipes/accelerate/cpu_ddp.yaml", str(TINY), *map(json.dumps, jobs.values())),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )

        def rollout_s(job: str, process: int) -> float:
            result = json.loads((Path(folder) / job / f"rank{process}.json").read_text())
            return float(statistics.median(result["rollout_seconds"]))

        return {
            "tool_seconds": tool_s,
            "rollout_s_beside_a_fast_process": rollout_s("fast", 0),
            "rollout_s_beside_a_slow_process": rollout_s("slow", 0),
            "rollout_s_of_the_slow_process": rollout_s("slow", 1),
        }


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """What libraries print goes to a file, and to the terminal only after a failure."""
    kept = {number: os.dup(number) for number in (1, 2)}
    with tempfile.TemporaryFile() as log:
        for number in kept:
            os.dup2(log.fileno(), number)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            for number, before in kept.items():
                os.dup2(before, number)
                os.close(before)
            if failed:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace"))


class Timer:
    """Wraps methods, and adds up how long they take."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)
        taken = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                taken.append(time.perf_counter() - started)

        setattr(owner, method, timed)


def embedded_job(steps: int, *, sync: str | None, batch: int) -> dict[str, Any]:
    """Some steps of the embedded job with vLLM in the process; seconds a step of each part. `sync` None: no LoRA."""
    from peft import LoraConfig

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.data import load_tasks
    from toolgrpo.models import NANO
    from toolgrpo.rewards import get_reward

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if sync else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = ToolGRPOTrainer(
            str(NANO),
            [get_reward("accuracy")],
            ToolGRPOConfig(
                folder,
                engine="vllm_colocate",
                vllm_lora_sync=sync or "merge",
                vllm_max_model_length=1024,
                per_device_train_batch_size=batch,
                num_generations=8,
                max_completion_length=224,
                max_turn_tokens=64,
                max_turns=5,
                max_steps=steps,
                learning_rate=4e-4,
                bf16=False,
                gradient_checkpointing=False,
                save_steps=max(2, steps // 2),
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=load_tasks("arithmetic", limit=batch),
            tools=str(ROOT / "tools_funcs" / "arithmetic_tools.py"),
            peft_config=lora,
        )
        timer = Timer()
        timer.wrap(trainer.engine, "load_weights", "sync")
        timer.wrap(trainer.recorder, "batch_done", "record")
        timer.wrap(trainer, "_save_checkpoint", "save")
        try:
            started = time.perf_counter()
            trainer.train()
            total = time.perf_counter() - started
        finally:
            trainer.close()
        logs = [log for log in trainer.state.log_history if "loss" in log]
    save = statistics.median(timer.seconds["save"])
    step = (total - sum(timer.seconds["save"])) / steps
    return {
        "step_s": step,
        "sync_s": statistics.median(timer.seconds["sync"][1:]),  # the first one also warms up
        "record_s": statistics.median(timer.seconds["record"]),
        "save_s": save,
        "record_share": statistics.median(timer.seconds["record"]) / step,
        "save_share": save / (SAVE_EVERY * step),
        "largest_difference": max(log["sampling/sampling_logp_difference/max"] for log in logs),
    }


MODES = {"full": None, "LoRA, merged": "merge", "LoRA, adapter alone": "adapter"}


def measure(quick: bool) -> dict[str, Any]:
    steps, batch = (4, 16) if quick else (8, 64)
    results: dict[str, Any] = {"save_every": SAVE_EVERY}
    progress("two processes, one of them slow")
    with quiet_libraries():
        results["slow_process"] = slow_process(3 if quick else 10, tool_s=1.0)
    for name, sync in MODES.items():
        progress(f"the embedded job, {name}")
        with quiet_libraries():
            results[name] = embedded_job(steps, sync=sync, batch=batch)
    return results


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    slow = results["slow_process"]
    made = [
        Row(
            benchmark="scale",
            what=f"a rollout beside a process whose tools take {slow['tool_seconds']:g} s",
            unit="ms",
            ours=Figure(1000 * slow["rollout_s_beside_a_slow_process"]),
            other=Figure(1000 * slow["rollout_s_beside_a_fast_process"]),
            other_name="beside a fast one",
        )
    ]
    for name in MODES:
        job = results[name]
        for what, measure in (("weights to vLLM", "sync_s"), ("recording", "record_s"), ("a checkpoint", "save_s")):
            of_step = f"{what}, {name}, a step of {job['step_s']:.2f} s"
            made.append(Row(benchmark="scale", what=of_step, unit="ms", ours=Figure(1000 * job[measure])))
        difference = Figure(job["largest_difference"])
        made.append(Row(benchmark="scale", what=f"logprob difference, {name}", unit="", ours=difference))
    return made


def show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "measured", title="scale", title_justify="left")
    slow = results["slow_process"]
    for name in ("beside_a_fast_process", "beside_a_slow_process", "of_the_slow_process"):
        table.add_row(f"rollout {name.replace('_', ' ')}", f"{1000 * slow[f'rollout_s_{name}']:.0f} ms")
    for name in MODES:
        job = results[name]
        table.add_row(f"weights to vLLM, {name}", f"{job['sync_s']:.3f} s of a step of {job['step_s']:.2f} s")
    for name in MODES:
        table.add_row(f"logprob difference, {name}", f"{results[name]['largest_difference']:.1e}")
    job = results["full"]
    table.add_row("recording", f"{100 * job['record_share']:.2f} % ({1000 * job['record_s']:.1f} ms a step)")
    table.add_row(
        f"checkpoints, every {SAVE_EVERY} steps", f"{100 * job['save_share']:.2f} % ({job['save_s']:.2f} s each)"
    )
    Console().print(table)


if __name__ == "__main__":
    run("scale", __doc__, "fewer steps, smaller batches", measure, show, number_type="float32")
