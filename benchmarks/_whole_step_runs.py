"""The trainings that `whole_step.py` compares, one a process: TRL's own trainer, and ours with a staleness.

Whether a turn calls the tool and how long the tool takes is scripted by question and episode, the same for all; tokens are
really sampled, by colocated vLLM, and really trained on. The latency of the tool changes from phase to phase of one training.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _rollout_loops import MAX_TURNS, TOOLS, TURN_TOKENS, ScriptedDecisions, _turn, _uid, decision, question, wait

GROUP = 8


@dataclass(frozen=True)
class Phase:
    """Some steps with tools of one latency; the first ones are not measured."""

    latency_s: float
    warm: int
    measured: int


class Clock:
    """Whether a step is measured, its seconds, and the latency of the tools that are called now."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.plan = [(phase, number >= phase.warm) for phase in phases for number in range(phase.warm + phase.measured)]
        self.latency_s = phases[0].latency_s
        self.seconds: dict[float, list[float]] = defaultdict(list)
        self.rollout_s: dict[float, list[float]] = defaultdict(list)
        self._began = 0.0
        self.before_first: list[Any] = []

    @property
    def steps(self) -> int:
        return len(self.plan)

    def begin(self, step: int) -> None:
        for do in self.before_first if step == 0 else ():
            do()
        self.latency_s = self.plan[step][0].latency_s
        self._began = time.perf_counter()

    def end(self, step: int, rollout_s: float | None) -> None:
        phase, measured = self.plan[step]
        if measured:
            self.seconds[phase.latency_s].append(time.perf_counter() - self._began)
            if rollout_s is not None:
                self.rollout_s[phase.latency_s].append(rollout_s)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) / 7 for ids in completion_ids]


def rows(n: int) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": question(uid)} for uid in range(n)])


def arguments(n: int, steps: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": n,
        "num_generations": GROUP,
        "max_completion_length": MAX_TURNS * 128,
        "max_steps": steps,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "vllm_max_model_length": 1024,
        "vllm_gpu_memory_utilization": 0.2,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-6,
    }


def timing(clock: Clock, rollout_s: Any = lambda: None) -> Any:
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


def uid_of(messages: Sequence[Any]) -> int:
    """The number of a question; the lengths of other conversations are measured before the first step."""
    return int((re.findall(r"\d+", str(messages[0]["content"])) or ["0"])[0])


def train_trl(model: str, n: int, clock: Clock) -> int:
    """TRL's own trainer, its decisions scripted where it parses a response; returns the episodes."""
    import torch
    import trl.generation.vllm_generation as generation
    import trl.trainer.grpo_trainer as module
    from trl import GRPOConfig, GRPOTrainer

    from toolgrpo.engines.vllm_options import CPU_BLOCK_SIZE
    from toolgrpo.engines.vllm_seam import repack_tied_heads, torch_threads_kept

    if not torch.cuda.is_available():  # as our own engine has it; vLLM's own choice is bf16, also for weights in fp32
        generation.LLM = functools.partial(generation.LLM, block_size=CPU_BLOCK_SIZE, dtype="float32")

    def sync_weights(self: Any) -> None:  # its own fails on a CPU
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": self._iter_named_params(), "is_checkpoint_format": True}
        )
        self.llm.apply_model(repack_tied_heads)
        self.llm.reset_prefix_cache()

    generation.VLLMGeneration.sync_weights = sync_weights
    order: list[int] = []
    state: dict[str, Any] = {"next": [], "at": 0, "turn": 0, "episodes": 0}

    def parse(tokenizer: Any, ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, Any]:
        """TRL parses the live rollouts in order, one round after the other: that tells whose turn it is."""
        uid = order[state["at"]]
        factor = decision(uid, state["turn"])
        message: dict[str, Any] = {"role": "assistant", "content": "x"}
        if factor is not None:
            call = {"name": "wait", "arguments": {"seconds": clock.latency_s * factor}}
            message["tool_calls"] = [{"type": "function", "function": call}]
            state["next"].append(uid)
        state["at"] += 1
        if state["at"] == len(order):
            order[:], state["next"], state["at"], state["turn"] = state["next"], [], 0, state["turn"] + 1
        return message

    args = GRPOConfig(
        **arguments(n, clock.steps),
        use_vllm=True,
        vllm_mode="colocate",
        generation_kwargs={"max_tokens": TURN_TOKENS, "ignore_eos": True},
    )
    with torch_threads_kept():  # vLLM would leave one thread to the training pass
        trainer = GRPOTrainer(model, reward, args, rows(256), tools=[wait], callbacks=[timing(clock)])
    module.parse_response = parse
    generate = trainer._generate

    def scripted(prompts: list[Any]) -> Any:
        order[:] = [uid_of(prompt) * GROUP + place % GROUP for place, prompt in enumerate(prompts)]
        state.update(next=[], at=0, turn=0, episodes=state["episodes"] + len(prompts))
        return generate(prompts)

    trainer._generate = scripted
    trainer.train()
    return int(state["episodes"])


class Decisions(ScriptedDecisions):
    """Episodes of a question differ by the order in which they begin."""

    def __init__(self, chat: Any, latency_s: Any) -> None:
        super().__init__(chat, latency_s)
        self.begun: dict[int, int] = defaultdict(int)

    def prompt(self, messages: Sequence[Any], schemas: Any, **kwargs: Any) -> list[int]:
        uid = uid_of(messages)
        _uid.set(uid * GROUP + self.begun[uid] % GROUP)
        self.begun[uid] += 1
        _turn.set(0)
        ids: list[int] = self._chat.prompt(messages, schemas, **kwargs)
        return ids


def train_ours(model: str, n: int, clock: Clock, staleness: int) -> int:
    from transformers import AutoTokenizer

    from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
    from toolgrpo.chat import resolve_format
    from toolgrpo.observe.options import RecordedShare

    folder = Path(tempfile.mkdtemp())
    (folder / "wait_tool.py").write_text(TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    decisions = Decisions(resolve_format(tokenizer), lambda: clock.latency_s)
    clock.before_first.append(decisions.begun.clear)
    args = ToolGRPOConfig(
        **arguments(n, clock.steps),
        max_turns=MAX_TURNS,
        max_turn_tokens=TURN_TOKENS,
        max_staleness=staleness,
        record_episodes=RecordedShare(False),
        quiet=True,
    )
    made: list[Any] = []
    trainer = ToolGRPOTrainer(
        model,
        reward,
        args,
        rows(256),
        processing_class=tokenizer,
        tools=folder / "wait_tool.py",
        chat=decisions,
        callbacks=[timing(clock, lambda: made[0].rollout_seconds)],
    )
    made.append(trainer)
    try:
        trainer.train()
        return int(trainer.n_episodes)
    finally:
        trainer.close()


def main() -> None:
    """Run one training and write what it took."""
    kind, n, phases, target = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])
    from toolgrpo.models.nano import ensure_nano

    clock, model = Clock([Phase(*phase) for phase in phases]), str(ensure_nano())
    episodes = train_trl(model, n, clock) if kind == "TRL" else train_ours(model, n, clock, int(kind))
    found = {"seconds": clock.seconds, "rollout_s": clock.rollout_s, "episodes": episodes, "steps": clock.steps}
    target.write_text(json.dumps(found))
    os._exit(0)  # the vLLM inside TRL's trainer is never ended, and the process would wait for it


if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
