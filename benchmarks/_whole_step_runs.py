"""The trainings that `whole_step.py` compares, one a process: TRL's own trainer, and ours with a staleness.

Whether a turn calls a tool, and how long that takes, is scripted by question and episode, the same for all; tokens are
really sampled, by vLLM, and really trained on, and tools are really called: what the trainer's own log says of calls and of
sampled tokens comes back with the seconds. The latency of the tool changes from phase to phase of one training.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _machine import ROOT
from _rollout_loops import (
    MAX_TURNS,
    TOOLS,
    TURN_TOKENS,
    ScriptedDecisions,
    ScriptedParse,
    _turn,
    _uid,
    decision,
    prepare_vllm,
    question,
    uid_of,
    wait,
)

FINANCIAL = ROOT / "tools_funcs" / "financial_tools_complex.py"
GROUP = 8
TIME_LIMIT_S = 1800


@dataclass(frozen=True)
class Phase:
    """Some steps with tools of one latency; the first ones are not measured."""

    latency_s: float
    warm: int
    measured: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training. `tools`: `wait`, or the eight `financial` ones with their long schemas."""

    trainer: str  # TRL or ours
    episodes: int  # a step
    phases: tuple[Phase, ...]
    staleness: int = 0
    tools: str = "wait"
    server_url: str = ""  # of an engine in another process
    model: str = ""  # a folder; else nano
    lora: bool = False  # the folder's model is trained on the CPU, in bf16 with an adapter; else on a GPU

    @property
    def steps(self) -> int:
        return sum(phase.warm + phase.measured for phase in self.phases)

    @classmethod
    def from_json(cls, text: str) -> Job:
        found = json.loads(text)
        return cls(**{**found, "phases": tuple(Phase(**phase) for phase in found["phases"])})


def measured(job: Job) -> dict[str, Any]:
    """Run a job in a process of its own; what it found."""
    with tempfile.NamedTemporaryFile() as answer, tempfile.TemporaryFile() as said:
        command = [sys.executable, __file__, json.dumps(asdict(job)), answer.name]
        ended = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, timeout=TIME_LIMIT_S)
        if ended.returncode:
            said.seek(0)
            tail = said.read()[-4000:].decode(errors="replace")
            raise SystemExit(
                f"the training of {job} ended with status {ended.returncode}; the end of what it said:\n{tail}"
            )
        found: dict[str, Any] = json.loads(Path(answer.name).read_text())
    assert found["episodes"] == job.episodes * job.steps, "each step has its episodes, and no more"
    assert all(found["calls"]), "tools are called in every step, by the trainer's own count"
    return found


# --- in the process of one training ----------------------------------------------------------------------------------


class Clock:
    """Whether a step is measured, its seconds, and the latency of the tools that are called now."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.plan = [(phase, number >= phase.warm) for phase in phases for number in range(phase.warm + phase.measured)]
        self.latency_s = phases[0].latency_s
        self.seconds: dict[float, list[float]] = defaultdict(list)
        self.rollout_s: dict[float, list[float]] = defaultdict(list)
        self.processor_s: dict[float, list[float]] = defaultdict(list)  # of all threads of this process
        self._began = self._processor_began = 0.0
        self.before_first: list[Callable[[], Any]] = []

    def begin(self, step: int) -> None:
        for do in self.before_first if step == 0 else ():
            do()
        self.latency_s = self.plan[step][0].latency_s
        self._began, self._processor_began = time.perf_counter(), time.process_time()

    def end(self, step: int, rollout_s: float | None) -> None:
        phase, is_measured = self.plan[step]
        if is_measured:
            self.seconds[phase.latency_s].append(time.perf_counter() - self._began)
            self.processor_s[phase.latency_s].append(time.process_time() - self._processor_began)
            if rollout_s is not None:
                self.rollout_s[phase.latency_s].append(rollout_s)


def call(tools: str, uid: int, turn: int, seconds: float) -> tuple[str, dict[str, float]]:
    """The tool that is called, and its arguments; those of a financial one differ, so that no result is remembered."""
    if tools == "wait":
        return "wait", {"seconds": seconds}
    return "loan_amortization", {"principal": 1000.0 + 8 * uid + turn, "annual_rate": 5.0, "years": 10.0}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) / 7 for ids in completion_ids]


def rows() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": question(uid)} for uid in range(256)])


def model_folder(job: Job) -> str:
    """nano; for long schemas a copy that says of itself that it can read them."""
    from toolgrpo.models import NANO

    if job.model or job.tools == "wait":
        return job.model or str(NANO)
    folder = Path(tempfile.mkdtemp()) / "nano"
    shutil.copytree(NANO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return str(folder)


def arguments(job: Job) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": job.episodes,
        "num_generations": GROUP,
        "max_completion_length": MAX_TURNS * (128 if job.tools == "wait" else 256),
        "max_steps": job.steps,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "vllm_max_model_length": 1024 if job.tools == "wait" else 8192,
        "vllm_gpu_memory_utilization": 0.2,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-6,
        **(_WITH_LORA if job.lora else _ON_A_GPU if job.model else {}),
    }


_WITH_LORA = {"gradient_checkpointing": True, "model_init_kwargs": {"dtype": "bfloat16"}}
_ON_A_GPU = {
    "use_cpu": False,
    "bf16": True,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": True,
    "vllm_gpu_memory_utilization": 0.3,
    "model_init_kwargs": {"dtype": "bfloat16"},
}


def adapter(job: Job) -> Any:
    """LoRA on every linear layer, as recipes/configs/financial_qwen2.5_0.5b.yaml has it, or none."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear") if job.lora else None


