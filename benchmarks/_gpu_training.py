"""Parts of `gpu_proof.py` that train: steps on random weights of a real shape, several processes, beside TRL's trainer."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from _gpu_engines import ROUNDING_BF16, ROUNDING_FP32
from _gpu_place import Figure, Place, folder_of_shape
from _whole_step_runs import Job, Phase, measured
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig

from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
from toolgrpo.data import load_tasks
from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
from toolgrpo.engines.vllm_options import vllm_is_for_cpu
from toolgrpo.models import NANO
from toolgrpo.testing.trainers import tiny_qwen3

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
ROOM_FOR_FP32_GIB = 40  # weights, gradients and Adam of 1.5B in fp32 take 25 GiB, beside vLLM
OF_A_RECIPE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length", "beta"),
    *("learning_rate", "loss_type", "vllm_gpu_memory_utilization", "temperature"),  # and, on their card, checkpointing
)
LARGEST_BF16 = 0.5  # of any token; where the adapter was not sent they were 1.08 apart on a CPU, else 0.10
LONGEST_PROMPT = {"financial_qwen2.5_0.5b": 2820, "aime_qwen2.5_0.5b": 298}  # tokens, docs/how-to/scaling.md


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training said and moved."""

    logs: list[dict[str, Any]]
    moved: float
    n_trained: int
    dtype: torch.dtype
    preempted: int

    def figures(self, n_steps: int) -> Iterator[Figure]:
        finite = sum(math.isfinite(log["loss"]) for log in self.logs)
        yield Figure("steps", len(self.logs), at_least=n_steps)
        yield Figure("loss is a number in all of them", finite, at_least=n_steps)
        yield Figure("weights moved by, in all", self.moved, at_least=1e-12)
        yield Figure("parameters trained", self.n_trained / 1e6, "M")
        yield Figure("bits of their weights", torch.finfo(self.dtype).bits)
        yield Figure("a step", statistics.median(log["step_time"] for log in self.logs), "s")
        yield Figure("requests that vLLM preempted", self.preempted)
        yield Figure("peak of main memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB")
        if torch.cuda.is_available():
            yield Figure("peak of PyTorch's memory", torch.cuda.max_memory_allocated() / GIB, "GiB")
            yield Figure("peak of what it keeps", torch.cuda.max_memory_reserved() / GIB, "GiB")
            yield Figure("beside it in use", (_used_by_this_process() - torch.cuda.memory_reserved()) / GIB, "GiB")


def _used_by_this_process() -> int:
    """Return its bytes of the first GPU as the driver counts them: other processes may be there too."""
    pynvml = importlib.import_module("pynvml")  # of requirements-cuda.lock
    pynvml.nvmlInit()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    free, whole = torch.cuda.mem_get_info()
    return own[0] if own and own[0] else whole - free  # a container may hide them


def _trained(
    place: Place, folder: str, *, dtype: str, lora: int, rows: Any, tools: str | None, **config: Any
) -> Trained:
    on_gpu = place.device == "cuda"
    asked = {
        "engine": "vllm_colocate" if on_gpu or vllm_is_for_cpu() else "transformers", "use_cpu": not on_gpu, "bf16": on_gpu,
        "gradient_checkpointing": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "model_init_kwargs": {"dtype": dtype if on_gpu else "float32"}, "rollout_correction": "bypass",
        "vllm_gpu_memory_utilization": place.vllm_share(12),
    }  # fmt: skip
    trainer = ToolGRPOTrainer(
        folder,
        _evenness,
        ToolGRPOConfig(f"{folder}/out", **{**asked, **config}),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(str(NANO)),
        tools=tools,
        peft_config=LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().to("cpu", copy=True) for parameter in trained[:8]]
    try:
        preempted = _counted_preemptions(trainer.engine)
        trainer.train()
    finally:
        trainer.close()
    return Trained(
        logs=[log for log in trainer.state.log_history if "loss" in log],
        moved=sum(float((now.detach().cpu() - old).abs().sum()) for now, old in zip(trained[:8], before, strict=True)),
        n_trained=sum(parameter.numel() for parameter in trained),
        dtype=trained[0].dtype,
        preempted=len(preempted),
    )


def _counted_preemptions(engine: Any) -> list[str]:
    """Return a list that grows by each request that vLLM takes its cache from, to begin it again."""
    preempted: list[str] = []
    if isinstance(engine, VLLMColocateEngine):
        scheduler: Any = engine._vllm._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(request: Any, *rest: Any, **named: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *rest, **named)

        scheduler._preempt_request = counted
    return preempted


def steps(place: Place, *, lora: bool, packed: bool = False) -> Iterator[Figure]:
    """Twenty training steps with tools in the prompt: the way of a whole step, on a model that knows nothing.

    Its reward is the share of even token ids, which every group of episodes has in different measure.
    """
    n_steps, batch, length = (2, 4, 12) if place.tiny else (20, 16, 256)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    loaded = {"model_init_kwargs": {"dtype": "bfloat16", "quantization_config": four_bits}, "vllm_lora_sync": "adapter"}
    with tempfile.TemporaryDirectory() as folder:
        found = _trained(
            place, folder_of_shape(place, folder, "1.5B"),
            dtype="float32" if not lora and place.gpu_gib >= ROOM_FOR_FP32_GIB else "bfloat16",
            lora=16 if lora else 0,
            rows=load_tasks("arithmetic", limit=64),
            tools=str(ROOT / "tools_funcs" / "arithmetic_tools.py"),
            max_steps=n_steps, per_device_train_batch_size=batch, num_generations=4, max_completion_length=length,
            learning_rate=1e-4 if lora else 1e-5, **(loaded if packed else {}),
        )  # fmt: skip
    yield from found.figures(n_steps)
    for name, what in (("mean", "at the mean"), ("max", "at most")):
        values = [log.get(f"sampling/sampling_logp_difference/{name}", 0.0) for log in found.logs]
        bound = ROUNDING_BF16 if name == "mean" else None
        yield Figure(f"log-probabilities of engine and trainer differ {what} by", max(values), at_most=bound)


