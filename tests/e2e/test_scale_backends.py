"""Two real processes over gloo: DDP, FSDP2, ZeRO-2 and ZeRO-3, each launched with its file in recipes/accelerate/.

All runs of a backend share one launch; the one that fails on purpose is the last of FSDP2's. FSDP2 on a CPU needs `toolgrpo.testing.fsdp`; nothing else is bent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from toolgrpo.engines.vllm_seam import vllm_available
from toolgrpo.observe.recorder import episodes_path, read_episodes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"
TIMEOUT_S = 220
BACKENDS = {
    "cpu_ddp": ("MULTI_CPU", None, None),
    "fsdp2": ("FSDP", None, 2),
    "zero2": ("DEEPSPEED", 2, None),
    "zero3": ("DEEPSPEED", 3, None),
}


@pytest.fixture(scope="module")
def model(tiny_qwen3: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_qwen3(0).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Launch:
    """What one `accelerate launch` of several runs left behind."""

    done: subprocess.CompletedProcess[str]
    out: Path

    def result(self, name: str, process: int = 0) -> dict[str, Any]:
        path = self.out / name / f"rank{process}.json"
        assert path.exists(), self.done.stdout[-4000:] + self.done.stderr[-4000:]
        content: dict[str, Any] = json.loads(path.read_text())
        return content


def launch(out: Path, model: Path, file: str, jobs: dict[str, dict[str, Any]], timeout_s: int = TIMEOUT_S) -> Launch:
    arguments = [
        json.dumps({"out": str(out / job.get("into", name)), "model": str(model), **job_of(job)})
        for name, job in jobs.items()
    ]
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", f"recipes/accelerate/{file}.yaml", "--num_processes", "2"),
        *("--mixed_precision", "no", "--main_process_port", "0", str(SCRIPT), *arguments),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja there
    launcher = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = launcher.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # it ends its processes, which a SIGKILL would leave behind
        stdout, stderr = launcher.communicate(timeout=60)
    done = subprocess.CompletedProcess(command, launcher.returncode, stdout, stderr)
    return Launch(done, out)


def job_of(job: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in job.items() if key != "into"}


SAVING = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
JOBS: dict[str, dict[str, Any]] = {
    "padded": {"config": {"prefix_sharing": "off"}},
    "shared": {"config": {"prefix_sharing": "on"}},
    "decoded": {"engine": "transformers"},
    "whole": {"config": SAVING},
    "stopped": {"config": SAVING, "stop_after": 3},
    "resumed": {"into": "stopped", "config": {**SAVING, "resume_from_checkpoint": "auto"}},
}


STILL = {"learning_rate": 1e-12, "max_grad_norm": 0.0}  # every step has the gradient of the first weights
GRADIENTS: dict[str, dict[str, Any]] = {
    loss_type: {"engine": "scripted_of_group", "keep_gradients": True, "config": {**STILL, "loss_type": loss_type}}
    for loss_type in ("dapo", "grpo", "dr_grpo")
}
VLLM: dict[str, dict[str, Any]] = {"vllm": {"engine": "vllm_colocate", "config": {"vllm_max_model_length": 256}}}
MORE_JOBS = {
    "cpu_ddp": {**GRADIENTS, **(VLLM if vllm_available() else {})},
    "fsdp2": {"failing": {"fail_in_process": 1}},
}


@pytest.fixture(scope="module")
def launches(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launch]:
    """The launch of each backend, made when it is first asked for."""
    made: dict[str, Launch] = {}

    def get(name: str) -> Launch:
        if name not in made:
            made[name] = launch(tmp_path_factory.mktemp(name), model, name, {**JOBS, **MORE_JOBS.get(name, {})})
        return made[name]

    return get


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, launches: Callable[[str], Launch]) -> tuple[str, Launch]:
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    runs = launches(request.param)
    if request.param != "fsdp2":  # there the last run fails on purpose
        assert runs.done.returncode == 0, runs.done.stdout[-4000:] + runs.done.stderr[-4000:]
    return request.param, runs


pytestmark = pytest.mark.timeout(TIMEOUT_S + 80)


def test_it_is_the_backend_that_was_asked_for(backend: tuple[str, Launch]) -> None:
    name, runs = backend
    kind, zero_stage, fsdp_version = BACKENDS[name]
    parts = []
    for process in (0, 1):
        got = runs.result("padded", process)
        assert (got["kind"], got["zero_stage"], got["fsdp_version"], got["n_processes"]) == (
            kind,
            zero_stage,
            fsdp_version,
            2,
        )
        parts.append(got["local_parameters"])
    whole = 94_656
    assert parts == ([whole / 2] * 2 if name in ("fsdp2", "zero3") else [whole] * 2), "what each process holds"


def test_all_processes_train_one_model_on_episodes_of_their_own(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    first, second = runs.result("decoded", 0), runs.result("decoded", 1)
    assert first["weights"] == second["weights"] and first["losses"] == second["losses"]
    assert min(first["grad_norms"]) > 0
    assert first["n_episodes"] == second["n_episodes"] == 24
    numbers = []
    for process in (0, 1):
        episodes = read_episodes(episodes_path(runs.out / "decoded", process))
        assert any(len(episode["turns"]) > 1 for episode in episodes), "several turns"
        results = [r for e in episodes for turn in e["turns"] for r in turn["results"]]
        assert results and all(r["error"] is None for r in results), "the tool ran, in each process"
        numbers += [episode["metadata"]["episode"] for episode in episodes]
    assert sorted(numbers) == list(range(24))


def test_only_one_process_prints(launches: Callable[[str], Launch]) -> None:
    done = launches("cpu_ddp").done
    assert done.stdout.count("'train_runtime'") == len(JOBS) + len(MORE_JOBS["cpu_ddp"])


def test_shared_prompts_give_the_losses_and_gradients_of_the_padded_pass(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    padded, shared = runs.result("padded"), runs.result("shared")
    assert max(abs(loss) for loss in padded["losses"]) > 1e-3
    assert shared["losses"] == pytest.approx(padded["losses"], rel=1e-3, abs=1e-6)
    assert shared["grad_norms"] == pytest.approx(padded["grad_norms"], rel=1e-3)


def test_a_signal_to_one_process_stops_all_after_the_same_step(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    log = (runs.out / "stopped" / "steps0.txt").read_text().split()
    assert log == (runs.out / "stopped" / "steps1.txt").read_text().split() == ["1", "2", "3", "4", "5"]
    assert (runs.out / "stopped" / "checkpoint-3").is_dir(), "the step of the signal was saved"


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    for process in (0, 1):
        whole, resumed = runs.result("whole", process), runs.result("stopped", process)
        assert resumed["steps"] == 5 and resumed["losses"] == whole["losses"]
        assert resumed["weights"] == whole["weights"] and resumed["n_episodes"] == whole["n_episodes"]

        def log(name: str, process: int = process) -> list[Any]:
            records = read_episodes(episodes_path(runs.out / name, process))
            return [(r["step"], r["metadata"]["episode"], r["row"], r["ids"], r["reward_given"]) for r in records]

        assert log("stopped") == log("whole")


def test_what_it_saves_is_a_plain_model(backend: tuple[str, Launch]) -> None:
    from transformers import AutoModelForCausalLM

    _, runs = backend
    model = AutoModelForCausalLM.from_pretrained(runs.out / "whole" / "checkpoint-5")
    found = {name: p.detach().double().abs().sum().item() for name, p in model.named_parameters()}
    assert found == pytest.approx(runs.result("whole")["weights"], rel=1e-6)


def test_every_backend_has_the_losses_of_ddp(backend: tuple[str, Launch], launches: Callable[[str], Launch]) -> None:
    _, runs = backend
    ddp = launches("cpu_ddp").result("padded")
    assert runs.result("padded")["losses"] == pytest.approx(ddp["losses"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_two_processes_of_four_have_the_gradient_of_one_process_of_eight(
    launches: Callable[[str], Launch], loss_type: str, model: Path, tmp_path: Path
) -> None:
    one = launch_one(
        tmp_path,
        model,
        {**GRADIENTS[loss_type], "config": {**GRADIENTS[loss_type]["config"], "per_device_train_batch_size": 8}},
    )
    expected = torch.load(one / "gradients.pt")
    found = torch.load(launches("cpu_ddp").out / loss_type / "gradients.pt")
    assert found.shape == expected.shape and len(expected) == 3
    for mine, other in zip(found, expected, strict=True):
        assert other.norm() > 1e-5
        assert (mine - other).norm() < 1e-5 * other.norm()


def launch_one(out: Path, model: Path, job: dict[str, Any]) -> Path:
    """The same job in this process; its output folder."""
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    job["config"] = {**job["config"], "use_cpu": True}
    module.run(module.Job(out=str(out), model=str(model), **job))
    return out


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", BACKENDS)
def test_adapters_are_merged_for_the_engine_under_every_backend(file: str, model: Path, tmp_path: Path) -> None:
    """Also offloaded to main memory (ZeRO; FSDP2 offloads from accelerators only), and reading a batch twice."""
    offloaded = f"{file}_offload" if file.startswith("zero") else file
    jobs = {
        "lora": {"engine": "transformers", "lora": True, "config": {"num_iterations": 2, "max_steps": 4}},
        "full": {"engine": "transformers"},
    }
    for used in {file, offloaded}:
        runs = launch(
            tmp_path / used, model, used, jobs, timeout_s=700
        )  # DeepSpeed compiles its CPU Adam the first time
        for name in jobs:
            got = runs.result(name)
            assert min(got["grad_norms"]) > 0 and got["weights"] == runs.result(name, 1)["weights"]
            if file in ("fsdp2", "zero3"):  # decoded by a copy: it has the trainer's weights
                assert max(d for d in got["difference"] if d is not None) < 1e-4


@pytest.mark.vllm
@pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")
def test_each_process_has_a_vllm_of_its_own(launches: Callable[[str], Launch]) -> None:
    check_vllm(launches("cpu_ddp"))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")
@pytest.mark.parametrize("file", ["fsdp2", "zero2", "zero3"])
def test_split_weights_reach_the_vllm_of_each_process(file: str, model: Path, tmp_path: Path) -> None:
    check_vllm(launch(tmp_path, model, file, VLLM))


def check_vllm(runs: Launch) -> None:
    for process in (0, 1):
        got = runs.result("vllm", process)
        assert got["steps"] == 3 and sum(got["calls"]) > 0 and max(got["turns"]) > 1
        assert max(got["difference"]) < 1e-4, "drawn from the weights that are trained"
    assert runs.result("vllm", 0)["weights"] == runs.result("vllm", 1)["weights"]


def test_a_process_that_fails_ends_the_run_with_its_own_error(launches: Callable[[str], Launch]) -> None:
    done = launches("fsdp2").done
    assert done.returncode != 0
    assert "the plugin of one process is broken" in done.stderr
    assert "PeerError: process 1 failed first" in done.stderr, "the other process says whose fault it is"
