"""Prepare a process before PyTorch is imported.

`prepare()` is called on the first lines of a recipe. It imports nothing heavy, and does nothing
that a user has set otherwise in the environment.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

_DRIVER = "/proc/driver/nvidia"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ON_WINDOWS = "toolgrpo runs on Linux and macOS; on Windows, install and start it in WSL2 (wsl --install)"
T = TypeVar("T")


def prepare(arguments: Sequence[str] = ()) -> None:
    """Set environment defaults; on a CPU also use Intel's OpenMP and keep freed memory.

    With that OpenMP vLLM generates about a third faster. On an NVIDIA GPU PyTorch takes memory in segments that grow, as
    no two steps have packed batches of one length. `arguments` are those of the command, which may ask for the CPU on a
    machine with a GPU.
    """
    if sys.platform == "win32":
        raise ImportError(ON_WINDOWS)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    _divide_compiled_code()
    _remove_launcher_folder()
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    # TRL's own way to vLLM, whose versions it lists, is not used here.
    warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
    if os.path.exists(_DRIVER) and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    if sys.platform.startswith("linux") and (not os.path.exists(_DRIVER) or _asks_for_cpu(arguments)):
        # oneDNN, which vLLM multiplies with, remembers how for each number of tokens: 250 KiB for
        # each, and 1024 of them. The sizes of decoding fit into fewer, and those of prompts seldom
        # come again.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
        _preload_openmp()
        _keep_memory()


def _divide_compiled_code() -> None:
    """Keep what PyTorch compiles for one set of instructions apart from what it compiles for another.

    PyTorch 2.13 finds compiled code again, also in an image or on a disk that other machines share, without asking for
    which set it was written. Vectors of another width then leave elements out, and vLLM draws tokens that nobody meant.
    """
    name = os.environ.get("ATEN_CPU_CAPABILITY") or _widest_vectors()
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{getattr(os, 'getuid', int)()}_{name}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _remove_launcher_folder() -> None:
    """Remove the temporary folder in which torchrun waits for an error report of this process, and which it leaves.

    No process of ours writes one: what ended it stands in its log.
    """
    report = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if any(folder.name.startswith("torchelastic_") for folder in report.parents[3:4]):
        os.environ["TORCHELASTIC_ERROR_FILE"] = ""
        with suppress(OSError):  # other processes of this machine are still to remove theirs
            for folder in report.parents[:4]:
                folder.rmdir()


def _widest_vectors() -> str:
    """Return a name for the widest vectors that this processor has, as far as it says so."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return platform.machine()
    return next((name for name in ("avx512f", "avx2") if name in flags), platform.machine())


def _is_news(record: logging.LogRecord) -> bool:
    """Let through what DeepSpeed logs, but that it found no GPU where it is merely installed."""
    return "Setting accelerator to CPU" not in record.getMessage()


def _asks_for_cpu(arguments: Sequence[str]) -> bool:
    """Return whether the launcher or the command line asks for the CPU; a YAML file is not read yet."""
    values = [os.environ.get("ACCELERATE_USE_CPU", "false")]
    for flag, following in pairwise((*arguments, "")):
        name, _, value = flag.partition("=")
        if name == "--use_cpu":
            values.append(value or ("true" if following.startswith("--") or not following else following))
    return values[-1].lower() in ("1", "true", "yes", "y", "on", "t")


def give_memory_back() -> None:
    """Return freed memory that the allocator keeps, from the middle of the heap too.

    Blocks of ever new sizes spread over the heap, so without this a long run touches more and more
    of it. The next step asks for its pages again, which costs a fraction of a second.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def on_this_device(function: Callable[[], T]) -> Callable[[], T]:
    """Return the function for another thread, which then computes on the CUDA device of this one.

    A new thread begins on device 0, whichever its process was given.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return function
    device = torch.cuda.current_device()

    def run() -> T:
        torch.cuda.set_device(device)
        return function()

    return run


def _preload_openmp() -> None:
    """Load libiomp5 before PyTorch brings its own OpenMP, where it is installed."""
    library = _libiomp5()
    if library is not None and "torch" not in sys.modules:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _keep_memory() -> None:
    """Let glibc keep freed memory for the next tensor.

    It returns every large block to the system and gets fresh pages for the next one, which the
    kernel has to clear: half of the time of a training pass on a CPU (benchmarks/training_pass.py
    shows it). The price is that memory stays at its high-water mark until `give_memory_back`, and
    that a large model needs several times its memory: see `map_large_blocks`. What the environment
    says about the allocator is the user's own choice and wins.
    """
    global _large_blocks
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(_TUNABLES, ""):
        return
    if _has_huge_pages():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch reads it at its first tensor
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)
        _large_blocks = "heap"


def map_large_blocks() -> None:
    """Take large blocks from the system again, where `prepare` has put them into the heap.

    Between the large tensors of a training pass lie those that it keeps, so the heap does not use
    their room again: a model of 0.5B parameters took four times its memory. Mapped blocks leave the
    process when they are freed, and huge pages make fresh ones cheaper.
    """
    global _large_blocks
    if _large_blocks == "heap":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 2**16)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        _large_blocks = "mapped"


def maps_large_blocks() -> bool:
    """Return whether `map_large_blocks` is in force."""
    return _large_blocks == "mapped"


def _has_huge_pages() -> bool:
    """Return whether the kernel gives huge pages to those who ask."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


_large_blocks = "as glibc does"  # or: heap, mapped
_TUNABLES = "GLIBC_TUNABLES"
_MAPPED_BYTES = 8 * 2**20  # above the tiles of the output head (trainer/trl/trainer.py)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4  # the numbers of malloc.h


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of these packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _libiomp5() -> Path | None:
    try:
        distribution = importlib.metadata.distribution("intel-openmp")
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if file.name == "libiomp5.so":
            path = Path(str(distribution.locate_file(file))).resolve()
            return path if path.exists() else None
    return None
