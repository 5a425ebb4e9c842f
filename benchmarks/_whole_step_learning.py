"""Does training on older weights learn as well, and sooner: nano to 0.9 held-out success (three parts of `whole_step.py`).

Every seed and way is a run of the shipped recipe in a process of its own, shortened to STEPS steps: ours with a staleness,
or TRL's own trainer with the recipe's settings, the same rows, rewards and tools, which nano calls by itself. Its weights
are kept every few steps and asked the held-out questions (greedy) when it has ended, so that no rollout gains by a
measurement; TRL's by our trainer. Seconds are those of training alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _rollout_loops import prepare_vllm

    prepare_vllm()

from _machine import ROOT
from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run, label

Point = dict[str, Any]  # of a curve: step, episodes, seconds of training, success
Kept = list[tuple[Point, dict[str, Any]]]  # points that were not asked yet, with the weights of then

TIME_LIMIT_S = 1800
WAYS = ("0", "1", "2", "TRL")  # ours by its staleness
TARGET = 0.9
STEPS, EVERY = 40, 5
OF_THE_RECIPE = [
    "output_dir",
    "max_completion_length",
    "temperature",
    "max_steps",
    "per_device_train_batch_size",
    "num_generations",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "adam_beta2",
    "beta",
    "bf16",
    "use_cpu",
    "gradient_checkpointing",
    "logging_steps",
    "save_strategy",
    "report_to",
    "seed",
    "reward_weights",
    "disable_tqdm",
]
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
    return {**found, "reached": next((point for point in found["curve"] if point["success"] >= TARGET), None)}


def rows(latency_s: float, runs: list[Run]) -> list[Row]:
    """How soon each way got to the target and how good it was at the end, beside staleness 0, by seed."""
    tools, said = "tools that take no time" if latency_s == 0 else f"a tool call takes {latency_s} s", label(runs)
    plain = {run["of"]["seed"]: run for run in runs if run["of"]["way"] == "0"}
    made = []
    for way in WAYS:
        own = [run for run in runs if run["of"]["way"] == way]
        if not own:
            continue
        job = f"nano, {tools}, " + ("TRL's trainer" if way == "TRL" else f"max_staleness {way}")
        name = "" if way == "0" else "max_staleness 0"
        beside = [(plain[run["of"]["seed"]], run) for run in own if name and run["of"]["seed"] in plain]
        for what, unit in (("seconds", "s"), ("episodes", "")):
            arrived = [run["reached"][what] for run in own if run["reached"]]
            if not arrived:
                continue
            both = [
                (one["reached"][what], run["reached"][what]) for one, run in beside if one["reached"] and run["reached"]
            ]
            ratio, other = (Figure.of_ratios(both), Figure.of([one for one, _ in both])) if both else (None, None)
            to = f"{job}: {what} to {TARGET} held-out success, {len(arrived)} of {len(own)} seeds{said}"
            made.append(Row(to, Figure.of(arrived), unit, other, name if both else "", ratio))
        ends = [run["curve"][-1]["success"] for run in own]
        of_0 = [one["curve"][-1]["success"] for one, _ in beside]
        more = [run["curve"][-1]["success"] - end for end, (_, run) in zip(of_0, beside, strict=True)]
        difference = f" ({Figure.of_seeds(more).signed} beside max_staleness 0)" if more else ""
        end = f"{job}: held-out success after {own[0]['curve'][-1]['step']} steps{difference}{said}"
        other = Figure.of(of_0) if of_0 else None
        made.append(Row(end, Figure.of(ends), "", other, name if of_0 else "", more_is_better=True))
    return made


def part(latency_s: float) -> Part:
    return Part(partial(plan, latency_s), measure, partial(rows, latency_s))


LEARNING, TENTH_LEARNING, SLOW_LEARNING = part(0.0), part(TENTH_S), part(SLOW_S)

# --- in the process of one run ---------------------------------------------------------------------------------------


def train(latency_s: float, argv: list[str], folder: Path) -> dict[str, Any]:
    """The recipe in our own trainer, which is asked when it has ended; tools take no time then."""
    folder.mkdir(parents=True, exist_ok=True)
    delay, tools = folder / "delay", folder / "slow_tools.py"
    delay.write_text(str(latency_s))
    tools.write_text(TOOLS.format(delay=str(delay), root=str(ROOT)))
    opened = Opened([*argv, *(("--tools_script", str(tools)) if latency_s else ())])
    kept: Kept = []
    opened.trainer.add_callback(keeping(lambda: int(opened.trainer.rollout_batches.n_episodes), kept))
    try:
        opened.trainer.train()
        delay.write_text("0")
        return opened.asked_with(kept)
    finally:
        opened.trainer.close()


def keeping(n_episodes: Callable[[], int], kept: Kept) -> Any:
    """A callback that keeps the weights at the beginning, every few steps and at the end."""
    from transformers import TrainerCallback

    class Keeping(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        def keep(self, point: Point, model: Any) -> None:
            kept.append((point, {name: of.clone() for name, of in model.state_dict().items()}))

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.keeping_s, self.started = 0.0, time.monotonic()
            self.keep({"step": 0, "episodes": 0, "seconds": 0.0}, kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % EVERY and state.global_step < state.max_steps:
                return
            now = time.monotonic()
            seconds = now - self.started - self.keeping_s
            self.keep({"step": state.global_step, "episodes": n_episodes(), "seconds": seconds}, kwargs["model"])
            self.keeping_s += time.monotonic() - now

    return Keeping()


class Opened:
    """The trainer of a command line, and the held-out questions."""

    def __init__(self, argv: list[str]) -> None:
        from toolgrpo import ToolGRPOTrainer
        from toolgrpo.commands.arguments import parse_arguments
        from toolgrpo.commands.job import Job
        from toolgrpo.commands.terminal import Terminal

        script, config, model = parse_arguments(argv)
        parts = Job(script, config, model, Terminal.open(Path(config.output_dir) / "train.log", main_process=True))
        self._heldout = list(parts.heldout_rows() or ())
        self.trainer = ToolGRPOTrainer(
            parts.model_path(str(model.model_name_or_path)),
            parts.rewards(),
            config.changed(disable_tqdm=True),
            train_dataset=parts.training_rows(),
            tools=parts.toolbox(),
        )
        self._greedy = config.changed(temperature=0.0).sampling_options()

    def asked_with(self, kept: Kept) -> dict[str, Any]:
        """The success of all that was kept; the first are the weights of before."""
        points = []
        for point, weights in kept:
            self.trainer.model.load_state_dict(weights)
            self.trainer.state.global_step = point["step"]  # weights of another step are given to the engine
            right = self.trainer.measure(self._heldout, self._greedy, label="held out").successes
            points.append({**point, "success": sum(right) / len(right)})
        return {"before": points[0]["success"], "curve": points[1:]}


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
    from _whole_step_runs import as_ours_renders, trl_on_this_machine
    from trl import GRPOConfig, GRPOTrainer

    from toolgrpo.commands.arguments import parse_arguments
    from toolgrpo.commands.job import Job
    from toolgrpo.commands.terminal import Terminal

    sys.path.append(str(ROOT))
    from tools_funcs.arithmetic_tools import TOOL_FUNCTIONS

    script, config, model = parse_arguments(argv)
    parts = Job(script, config, model, Terminal.open(folder / "train.log", main_process=True))
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
    batch = args.per_device_train_batch_size
    trainer.add_callback(keeping(lambda: trainer.state.global_step * batch, kept))
    trainer.train()
    calls = [log["tools/call_frequency"] for log in trainer.state.log_history if "tools/call_frequency" in log]
    assert calls and all(calls), f"TRL's trainer called no tools: {calls}"
    torch.save({"kept": kept, "calls": calls}, folder / "kept.pt")


def ask(argv: list[str], folder: Path) -> dict[str, Any]:
    """Ask the weights that TRL's trainer has kept, as `train` asks its own."""
    import torch

    found, opened = torch.load(folder / "kept.pt"), Opened(argv)
    try:
        return {**opened.asked_with(found["kept"]), "calls_an_episode": found["calls"]}
    finally:
        opened.trainer.close()


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