def timing(clock: Clock, rollout_s: Callable[[], float | None] = lambda: None) -> Any:
    from transformers import TrainerCallback

    class Timing(TrainerCallback):  # type: ignore[misc]
        before = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.before = rollout_s() or 0.0
            clock.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = rollout_s()
            clock.end(state.global_step - 1, None if now is None else now - self.before)

    return Timing()


def counted(history: Sequence[dict[str, Any]], episodes_a_step: int) -> dict[str, Any]:
    """What the trainer itself says of its steps: calls and sampled tokens of each, and all tokens of an episode."""
    logs = [log for log in history if "tools/call_frequency" in log]
    return {
        "calls": [round(log["tools/call_frequency"] * episodes_a_step) for log in logs],
        "sampled_tokens": [round(log["completions/mean_length"] * episodes_a_step) for log in logs],
        "tokens_of_an_episode": logs[-1]["num_tokens"] / len(logs) / episodes_a_step,
    }


def as_ours_renders(function: Any) -> Any:
    """The function without what it returns: TRL would write that into the schema, and nano calls no tool then.

    Its prompts would be longer, too, and the job another.
    """
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    made.__annotations__ = {name: of for name, of in function.__annotations__.items() if name != "return"}
    return made


@contextmanager
def trl_on_this_machine(dtype: str = "float32") -> Iterator[None]:
    """Let TRL's trainer start with colocated vLLM as our own engine has it: on a CPU it could not train without.

    Its weight sync fails there, vLLM would leave one thread to the training pass, and choose bf16 whatever the weights are.
    """
    import torch
    import trl.generation.vllm_generation as generation

    from toolgrpo.engines.vllm_options import CPU_BLOCK_SIZE
    from toolgrpo.engines.vllm_seam import repack_tied_heads, torch_threads_kept

    def sync_weights(self: Any) -> None:
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": self._iter_named_params(), "is_checkpoint_format": True}
        )
        self.llm.apply_model(repack_tied_heads)
        self.llm.reset_prefix_cache()

    if not torch.cuda.is_available():
        generation.LLM = functools.partial(generation.LLM, block_size=CPU_BLOCK_SIZE, dtype=dtype)
        generation.VLLMGeneration.sync_weights = sync_weights
    with torch_threads_kept():
        yield


