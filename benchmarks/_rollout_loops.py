"""The two loops that `rollouts.py` compares, TRL's and ours, with what both are told to decide.

vLLM reads its environment when it is first imported, so nothing heavy is imported before a loop is made.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

N, MAX_TURNS, TURN_TOKENS = 64, 5, 32
MOST = 128  # rollouts at a time
NUMBER_TYPES = ("float32", "bfloat16")


def prepare_vllm() -> None:
    """Set what vLLM reads when it is imported, before anything imports PyTorch."""
    from toolgrpo.support.process_setup import prepare

    prepare()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # for TRL's vLLM, as our engine has it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "result 42 result 42 result 42"


TOOLS = f"import time\n\n{inspect.getsource(wait)}\nTOOL_FUNCTIONS = [wait]\n"  # the file that ours is given


def decision(uid: int, turn: int) -> float | None:
    """The tool's latency as a multiple of the nominal one, or None if this turn answers."""
    rng = random.Random(uid * 1000 + turn)
    calls = turn < MAX_TURNS - 1 and rng.random() < 0.75
    factor = rng.choice([0.5, 1.0, 1.0, 1.5])
    return factor if calls else None


def turns_of(uid: int) -> int:
    return 1 + next(turn for turn in range(MAX_TURNS) if decision(uid, turn) is None)


def question(uid: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {uid} plus {uid}?"}]


class ScriptedParse:
    """TRL's parse of a response replaced: it parses live rollouts in order, round by round, which tells whose turn it is."""

    def __init__(self, call: Callable[[int, int], tuple[str, dict[str, float]] | None]) -> None:
        self._call = call  # by rollout and turn; None: this turn answers
        self.begin(())

    def begin(self, uids: Sequence[int]) -> None:
        self._order, self._next, self._at, self._turn = list(uids), list[int](), 0, 0

    def __call__(self, tokenizer: Any, ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, Any]:
        uid = self._order[self._at]
        called = self._call(uid, self._turn)
        message: dict[str, Any] = {"role": "assistant", "content": "x"}
        if called is not None:
            name, arguments = called
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
            self._next.append(uid)
        self._at += 1
        if self._at == len(self._order):
            self._order, self._next, self._at, self._turn = self._next, [], 0, self._turn + 1
        return message


class NativeLoop:
    """TRL's own trainer with `tools=`, its decisions scripted where it parses a response.

    `number_type` is its vLLM's. TRL leaves it to vLLM, which takes bf16 for weights in fp32.
    """

    def __init__(self, model: str, number_type: str = "float32") -> None:
        import torch
        import trl.generation.vllm_generation as generation
        import trl.trainer.grpo_trainer as module
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from toolgrpo.engines.vllm_options import CPU_BLOCK_SIZE

        self.latency_s = 0.0
        args = GRPOConfig(
            tempfile.mkdtemp(),
            per_device_train_batch_size=N,
            num_generations=8,
            max_completion_length=MAX_TURNS * 128,
            use_vllm=True,
            vllm_mode="colocate",
            max_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            vllm_max_model_length=1024,
            vllm_gpu_memory_utilization=0.2,
            save_strategy="no",
            gradient_checkpointing=False,
            generation_kwargs={"max_tokens": TURN_TOKENS, "ignore_eos": True},
        )
        asked: dict[str, Any] = {"dtype": number_type}
        if not torch.cuda.is_available():
            asked["block_size"] = CPU_BLOCK_SIZE  # as our own engine has it
        generation.LLM = functools.partial(generation.LLM, **asked)
        rows = Dataset.from_list([{"prompt": question(uid)} for uid in range(N)])
        self.trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), args, rows, tools=[wait])
        # Its weights come from the same folder; its weight sync crashes on the CPU and is not what is measured.
        self.trainer._last_loaded_step = self.trainer.state.global_step
        self.trainer._sync_tool_dicts, self.trainer._async_tool_dicts = [{"wait": wait}] * MOST, [{}] * MOST
        self._parse = module.parse_response = ScriptedParse(self._call)

    @property
    def llm(self) -> Any:
        return self.trainer.vllm_generation.llm

    def _call(self, uid: int, turn: int) -> tuple[str, dict[str, float]] | None:
        factor = decision(uid, turn)
        return None if factor is None else ("wait", {"seconds": self.latency_s * factor})

    def run(self, uids: Sequence[int] = range(N)) -> tuple[float, int]:
        """Seconds, and sampled tokens."""
        self._parse.begin(uids)
        started = time.perf_counter()
        output = self.trainer._generate([question(uid) for uid in uids])
        return time.perf_counter() - started, sum(sum(mask) for mask in output[2])


