"""Facts about the machine before accelerate has set it up (the CPU or not, and the precision), and a check of what it set up.

Afterwards the accelerator is asked, for both (`engines/policy.py`), so that the engine runs where
and as the trainer does. What bf16 costs on a CPU is measured then, on this very machine.

accelerate can fall back in silence: with `ACCELERATE_USE_CPU=true` a ZeRO-3 launch exits 0 after
plain DDP, FSDP without an accelerator becomes DDP as well, and DDP can become processes that each
train alone. `check_backend` makes that an error.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from toolgrpo.engines.policy import Backend
from toolgrpo.errors import ConfigError

logger = logging.getLogger(__name__)
_DRIVER, _DEVICE = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")
_LEAST_DRIVER = 580  # of CUDA 13
_HAS_BF16, _HAS_KERNELS = (8, 0), (7, 5)  # compute capability: of bf16, and of the builds for CUDA 13
_PRECISION = "ACCELERATE_MIXED_PRECISION"  # what a launch file said
_ROWS, _WIDTH = 128, 512  # of a matrix product that takes a millisecond in fp32, and up to ten in an emulated bf16
_PRODUCTS_S = 0.05
_WORTH_SAYING = 1.2


def trains_on_cpu(use_cpu: bool) -> bool:
    """Return whether the CPU trains: because it is asked to, by flag or launch file, or for want of a GPU."""
    if use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return True
    if torch.cuda.is_available():
        return False
    refuse_old_driver()
    return True


def refuse_old_driver(driver: Path = _DRIVER, device: Path = _DEVICE) -> None:
    """Raise ConfigError if there is a GPU that this PyTorch cannot use because its driver is too old."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if torch.version.cuda is None or hidden or not device.exists() or not driver.is_file():
        return
    version = re.search(r"\b(\d{3})\.\d[\d.]*", driver.read_text(errors="replace"))
    if version is not None and int(version[1]) < _LEAST_DRIVER:
        raise ConfigError(
            f"this machine has an NVIDIA GPU with driver {version[0]}, and PyTorch for CUDA {torch.version.cuda} needs "
            f"{_LEAST_DRIVER} or newer, so that training would be on the CPU; install a newer driver, or ask for the CPU "
            f"(--use_cpu true)"
        )