def _evenness(trajectories: Sequence[Any], **columns: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in one.ids) / max(1, len(one.ids)) for one in trajectories]


def recipe(place: Place, *, config: str) -> Iterator[Figure]:
    """Two steps with the sizes of a recipe, and episodes as long as they may be: it fits the card that it names."""
    text = (ROOT / "recipes" / "configs" / f"{config}.yaml").read_text()
    told: dict[str, Any] = {key: value for part in yaml.safe_load(text).values() for key, value in part.items()}
    named = re.search(r"GPU of (\d+) GB", text)
    card = float(named[1]) if named else 24.0  # of a recipe that names none
    asked = {key: told[key] for key in OF_A_RECIPE if key in told}
    if place.device == "cuda":  # the same gigabytes on a larger card
        share = asked.get("vllm_gpu_memory_utilization", 0.3)
        asked["vllm_gpu_memory_utilization"] = min(0.9, share * card / place.gpu_gib)
    if place.tiny:
        asked |= {"max_completion_length": 16, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    tokenizer: Any = AutoTokenizer.from_pretrained(str(NANO))
    ids = tokenizer.encode("12 + 34 " * 5000)[: 24 if place.tiny else LONGEST_PROMPT[config]]
    with tempfile.TemporaryDirectory() as folder:
        from datasets import Dataset

        found = _trained(
            place, folder_of_shape(place, folder, "0.5B"), dtype=told.get("dtype", "float32"),
            lora=told.get("lora_r", 16) if told.get("use_peft") else 0,
            rows=Dataset.from_list([{"prompt": tokenizer.decode(ids)}] * 64), tools=None, max_steps=2, **asked,
        )  # fmt: skip
    figures = list(found.figures(2))
    yield from figures
    gpu = {figure.what: figure.value for figure in figures if figure.unit == "GiB"}
    if place.device == "cuda":
        used = gpu["peak of what it keeps"] + gpu["beside it in use"]
        yield Figure(f"memory of the card, {card:.0f} GB in the recipe", used, "GiB", at_most=0.98 * card)


def processes(
    place: Place, *, launch: str, n: int = 2, job: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[Figure]:
    """A tiny model in several processes, each with a vLLM of its own: it draws from the weights that are trained."""
    on_gpu = place.device == "cuda"
    file = launch if on_gpu else {"multi_gpu": "cpu_ddp", "single_gpu": "cpu"}.get(launch, launch)
    with tempfile.TemporaryDirectory() as folder:
        tiny_qwen3(0).save_pretrained(f"{folder}/model")
        given = {"vllm_max_model_length": 256, "use_cpu": not on_gpu and n == 1, **config}
        asked = {"out": f"{folder}/out", "model": f"{folder}/model", "engine": "vllm_colocate", **job, "config": given}
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate/{file}.yaml"),
            *("--num_processes", str(n), "--mixed_precision", "no", "--main_process_port", "0"),
            *("tests/fixtures/scale/train_tiny.py", json.dumps(asked)),
        ]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja there
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PATH": path})
        ranks = [json.loads(Path(f"{folder}/out/rank{rank}.json").read_text()) for rank in range(n)]
    yield Figure("processes", ranks[0]["n_processes"], at_least=n)
    yield Figure("steps", ranks[0]["steps"], at_least=config["max_steps"])
    apart = [value for rank in ranks for value in rank["difference"] if value is not None]
    most = LARGEST_BF16 if config.get("bf16") else ROUNDING_FP32
    yield Figure("log-probabilities of engine and trainer differ by", max(apart), at_most=most)
    alike = sum(rank["weights"] == ranks[0]["weights"] for rank in ranks)
    yield Figure("processes with the weights of the first", alike, at_least=n)


def whole_step(place: Place) -> Iterator[Figure]:
    """Whole steps beside TRL's own trainer: the same episodes, tools of 0, 0.1 and 0.5 s, a 1.5B shape (in small: nano)."""
    phases = (
        (Phase(0.0, 0, 1), Phase(0.1, 0, 1)) if place.tiny else (Phase(0.0, 1, 3), Phase(0.1, 0, 2), Phase(0.5, 0, 1))
    )
    with tempfile.TemporaryDirectory() as folder:
        model = "" if place.tiny else folder_of_shape(place, folder, "1.5B")
        took = {}
        for trainer in ("ours", "TRL"):
            job = Job(trainer=trainer, episodes=16 if place.tiny else 64, phases=phases, model=model)
            took[trainer] = {float(key): statistics.median(all_s) for key, all_s in measured(job)["seconds"].items()}
            for latency_s, seconds in took[trainer].items():
                yield Figure(f"{trainer}, a call takes {latency_s:g} s: a step", seconds, "s")
    for latency_s, seconds in took["ours"].items():
        yield Figure(f"a call takes {latency_s:g} s: ours is faster, times", took["TRL"][latency_s] / seconds)
