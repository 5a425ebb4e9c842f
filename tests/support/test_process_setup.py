"""What `prepare` does before PyTorch is imported, each case in a process of its own; and other systems, simulated."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from confined_python.processes import linux

ON_CPU = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.path.exists("/proc/driver/nvidia"), reason="about Linux without a GPU"
)

LEFT_OUT = ("PYTORCH_", "MALLOC_", "GLIBC_", "THP_", "ONEDNN_", "TORCHINDUCTOR_", "ATEN_")

# Prints a JSON object: resident MiB at several moments, and what is in the environment.
SCRIPT = """
import json, os
from toolgrpo.support.process_setup import give_memory_back, map_large_blocks, prepare

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

prepare()
at_start = rss()
if LARGE:
    map_large_blocks()
    pairs = [(bytearray(b"x") * 2**24, bytearray(b"x") * 2**16) for _ in range(20)]
    lasting = [small for _, small in pairs]  # as what a pass keeps, between its large tensors
    full = rss()
    del pairs
    print(json.dumps([full, rss()]))
    raise SystemExit
blocks = [bytearray(b"x") * 2**20 for _ in range(300)]
full = rss()
last = blocks[-1]  # the heap cannot shrink from its end
del blocks
kept = rss()
give_memory_back()
given_back = rss()
names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR", "THP_MEM_ALLOC_ENABLE")
print(json.dumps({"rss": [at_start, full, kept, given_back], **{name: os.environ.get(name) for name in names}}))
"""


def run(script: str = SCRIPT.replace("LARGE", "False"), **environment: str) -> Any:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**mine, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


plain = functools.cache(run)  # what the script prints where nothing is set


@ON_CPU
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    at_start, full, kept, given_back = plain()["rss"]
    assert full - at_start > 290
    assert full - kept < 20, "the next tensor finds its pages"
    assert given_back - at_start < 20


@ON_CPU
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc")
def test_large_blocks_leave_with_what_was_in_them() -> None:
    full, freed = run(SCRIPT.replace("LARGE", "True"))
    assert full - freed > 250
    full, freed = run(SCRIPT.replace("LARGE", "True").replace("map_large_blocks()\n", "\n"))
    assert full - freed < 50, "in the heap they stay, as a small run wants it"
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    given = huge_pages.exists() and "[never]" not in huge_pages.read_text()
    assert plain()["THP_MEM_ALLOC_ENABLE"] == ("1" if given else None)
    assert run(THP_MEM_ALLOC_ENABLE="0")["THP_MEM_ALLOC_ENABLE"] == "0"


def left_by_prepare(name: str, driver: str = "/proc/driver/nvidia", **environment: str) -> Any:
    """What a variable of the environment is once `prepare` ran, where this would be the folder of a GPU's driver."""
    script = "import json, os; from toolgrpo.support import process_setup as setup; "
    script += f"setup._DRIVER = {driver!r}; setup.prepare(); print(json.dumps(os.environ.get({name!r})))"
    return run(script, **environment)


def test_compiled_code_of_other_instructions_is_not_found_again() -> None:
    folder = functools.partial(left_by_prepare, "TORCHINDUCTOR_CACHE_DIR")
    assert plain()["TORCHINDUCTOR_CACHE_DIR"] == folder()
    restricted = folder(ATEN_CPU_CAPABILITY="avx2")
    assert restricted.endswith("_avx2") and folder(ATEN_CPU_CAPABILITY="default") != restricted
    assert folder(TORCHINDUCTOR_CACHE_DIR="/mine") == "/mine"


def test_torchrun_leaves_no_temporary_folder_and_one_of_the_user_stays(tmp_path: Path) -> None:
    for root, stays in (("torchelastic_x", False), ("my_logs", True)):
        reports = [tmp_path / root / "none_y" / "attempt_0" / str(rank) / "error.json" for rank in range(2)]
        for report in reports:
            report.parent.mkdir(parents=True)
        for report in reports:
            left_by_prepare("", TORCHELASTIC_ERROR_FILE=str(report))
        assert (tmp_path / root).exists() == stays