def train_trl(job: Job, clock: Clock) -> dict[str, Any]:
    """TRL's own trainer, its decisions scripted where it parses a response."""
    import trl.trainer.grpo_trainer as module
    from trl import GRPOConfig, GRPOTrainer

    def scripted_call(uid: int, turn: int) -> tuple[str, dict[str, float]] | None:
        factor = decision(uid, turn)
        return None if factor is None else call(job.tools, uid, turn, clock.latency_s * factor)

    parse, episodes = ScriptedParse(scripted_call), 0
    args = GRPOConfig(
        **arguments(job),
        use_vllm=True,
        vllm_mode="colocate",
        generation_kwargs={"max_tokens": TURN_TOKENS, "ignore_eos": True},
    )
    tools: list[Any] = [as_ours_renders(wait)]
    if job.tools != "wait":
        sys.path.append(str(ROOT))
        from tools_funcs.financial_tools_complex import TOOL_FUNCTIONS

        tools = [as_ours_renders(one) for one in TOOL_FUNCTIONS]
    with trl_on_this_machine("bfloat16" if job.lora else "float32"):
        trainer = GRPOTrainer(
            model_folder(job),
            reward,
            args,
            rows(),
            tools=tools,
            callbacks=[timing(clock)],
            peft_config=adapter(job),
        )
    module.parse_response = parse
    generate = trainer._generate

    def scripted(prompts: list[Any]) -> Any:
        nonlocal episodes
        episodes += len(prompts)
        parse.begin([uid_of(prompt) * GROUP + place % GROUP for place, prompt in enumerate(prompts)])
        return generate(prompts)

    trainer._generate = scripted
    trainer.train()
    return {"episodes": episodes, **counted(trainer.state.log_history, job.episodes)}


class Decisions(ScriptedDecisions):
    """Episodes of a question differ by the order in which they begin."""

    def __init__(self, chat: Any, job: Job, clock: Clock) -> None:
        super().__init__(chat, lambda: clock.latency_s)
        self._tools = job.tools
        self.begun: dict[int, int] = defaultdict(int)

    def prompt(self, messages: Sequence[Any], schemas: Any, **kwargs: Any) -> list[int]:
        uid = uid_of(messages)
        _uid.set(uid * GROUP + self.begun[uid] % GROUP)
        self.begun[uid] += 1
        _turn.set(0)
        ids: list[int] = self._chat.prompt(messages, schemas, **kwargs)
        return ids

    def call(self, uid: int, turn: int, factor: float) -> tuple[str, dict[str, float]]:
        return call(self._tools, uid, turn, self._latency_s() * factor)


def train_ours(job: Job, clock: Clock) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.chat import resolve_format
    from toolgrpo.options import RecordedShare

    model = model_folder(job)
    tools = FINANCIAL
    if job.tools == "wait":
        tools = Path(tempfile.mkdtemp()) / "wait_tool.py"
        tools.write_text(TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    decisions = Decisions(resolve_format(tokenizer), job, clock)
    clock.before_first.append(decisions.begun.clear)
    engine: dict[str, Any] = {}
    if job.server_url:
        engine = {"engine": "vllm_server", "vllm_server_urls": [job.server_url]}
    args = ToolGRPOConfig(
        **arguments(job),
        **engine,
        max_turns=MAX_TURNS,
        max_turn_tokens=TURN_TOKENS,
        max_staleness=job.staleness,
        record_episodes=RecordedShare(False),
        quiet=True,
    )
    made: list[Any] = []
    trainer = ToolGRPOTrainer(
        model,
        reward,
        args,
        rows(),
        processing_class=tokenizer,
        tools=tools,
        chat=decisions,
        callbacks=[timing(clock, lambda: made[0].rollout_batches.rollout_seconds)],
        peft_config=adapter(job),
    )
    made.append(trainer)
    try:
        trainer.train()
        return {"episodes": int(trainer.rollout_batches.n_episodes), **counted(trainer.state.log_history, job.episodes)}
    finally:
        trainer.close()


def main() -> None:
    """Run one training and write what it took."""
    job, target = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    clock = Clock(job.phases)
    found = train_trl(job, clock) if job.trainer == "TRL" else train_ours(job, clock)
    times = {"seconds": clock.seconds, "rollout_s": clock.rollout_s, "processor_s": clock.processor_s}
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    target.write_text(json.dumps({**times, **found, "peak_gib": peak_gib}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the vLLM inside TRL's trainer is never ended, and the process would wait for it


if __name__ == "__main__":
    prepare_vllm()
    main()
