"""Does training on older weights learn as well, and sooner: nano to 0.9 held-out success (two parts of `whole_step.py`).

Every seed and way is a run of the shipped recipe in a process of its own, shortened to STEPS steps: ours with a staleness,
or TRL's own trainer with the recipe's settings, the same rows, rewards and tools, which nano calls by itself. Its weights
are kept every few steps and asked the held-out questions (greedy) when it has ended, so that no rollout gains by a
measurement; TRL's by our trainer. Seconds are those of training alone.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from _rows import Figure, Row
from _signal_sampling import T_975, interval_of
from _whole_step_parts import Asked, Part, Run, label

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 1800
WAYS = ("0", "1", "2", "TRL")  # ours by its staleness
TARGET = 0.9
STEPS, EVERY = 40, 5
OF_THE_RECIPE = (
    *("output_dir", "max_completion_length", "temperature", "max_steps", "per_device_train_batch_size"),
    *("num_generations", "learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta2", "beta", "bf16", "use_cpu"),
    *(
        "gradient_checkpointing",
        "logging_steps",
        "save_strategy",
        "report_to",
        "seed",
        "reward_weights",
        "disable_tqdm",
    ),
)
TENTH_S, SLOW_S = 0.1, 0.5
TOOLS = '''
"""The tools of the embedded job; a call takes as long as a file says."""

import functools
import sys
import time
from pathlib import Path

from toolgrpo.tools import tool

sys.path.append({root!r})
from tools_funcs.arithmetic_tools import TOOL_FUNCTIONS as QUICK


def slow(function):
    @tool(cache=False)
    @functools.wraps(function)
    def slowed(*args, **kwargs):
        time.sleep(float(Path({delay!r}).read_text()))
        return function(*args, **kwargs)

    return slowed


TOOL_FUNCTIONS = [slow(one) for one in QUICK]
'''


def plan(latency_s: float, asked: Asked) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "way": way, "latency_s": latency_s, "quick": asked.quick}
        for seed in asked.seeds[: 1 if asked.quick else None]
        for way in WAYS
        if way != "TRL" or latency_s == 0 or (latency_s < SLOW_S and seed == asked.seeds[0])  # minutes to an hour a run
    ]


def measure(of: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        size = ["--max_steps", "4", "--per_device_train_batch_size", "16", "--eval_questions", "24"]
        size = size if of["quick"] else ["--max_steps", str(STEPS)]
        if of["way"] != "TRL":
            size += ["--max_staleness", of["way"]]
        arguments = ["--config", "recipes/configs/nano.yaml", "--seed", str(of["seed"]), *size, "--output_dir", folder]
        for mode in ("trl", "ask") if of["way"] == "TRL" else ("train",):
            command = [sys.executable, __file__, mode, str(of["latency_s"]), *arguments]
            subprocess.run(command, check=True, cwd=ROOT, timeout=TIME_LIMIT_S, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads((Path(folder) / "curve.json").read_text())
    return found


def summary(runs: list[Run]) -> dict[str, Any]:
    """How much sooner than staleness 0 each got to the target, and how much better it was at the end, by seed."""
    by_seed: dict[int, dict[str, Run]] = {}
    for run in runs:
        by_seed.setdefault(run["of"]["seed"], {})[run["of"]["way"]] = run
    found: dict[str, Any] = {}
    for way in WAYS:
        own = [of[way] for of in by_seed.values() if way in of]
        both = [(of["0"], of[way]) for of in by_seed.values() if "0" in of and way in of]
        arrived = [(a["reached"], b["reached"]) for a, b in both if a["reached"] and b["reached"]]
        found[way] = {
            "final": [run["curve"][-1]["success"] for run in own],
            "seconds": [run["reached"]["seconds"] for run in own if run["reached"]],
            "episodes": [run["reached"]["episodes"] for run in own if run["reached"]],
            "step_s": [run["curve"][-1]["seconds"] / run["curve"][-1]["step"] for run in own],
            "better_at_the_end": difference([b["curve"][-1]["success"] - a["curve"][-1]["success"] for a, b in both]),
            "times_sooner": {
                what: interval_of([math.log(a[what] / b[what]) for a, b in arrived]) for what in ("seconds", "episodes")
            },
        }
    return {"target": TARGET, "checked_every_steps": EVERY, "steps": STEPS, "ways": found}


def difference(values: list[float]) -> dict[str, Any] | None:
    """The mean with its 95 % interval (Student's t) from two seeds on."""
    if not values:
        return None
    half = T_975[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) in T_975 else None
    mean = fmean(values)
    return {"mean": mean, "interval": None if half is None else [mean - half, mean + half], "seeds": len(values)}


def rows(latency_s: float, result: dict[str, Any]) -> list[Row]:
    found, said = result["summary"]["ways"], label(result)
    tools = "tools that take no time" if latency_s == 0 else f"a tool call takes {latency_s} s"
    made = []
    for way in WAYS:
        of, plain, beside = found[way], found["0"], way != "0"
        if not of["final"]:
            continue
        job = f"nano, {tools}, " + ("TRL's trainer" if way == "TRL" else f"max_staleness {way}")
        for what, unit in (("seconds", "s"), ("episodes", "")):
            if not of[what]:
                continue
            sooner = of["times_sooner"][what]
            least, most = (sooner or {}).get("interval") or (None, None)
            shown = beside and sooner is not None
            made.append(
                Row(
                    benchmark="whole_step",
                    what=f"{job}: {what} to {TARGET} held-out success, {len(of[what])} of {len(of['final'])} seeds{said}",
                    unit=unit,
                    ours=Figure.of(of[what]),
                    other=Figure.of(plain[what]) if shown else None,
                    other_name="max_staleness 0" if shown else "",
                    ratio=Figure(sooner["times_fewer"], least, most, sooner["seeds"]) if shown else None,
                )
            )
        better = of["better_at_the_end"] if beside else None
        least, most = (better or {}).get("interval") or (None, None)
        told = "" if least is None else f" ({least:+.3f} to {most:+.3f} beside max_staleness 0)"
        made.append(
            Row(
                benchmark="whole_step",
                what=f"{job}: held-out success after {result['runs'][0]['curve'][-1]['step']} steps{told}{said}",
                unit="",
                ours=Figure.of(of["final"]),
                other=Figure.of(plain["final"]) if better is not None else None,
                other_name="max_staleness 0" if better is not None else "",
                more_is_better=True,
            )
        )
    return made


def show(latency_s: float, result: dict[str, Any]) -> None:
    print(f"\nnano to {TARGET} held-out success (greedy), a tool call takes {latency_s} s{label(result)}")
    print(f"{'seed':>5} {'way':>9} {'steps':>6} {'episodes':>9} {'seconds':>8} {'at the end':>11} {'s a step':>9}")
    for run in result["runs"]:
        of, last = run["of"], run["curve"][-1]
        at = run["reached"] or {"step": "-", "episodes": "-", "seconds": math.nan}
        print(
            f"{of['seed']:>5} {of['way']:>9} {at['step']:>6} {at['episodes']:>9} {at['seconds']:>8.1f} "
            f"{last['success']:>11.3f} {last['seconds'] / last['step']:>9.2f}"
        )
    for way, of in result["summary"]["ways"].items():
        better = of["better_at_the_end"]
        if way != "0" and better is not None:
            interval = "" if better["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*better["interval"])
            print(f"{way} beside 0: {better['mean']:+.3f}{interval} at the end ({better['seeds']} seeds)")


def part(latency_s: float) -> Part:
    return Part(partial(plan, latency_s), measure, summary, partial(show, latency_s), partial(rows, latency_s))


LEARNING, TENTH_LEARNING, SLOW_LEARNING = part(0.0), part(TENTH_S), part(SLOW_S)

# --- in the process of one run ---------------------------------------------------------------------------------------


def plan_of(before_asking: Callable[[], object] = lambda: None) -> Any:
    from _heldout_runs import Plan

    return Plan(
        done=lambda point: bool(point["success"] >= TARGET),
        due=lambda step, episodes: step % EVERY == 0,
        afterwards=True,
        before_asking=before_asking,
    )


def train(latency_s: float, argv: list[str], folder: Path) -> dict[str, Any]:
    from _heldout_runs import run

    if not latency_s:
        return run(argv, plan_of())
    folder.mkdir(parents=True, exist_ok=True)
    delay, tools = folder / "delay", folder / "slow_tools.py"
    delay.write_text(str(latency_s))
    tools.write_text(TOOLS.format(delay=str(delay), root=str(ROOT)))
    return run([*argv, "--tools_script", str(tools)], plan_of(partial(delay.write_text, "0")))


def slowed(function: Callable[..., Any], latency_s: float) -> Callable[..., Any]:
    """The function, which takes as long as this before it begins."""

    @wraps(function)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(latency_s)
        return function(*args, **kwargs)

    return slow


def train_trl(latency_s: float, argv: list[str], folder: Path) -> None:
    """The recipe in TRL's own trainer; what it keeps is asked in another process, by `ask`."""
    import torch
    from _heldout_runs import Kept, following
    from _whole_step_runs import as_ours_renders, trl_on_this_machine
    from trl import GRPOConfig, GRPOTrainer

    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.parts import RunParts
    from toolgrpo.commands.terminal import Terminal

    sys.path.append(str(ROOT))
    from tools_funcs.arithmetic_tools import TOOL_FUNCTIONS

    script, config, model = parse_arguments(argv)
    parts = RunParts(script, config, model, Terminal.open(folder / "train.log", main_process=True))
    args = GRPOConfig(
        **{name: getattr(config, name) for name in OF_THE_RECIPE},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=1024,
        vllm_gpu_memory_utilization=0.2,
        max_tool_calling_iterations=(config.max_turns or 1) - 1,
        generation_kwargs={"max_tokens": config.max_turn_tokens},
    )
    kept: Kept = []
    place = parts.model_path(str(model.model_name_or_path))
    with trl_on_this_machine():
        tools = [slowed(as_ours_renders(one), latency_s) for one in TOOL_FUNCTIONS]
        trainer = GRPOTrainer(place, parts.rewards(), args, parts.training_rows(), tools=tools)
    trainer.add_callback(
        following(plan_of(), lambda: trainer.state.global_step * args.per_device_train_batch_size, kept=kept)
    )
    trainer.train()
    calls = [log["tools/call_frequency"] for log in trainer.state.log_history if "tools/call_frequency" in log]
    assert calls and all(calls), f"TRL's trainer called no tools: {calls}"
    torch.save({"kept": kept, "calls": calls}, folder / "kept.pt")


def ask(argv: list[str], folder: Path) -> dict[str, Any]:
    import torch
    from _heldout_runs import ask as ask_kept

    found = torch.load(folder / "kept.pt")
    return {**ask_kept(argv, plan_of(), found["kept"]), "calls_an_episode": found["calls"]}


def main() -> None:
    from toolgrpo.commands.arguments import parse_arguments

    mode, latency_s, argv = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    folder = Path(parse_arguments(argv)[1].output_dir)
    if mode == "trl":
        train_trl(latency_s, argv, folder)
        os._exit(0)  # the vLLM inside TRL's trainer is never ended, and the process would wait for it
    found = train(latency_s, argv, folder) if mode == "train" else ask(argv, folder)
    (folder / "curve.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