def settled_device(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config has about device and precision, as TRL shall read it."""
    bf16, fp16 = settled_precision(given["bf16"], given["fp16"], on_cpu=trains_on_cpu(given["use_cpu"]))
    use_cpu, ddp_backend = settled_cpu(given["use_cpu"], given["ddp_backend"], bf16)
    settled = {"bf16": bf16, "fp16": fp16, "use_cpu": use_cpu, "ddp_backend": ddp_backend}
    return {**settled, "dataloader_pin_memory": False} if trains_on_cpu(use_cpu) else settled


def settled_precision(bf16: bool | None, fp16: bool, *, on_cpu: bool) -> tuple[bool | None, bool]:
    """Return `bf16` and `fp16` as TRL shall read them; a flag wins over the launch file, in both directions.

    Not given, bf16 is TRL's default (yes) on an accelerator that has it, and the launch file's word
    on a CPU, where bf16 is slower than fp32 on most machines and never exact. A GPU without bf16
    trains in fp16 unless a flag says otherwise.
    """
    if not on_cpu:
        lacks_bf16 = _least_capability() < _HAS_BF16
        fp16 = fp16 or (bf16 is None and lacks_bf16)
    elif fp16:
        raise ConfigError("fp16 needs a GPU, and here the CPU trains; leave it out (fp32), or give --bf16 true")
    elif bf16 is None:
        bf16 = os.environ.get(_PRECISION) == "bf16"
    if bf16 is False and not fp16 and os.environ.get(_PRECISION, "no") != "no":
        os.environ[_PRECISION] = "no"  # Transformers reads the launch file where no flag is true
    return bf16, fp16


def _least_capability() -> tuple[int, int]:
    """Return the lowest compute capability among the GPUs of this process; raise ConfigError for one without kernels."""
    gpus = [(torch.cuda.get_device_capability(number), number) for number in range(torch.cuda.device_count())]
    capability, number = min(gpus, default=(_HAS_BF16, 0))
    if capability < _HAS_KERNELS:
        raise ConfigError(
            f"GPU {number} ({torch.cuda.get_device_name(number)}) has compute capability {_dotted(capability)}, and PyTorch "
            f"and vLLM for CUDA 13 need {_dotted(_HAS_KERNELS)} or newer (T4, RTX 20 and later); use another GPU, hide this "
            f"one (CUDA_VISIBLE_DEVICES), or ask for the CPU (--use_cpu true)"
        )
    return capability


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def settled_cpu(use_cpu: bool, ddp_backend: str | None, bf16: bool | None) -> tuple[bool, str | None]:
    """Return `use_cpu` and `ddp_backend` as TRL shall read them.

    Where the CPU trains, several processes need gloo, or each would train for itself, and
    Transformers takes bf16 only from who says `use_cpu`. DeepSpeed must not be told. It is about to build or load its
    extensions, and waits for a lock without a word, so each lock is named.
    """
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if deepspeed and os.environ.get("LOCAL_RANK", "0") == "0":
        for lock in _build_locks():
            logger.warning(
                "DeepSpeed waits until %s is gone. Either another run builds that extension now, or a build ended early: "
                "if this run hangs, stop it and remove that file",
                lock,
            )
    if not trains_on_cpu(use_cpu):
        return use_cpu, ddp_backend
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if deepspeed:
        _leave_out_kernel_of_inference()
        return use_cpu, ddp_backend or ("gloo" if several else None)
    return use_cpu or several or bool(bf16), ddp_backend


def _leave_out_kernel_of_inference() -> None:
    """Keep DeepSpeed from compiling, in the first run on a machine, a kernel that its inference alone calls.

    That takes a compiler, and a minute or more in which nothing is said.
    """
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _build_locks() -> list[str]:
    """Return the locks of builds of PyTorch's extensions: of builds that go on, or that ended early."""
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools

    python = f"py{sys.version_info.major}{sys.version_info.minor}*"
    folders = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(get_default_build_root(), python)
    return sorted(glob.glob(f"{folders}/*/lock"))


def precision_line(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what there is to know of this precision on this device: bf16 that a CPU emulates, fp16 for want of bf16."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        return _line_of(bf16_factor())
    if dtype is torch.float16 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _HAS_BF16:
            return (
                f"fp16      this GPU has compute capability {_dotted(capability)}, and bf16 needs {_dotted(_HAS_BF16)}: "
                f"training is in fp16, with a scaled loss"
            )
    return None


def _line_of(factor: float) -> str | None:
    if factor < _WORTH_SAYING:
        return None
    return (
        f"bf16      this CPU emulates it: a matrix product takes {factor:.1f} times as long as in fp32 (measured just "
        f"now); fp32 is quicker (--bf16 false --dtype float32), in more memory"
    )


def bf16_factor() -> float:
    """Return how many times as long as in fp32 a small matrix product takes in bf16, the fastest of each.

    They take turns for about 50 ms. It is the processor time of one thread, so that what else the
    machine does counts little.
    """
    pairs = {
        dtype: (torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    fastest = dict.fromkeys(pairs, float("inf"))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for rows, weights in pairs.values():
                torch.nn.functional.linear(rows, weights)  # the first one also chooses its kernel
            began, rounds = time.thread_time(), 0
            while rounds < 3 or time.thread_time() - began < _PRODUCTS_S:
                for dtype, (rows, weights) in pairs.items():
                    started = time.thread_time()
                    torch.nn.functional.linear(rows, weights)
                    fastest[dtype] = min(time.thread_time() - started, fastest[dtype])
                rounds += 1
    finally:
        torch.set_num_threads(n_threads)
    return fastest[torch.bfloat16] / fastest[torch.float32]


def check_backend(accelerator: Any, environment: Mapping[str, str] = os.environ, *, n_gpus: int = 1) -> Backend:
    """Return the backend that was set up; `ConfigError` if another one was asked for.

    `n_gpus` is how many this process can see.
    """
    backend = Backend.of(accelerator)
    if n_gpus > 1 and backend.kind == "NO" and accelerator.device.type == "cuda":
        raise ConfigError(
            f"this one process sees {n_gpus} GPUs and would spread the model over them. Start one process for each with "
            f"--accelerate_config multi_gpu or `accelerate launch --multi_gpu`, or show it one: CUDA_VISIBLE_DEVICES=0"
        )
    started = int(environment.get("WORLD_SIZE", "1"))
    if started != backend.n_processes:
        raise ConfigError(
            f"the launcher started {started} processes, but accelerate set up {backend}: each would train for itself. "
            f"Choose an --accelerate_config that fits this machine (`toolgrpo --help` names them)."
        )
    for variable, kind, wanted in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP", "FSDP"),
    ):
        if environment.get(variable, "false").lower() == "true" and backend.kind != kind:
            raise ConfigError(
                f"the launcher asked for {wanted} ({variable}=true), but accelerate set up {backend}. On a machine "
                f"without a GPU, `use_cpu: true` and FSDP do that: use --accelerate_config cpu_ddp there, or for "
                f"DeepSpeed on the CPU `use_cpu: false` in the launch file and no use_cpu among the arguments."
            )
    return backend
