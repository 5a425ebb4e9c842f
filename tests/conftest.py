"""What several test files share: a tiny model and its training runs, one real vLLM server, and how hypothesis draws.

It draws the same examples each time and has no deadline for one of them: neither chance nor a busy machine decides what
passes. `--hypothesis-profile=default` draws others.
"""

from __future__ import annotations

import atexit
import gc
import getpass
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from process_tree import ask_for_stacks

# Threads that wait give their core away: spinning, they took three times as long where others use the cores too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here asks the hub but the tests that bring one (support/test_offline.py)
ROOT = Path(__file__).parents[1]
ASK_THE_SERVER = tuple(f"engines/test_{name}.py" for name in ("engine_contract", "scale_servers", "vllm_server"))
SANDBOX = ROOT / "confined-python" / "tests"
TRAIN_TINY = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make what a process inherits the same wherever the tests are started; they get a temporary folder of their own."""
    in_a_worker = hasattr(config, "workerinput")
    if in_a_worker or not config.getoption("numprocesses", None):
        _default_signals()
    if not in_a_worker:
        _temporary_folder()


def _default_signals() -> None:
    """Undo what the starting shell ignores or blocks, as a job in the background or a CI runner does.

    Hang-ups stay ignored for those who start the tests with `nohup`; no test sends one.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores two itself
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _temporary_folder() -> None:
    """Make the folder that all processes of this run take as the temporary one, and remove it at the end.

    What pytest itself keeps of failed tests stays beside it.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="toolgrpo-tests-")
    os.chmod(folder, 0o1777)  # as /tmp: a sandbox gives its processes to another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    atexit.register(_remove, folder, os.getpid())  # after what multiprocessing registers later


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process may run this, too
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError, KeyError):  # pytest leaves its own folder empty where nothing failed
            Path(os.environ["PYTEST_DEBUG_TEMPROOT"], f"pytest-of-{getpass.getuser()}").rmdir()


@pytest.fixture(scope="session")
def tiny_qwen3() -> Any:
    """Makes a random Qwen3 of 0.1M parameters from a seed; its vocabulary of 320 holds no meaning."""
    from toolgrpo.testing.trainers import tiny_qwen3

    return tiny_qwen3


@pytest.fixture(scope="session")
def vllm_server(tiny_qwen3: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A `vllm serve` of `tiny_qwen3(0)` on the CPU, in a process of its own."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from tests.support.vllm_process import VLLMServerProcess

    folder: Path = tmp_path_factory.mktemp("tiny-qwen3")
    tiny_qwen3(0).save_pretrained(folder)
    with VLLMServerProcess(folder, max_model_len=512, ready_timeout_s=900) as server:
        yield server


def load_module(path: Path) -> ModuleType:
    """A file of tests/fixtures as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def train_tiny() -> ModuleType:
    """`tests/fixtures/scale/train_tiny.py`: its `Job` says what is asked for, its `run` does it in this process."""
    return load_module(TRAIN_TINY)


@pytest.fixture(scope="session")
def stand_in_hub() -> ModuleType:
    return load_module(ROOT / "tests" / "fixtures" / "hub" / "stand_in_hub.py")


@pytest.fixture(scope="module")
def tiny_model(tiny_qwen3: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved tiny model."""
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_qwen3(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mini_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a miniature of nano, as its recipe builds it; not to be written into."""
    from recipes.nano.build import build_nano
    from recipes.nano.recipe import MINI

    folder: Path = tmp_path_factory.mktemp("mini") / "model"
    build_nano(MINI, folder)
    return folder


class Launcher:
    """Starts jobs of `train_tiny`, one after the other in the same two processes."""

    def start(self, file: str, jobs: list[dict[str, Any]]) -> subprocess.Popen[str]:
        """With one of the files in recipes/accelerate/."""
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", f"recipes/accelerate/{file}.yaml", "--num_processes", "2"),
            *("--mixed_precision", "no", "--main_process_port", "0", str(TRAIN_TINY), *map(json.dumps, jobs)),
        ]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja there
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, started: subprocess.Popen[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Wait for the end; one that takes too long is ended, with all its processes, and fails with where they were."""
        try:
            stdout, stderr = started.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            ask_for_stacks(started.pid)
            started.terminate()  # it ends its processes, which a SIGKILL would leave behind
            stdout, stderr = started.communicate(timeout=60)
            pytest.fail(f"it had not ended after {timeout_s} s, and was here:\n{stdout[-2000:]}{stderr[-20000:]}")
        return subprocess.CompletedProcess(started.args, started.returncode, stdout, stderr)

    def run(self, file: str, jobs: list[dict[str, Any]], timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(file, jobs), timeout_s)


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    return Launcher()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with whole commands and real engines where several processes share the files, so that they end together.

    Between each two of these stands a file of the sandbox, which waits more than it computes, and leaves a core to them.
    """
    if config.getoption("dist", "no") == "no" and not hasattr(config, "workerinput"):
        return
    long_files = {item.path for item in items if item.get_closest_marker("e2e") or item.get_closest_marker("vllm")}
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in files if SANDBOX in path.parents]
    place: dict[Path, float] = {path: float(number) for number, path in enumerate(p for p in files if p in long_files)}
    place |= {path: 2 * number + 1.5 for number, path in enumerate(waiting)}
    items.sort(key=lambda item: place.get(item.path, float("inf")))


def pytest_collection_finish() -> None:
    """Leave what was imported out of all later collections of garbage, of which each training makes some."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each file whole in one process, and all that ask the real server in the same one: it is started once."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it ships no types

    class ByFileAndServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "vllm_server" if file.endswith(ASK_THE_SERVER) else file

    return ByFileAndServer(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs vLLM's build for CPUs where there is another, or none; before any fixture is made."""
    if item.get_closest_marker("needs_cpu_vllm"):
        from toolgrpo.engines import vllm_options  # it imports torch, which .ci/pythons runs without

        if not vllm_options.vllm_is_for_cpu():
            pytest.skip("vLLM's build for CPUs is not installed")