def test_on_an_nvidia_gpu_the_allocator_takes_segments_that_grow(tmp_path: Path) -> None:
    allocator = functools.partial(left_by_prepare, "PYTORCH_ALLOC_CONF")
    assert allocator(str(tmp_path)) == "expandable_segments:True" and allocator(str(tmp_path / "none")) is None
    assert allocator(str(tmp_path), PYTORCH_ALLOC_CONF="backend:native") == "backend:native"
    # The older name is a choice too.
    assert allocator(str(tmp_path), PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64") is None


ON_WINDOWS = """
import asyncio, ctypes, importlib.metadata, json, logging, multiprocessing, subprocess, sys, tempfile
sys.platform = "win32"
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "termios")))  # there are none
said = []
try:
    import toolgrpo.commands.main
except SystemExit as error:
    said.append(str(error))
try:
    from toolgrpo import ToolGRPOTrainer
except ImportError as error:
    said.append(str(error))
print(json.dumps(said))
"""


def test_on_windows_a_sentence_names_wsl2() -> None:
    """Simulated."""
    said = "toolgrpo runs on Linux and macOS; on Windows, install and start it in WSL2 (wsl --install)"
    assert run(ON_WINDOWS) == [said] * 2


# Runs at the start of each process, workers too: a system without /proc and pidfd whose kernel refuses RLIMIT_AS.
A_MAC = """
import asyncio, builtins, ctypes, importlib.metadata, io, multiprocessing, os, resource, shutil, subprocess, sys, sysconfig
sysconfig.get_config_vars()  # of the libraries above, as they are on this system
sys.platform = "darwin"
del os.pidfd_open
taken = resource.setrlimit

def setrlimit(kind, limits):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    taken(kind, limits)

def without_proc(function):
    def call(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc")
        return function(path, *args, **kwargs)
    return call

resource.setrlimit = setrlimit
builtins.open = io.open = without_proc(open)
os.open, os.listdir, os.scandir = map(without_proc, (os.open, os.listdir, os.scandir))
"""
A_CALL = """
import json, sys
from toolgrpo.tools import load_tools, run_tool
tools = load_tools("tools_funcs/arithmetic_tools.py")
results = [run_tool(tools, json.dumps({"name": "add", "arguments": {"a": 1, "b": b}})) for b in (2, "x")]
print(json.dumps([sys.platform, results[0].content, results[1].error]))
tools.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the other systems are themselves")
def test_tools_run_on_a_mac(tmp_path: Path) -> None:
    """Simulated."""
    (tmp_path / "sitecustomize.py").write_text(A_MAC)
    assert run(A_CALL, PYTHONPATH=str(tmp_path)) == ["darwin", "3", "bad_arguments"]


def test_a_mac_that_refuses_a_limit_of_memory_runs_tools_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: its kernel answers EINVAL. Linux takes the limit, or says why not."""
    of_core, of_memory = None, ValueError("current limit exceeds maximum limit")
    monkeypatch.setattr(resource, "setrlimit", Mock(side_effect=[of_core, of_memory] * 2))
    monkeypatch.setattr(linux, "_LINUX", False)
    linux.limit_memory(512)
    monkeypatch.setattr(linux, "_LINUX", True)
    with pytest.raises(ValueError, match="exceeds"):
        linux.limit_memory(512)


@ON_CPU
@pytest.mark.parametrize("of_malloc", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}])
def test_what_a_user_has_set_is_left_alone(of_malloc: dict[str, str]) -> None:
    found = run(ONEDNN_PRIMITIVE_CACHE_CAPACITY="7", TOKENIZERS_PARALLELISM="true", **of_malloc)
    assert (found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], found["TOKENIZERS_PARALLELISM"]) == ("7", "true")
    _, full, kept, _ = found["rss"]
    assert full - kept > 250, "with settings of one's own for malloc, nothing is kept"
    assert found["THP_MEM_ALLOC_ENABLE"] is None
    assert int(plain()["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
