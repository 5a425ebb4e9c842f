"""What `prepare` does before PyTorch is imported; each case in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

ON_CPU = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.path.exists("/proc/driver/nvidia"), reason="about Linux without a GPU"
)

LEFT_OUT = ("MALLOC_", "ONEDNN_", "TORCHINDUCTOR_", "ATEN_")

# Prints a JSON object: resident MiB at four moments, and what is in the environment.
SCRIPT = """
import json, os
from toolgrpo.startup import give_memory_back, prepare

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

prepare()
at_start = rss()
blocks = [bytearray(b"x") * 2**20 for _ in range(300)]
full = rss()
last = blocks[-1]  # the heap cannot shrink from its end
del blocks
kept = rss()
give_memory_back()
names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR")
print(json.dumps({"rss": [at_start, full, kept, rss()], **{name: os.environ.get(name) for name in names}}))
"""


def run(**environment: str) -> dict[str, Any]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**mine, **environment}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@ON_CPU
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    at_start, full, kept, given_back = run()["rss"]
    assert full - at_start > 290
    assert full - kept < 20, "the next tensor finds its pages"
    assert given_back - at_start < 20


def test_compiled_code_of_other_instructions_is_not_found_again() -> None:
    plain, restricted = run(), run(ATEN_CPU_CAPABILITY="avx2")
    assert plain["TORCHINDUCTOR_CACHE_DIR"] == run()["TORCHINDUCTOR_CACHE_DIR"]
    assert restricted["TORCHINDUCTOR_CACHE_DIR"].endswith("_avx2")
    assert run(ATEN_CPU_CAPABILITY="default")["TORCHINDUCTOR_CACHE_DIR"] != restricted["TORCHINDUCTOR_CACHE_DIR"]
    assert run(TORCHINDUCTOR_CACHE_DIR="/mine")["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


@ON_CPU
def test_what_a_user_has_set_is_left_alone() -> None:
    chosen = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "TOKENIZERS_PARALLELISM": "true", "MALLOC_ARENA_MAX": "2"}
    found = run(**chosen)
    assert (found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], found["TOKENIZERS_PARALLELISM"]) == ("7", "true")
    _, full, kept, _ = found["rss"]
    assert full - kept > 250, "with settings of one's own for malloc, nothing is kept"
    assert int(run()["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