_uid: contextvars.ContextVar[int] = contextvars.ContextVar("uid")
_turn: contextvars.ContextVar[int] = contextvars.ContextVar("turn")


def uid_of(messages: Sequence[Any]) -> int:
    """The number of a question; the lengths of other conversations are measured before the first step."""
    return int((re.findall(r"\d+", str(messages[0]["content"])) or ["0"])[0])


class ScriptedDecisions:
    """Our chat format with its parse replaced: the prompt says which rollout this task is."""

    def __init__(self, chat: Any, latency_s: Callable[[], float]) -> None:
        self._chat, self._latency_s = chat, latency_s
        self.name, self.stop_ids, self.call_text = chat.name, (), chat.call_text

    def prompt(self, messages: Sequence[Any], schemas: Any, **kwargs: Any) -> list[int]:
        _uid.set(uid_of(messages))
        _turn.set(0)
        ids: list[int] = self._chat.prompt(messages, schemas, **kwargs)
        return ids

    def bridge(self, ids: Any, tool_messages: Any, **kwargs: Any) -> list[int]:
        bridged: list[int] = self._chat.bridge(ids, tool_messages, **kwargs)
        return bridged

    def parse(self, ids: Any, **kwargs: Any) -> Any:
        from toolgrpo.chat.base import ParsedTurn
        from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt

        self._chat.parse(ids, **kwargs)  # its cost belongs to ours
        uid, turn = _uid.get(), _turn.get()
        factor = decision(uid, turn)
        _turn.set(turn + 1)
        if factor is None:
            return ParsedTurn("x", None, (), False)
        name, arguments = self.call(uid, turn, factor)
        return ParsedTurn("x", None, (CallAttempt(AttemptStatus.OK, "", name, arguments),), False)

    def call(self, uid: int, turn: int, factor: float) -> tuple[str, dict[str, float]]:
        """The tool that is called, and its arguments."""
        return "wait", {"seconds": self._latency_s() * factor}


class OurLoop:
    def __init__(self, native: NativeLoop) -> None:
        from toolgrpo.chat import resolve_format
        from toolgrpo.engines.base import SamplingOptions
        from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
        from toolgrpo.engines.vllm_seam import StepEngine
        from toolgrpo.rollout import EpisodeLimits, EpisodeRunner, Rollouts
        from toolgrpo.tools import load_tools

        self.latency_s = 0.0
        tokenizer = native.trainer.processing_class
        folder = Path(tempfile.mkdtemp())
        (folder / "wait_tool.py").write_text(TOOLS)
        self.tools = load_tools(folder / "wait_tool.py", tool_timeout_s=30.0)
        parts = Rollouts(
            engine=VLLMColocateEngine(StepEngine(native.llm.llm_engine)),
            chat=ScriptedDecisions(resolve_format(tokenizer), lambda: self.latency_s),
            limits=EpisodeLimits(
                max_completion_length=MAX_TURNS * 128, max_turns=2 * MAX_TURNS, max_turn_tokens=TURN_TOKENS
            ),
            tokenizer=tokenizer,
            tools=self.tools,
        )
        self.runner = EpisodeRunner(parts, SamplingOptions())

    def run(self, uids: Sequence[int] = range(N)) -> tuple[float, int]:
        from toolgrpo.rollout import Episode, Scheduler
        from toolgrpo.rollout.scheduler import run_all, run_blocking

        episodes = [Episode(messages=tuple(question(uid))) for uid in uids]
        started = time.perf_counter()
        result = run_blocking(run_all(episodes, Scheduler(self.runner)))
        seconds = time.perf_counter() - started
        self.trajectories = result.trajectories
        return seconds, sum(t.n_sampled for t in result.trajectories)
