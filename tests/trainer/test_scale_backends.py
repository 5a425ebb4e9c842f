"""Two real processes over gloo: DDP, FSDP2, ZeRO-2 and ZeRO-3, each launched with its file in recipes/accelerate/.

All runs of a backend share one launch; the last of DDP's is killed and the last of the others' fails, on purpose. FSDP2 on
a CPU needs `tests.support.fsdp`; nothing else is bent. All of ZeRO is slow; a short form of each stage is not.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainings import CREDIT_BY_TURN, STILL
from toolgrpo.engines.vllm_options import vllm_is_for_cpu
from toolgrpo.observe.recorder import episodes_path
from toolgrpo.observe.records import read_episodes

TIMEOUT_S = 500  # for all runs of a backend, on a slow machine
BACKENDS = {
    "cpu_ddp": ("MULTI_CPU", None, None),
    "fsdp2": ("FSDP", None, 2),
    "zero2": ("DEEPSPEED", 2, None),
    "zero3": ("DEEPSPEED", 3, None),
}


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


def launch(
    launcher: Any, out: Path, model: Path, file: str, jobs: dict[str, dict[str, Any]], timeout_s: int = TIMEOUT_S
) -> Launch:
    asked = [{**job, "out": str(out / job.get("out", name)), "model": str(model)} for name, job in jobs.items()]
    return Launch(launcher.run(file, asked, timeout_s), out)


def assert_as_whole(runs: Launch, name: str, *more: str) -> None:
    """A run went on as if nothing had happened to it: results and recording, without clock times, of each process."""

    def episodes(name: str, process: int) -> list[Any]:
        records = read_episodes(episodes_path(runs.out / name, process))
        return [(r["step"], r["metadata"]["episode"], r["row"], r["ids"], r["reward_given"]) for r in records]

    for process in (0, 1):
        whole, found = runs.result("whole", process), runs.result(name, process)
        for key in ("steps", "losses", "grad_norms", "rewards", "weights", "n_episodes", *more):
            assert found[key] == whole[key], key
        assert episodes(name, process) == episodes("whole", process)


SAVING = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
JOBS: dict[str, dict[str, Any]] = {
    "padded": {"config": {"prefix_sharing": "off"}, "wait_for_peer": True},
    "shared": {"config": {"prefix_sharing": "on"}},
    "every_row": {"alike_in": [0, 2], "config": {"skip_dead_rows": "off", "steps_per_generation": 2, "max_steps": 4}},
    "live_rows": {"alike_in": [0, 2], "config": {"steps_per_generation": 2, "max_steps": 4}},
    "segments": {"cuts": True, "alike_in": [0, 2], "config": {"steps_per_generation": 2, "max_steps": 4}},
    "decoded": {"engine": "transformers"},
    "ahead": {"engine": "transformers", "config": {"max_staleness": 1, "max_steps": 4}},
    "whole": {"config": SAVING},
    "stopped": {"config": SAVING, "stop_after": 3},
    "resumed": {"out": "stopped", "config": {**SAVING, "resume_from_checkpoint": "auto"}},
}
OF_GROUP: dict[str, Any] = {"engine": "scripted_of_group", "keep_gradients": True}
SPLIT = {**STILL, "num_generations": 8, "max_steps": 1}  # half of the one group is in each process
GRADIENTS: dict[str, dict[str, Any]] = {
    **{name: {**OF_GROUP, "config": {**STILL, "loss_type": name}} for name in ("dapo", "grpo", "dr_grpo")},
    "seeded": {"engine": "seeded", "keep_gradients": True, "config": STILL},
    "turns": {**OF_GROUP, "config": {**STILL, **CREDIT_BY_TURN}},
    "turns_of_split_groups": {**OF_GROUP, "config": {**SPLIT, **CREDIT_BY_TURN}},
}
DROPPED = {**STILL, "max_dropped_share": 1.0}
DRAWN = {"per_device_train_batch_size": 2, "dynamic_sampling": "backfill"}
DROPPING_JOBS: dict[str, dict[str, Any]] = {
    "dropping": {**OF_GROUP, "drops": True, "config": DROPPED},
    # a group a step: process 0 runs it, and each process trains on a half
    "dropping_drawn": {**OF_GROUP, "drops": True, "config": {**DROPPED, **DRAWN}},
}
VLLM: dict[str, dict[str, Any]] = {"vllm": {"engine": "vllm_colocate", "config": {"vllm_max_model_length": 256}}}
MORE_JOBS = {
    "cpu_ddp": {
        **GRADIENTS,
        **DROPPING_JOBS,
        "refused": {"drops_all_in": 3, "config": {"max_steps": 5}},
        "mended": {"out": "refused", "config": {"max_steps": 5, "resume_from_checkpoint": "auto"}},
        **(VLLM if vllm_is_for_cpu() else {}),
        "slow": {"slow_tool_s": 14.0, "collective_s": 10.0, "config": {"max_steps": 1}},
        "killed": {"config": SAVING, "kill_in": 2, "pause_s": 0.2},
    },
    "fsdp2": {"failing": {"fail_in_process": 1}},
    "zero2": {"failing": {"fail_in_process": 0}},
    "zero3": {"failing": {"fail_in_process": 1}},
}
IN_SHORT = {"zero2": ("decoded",), "zero3": ("padded", "shared", "every_row", "live_rows", "decoded")}


@pytest.fixture(scope="module")
def launches(launcher: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launch]:
    """The launch of each backend, made when it is first asked for."""
    made: dict[str, Launch] = {}

    def get(name: str) -> Launch:
        if name not in made:
            jobs = {**JOBS, **MORE_JOBS.get(name, {})}
            made[name] = launch(launcher, tmp_path_factory.mktemp(name), tiny_model, name, jobs)
        return made[name]

    return get


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in IN_SHORT else ()) for name in BACKENDS])
def backend(request: pytest.FixtureRequest, launches: Callable[[str], Launch]) -> tuple[str, Launch]:
    if request.param in IN_SHORT:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    return request.param, launches(request.param)


pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S + 80)]


def test_it_is_the_backend_that_was_asked_for(backend: tuple[str, Launch]) -> None:
    name, runs = backend
    parts = []
    for process in (0, 1):
        got = runs.result("decoded", process)
        assert (got["kind"], got["zero_stage"], got["fsdp_version"]) == BACKENDS[name] and got["n_processes"] == 2
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


def test_processes_whose_rollouts_run_ahead_take_the_same_steps(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    first, second = runs.result("ahead", 0), runs.result("ahead", 1)
    assert first["steps"] == second["steps"] == 4 and first["losses"] == second["losses"]
    assert first["weights"] == second["weights"] and first["n_episodes"] == 32


def test_no_process_waits_for_another_inside_a_rollout(backend: tuple[str, Launch]) -> None:
    """Process 1's tool answers only when process 0 is through with its rollout: with any collective call inside, never."""
    _, runs = backend
    for process in (0, 1):
        assert len(runs.result("padded", process)["rollout_seconds"]) == 3
        episodes = read_episodes(episodes_path(runs.out / "padded", process))
        assert all(turn["results"][0]["error"] is None for e in episodes for turn in e["turns"] if turn["results"])


def test_a_run_whose_process_was_killed_goes_on_as_if_nothing_had_happened(
    launches: Callable[[str], Launch], launcher: Any, tiny_model: Path
) -> None:
    """SIGKILL to one of two processes, at a random moment; many of them: test_resume_kill.py."""
    runs = launches("cpu_ddp")
    assert runs.done.returncode != 0 and not (runs.out / "killed" / "rank1.json").exists()
    asked = {"out": str(runs.out / "killed"), "model": str(tiny_model)}
    done = launcher.run("cpu_ddp", [{**asked, "config": {**SAVING, "resume_from_checkpoint": "auto"}}])
    assert done.returncode == 0, done.stderr[-4000:]
    assert_as_whole(runs, "killed")


def test_only_one_process_prints(launches: Callable[[str], Launch]) -> None:
    done = launches("cpu_ddp").done
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("engine    ")]
    assert len(said) == len(JOBS) + len(MORE_JOBS["cpu_ddp"]), "one process of each job says what was loaded"


def test_shared_prompts_give_the_losses_and_gradients_of_the_padded_pass(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    padded, shared = runs.result("padded"), runs.result("shared")
    assert max(abs(loss) for loss in padded["losses"]) > 1e-3
    assert shared["losses"] == pytest.approx(padded["losses"], rel=1e-3, abs=1e-6)
    assert shared["grad_norms"] == pytest.approx(padded["grad_norms"], rel=1e-3)


def test_a_process_without_live_rows_keeps_step_with_the_others(backend: tuple[str, Launch]) -> None:
    """The old policy's pass and the training pass, in two steps over one batch each."""
    _, runs = backend
    whole, live = runs.result("every_row"), runs.result("live_rows")
    assert min(whole["skipped"]) == max(whole["skipped"]) == 0 and max(live["skipped"]) >= 0.5
    assert live["losses"] == pytest.approx(whole["losses"], rel=1e-3, abs=1e-6)
    assert live["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-3) and min(live["grad_norms"]) > 0
    assert live["weights"] == pytest.approx(whole["weights"], rel=1e-5)


def test_a_process_with_episodes_of_several_segments_keeps_step_with_the_others(backend: tuple[str, Launch]) -> None:
    _, runs = backend
    whole, cut = runs.result("live_rows"), runs.result("segments")
    assert {len(r.get("segment_starts", ())) for r in read_episodes(episodes_path(runs.out / "segments", 1))} == {2}
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-3, abs=1e-6)
    assert cut["weights"] == pytest.approx(whole["weights"], rel=1e-5)


def test_a_signal_to_one_process_stops_all_after_the_same_step_and_the_run_is_resumed_as_if_it_had_not_stopped(
    backend: tuple[str, Launch],
) -> None:
    _, runs = backend
    log = (runs.out / "stopped" / "steps0.txt").read_text().split()
    assert log == (runs.out / "stopped" / "steps1.txt").read_text().split() == ["1", "2", "3", "4", "5"]
    assert (runs.out / "stopped" / "checkpoint-3").is_dir(), "the step of the signal was saved"
    assert_as_whole(runs, "stopped", "next_random")  # Python's, NumPy's and PyTorch's, of each process
    assert runs.result("whole", 0)["next_random"] != runs.result("whole", 1)["next_random"], "each has its own"


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


@pytest.mark.parametrize("name", [*GRADIENTS, *DROPPING_JOBS])
def test_two_processes_of_four_have_the_gradient_of_one_process_of_eight(
    launches: Callable[[str], Launch], name: str, train_tiny: Any, tiny_model: Path, tmp_path: Path
) -> None:
    job, in_two = (GRADIENTS | DROPPING_JOBS)[name], launches("cpu_ddp")
    n_rows = 2 * job["config"].get("per_device_train_batch_size", 4)
    job = {**job, "config": {**job["config"], "per_device_train_batch_size": n_rows, "use_cpu": True}}
    alone = train_tiny.run(train_tiny.Job(out=str(tmp_path), model=str(tiny_model), **job))
    for key in ("dropped", "drawn", "rewards", "n_episodes"):
        assert alone[key] == in_two.result(name)[key] == in_two.result(name, 1)[key], key
    expected = torch.load(tmp_path / "gradients.pt")
    found = torch.load(in_two.out / name / "gradients.pt")
    assert found.shape == expected.shape and len(expected) == job["config"].get("max_steps", 3)
    most = 1e-5 if name in GRADIENTS else 1e-4  # few rows are left there, which nearly cancel each other
    for mine, other in zip(found, expected, strict=True):
        assert other.norm() > 1e-5
        assert (mine - other).norm() < most * other.norm()


def test_episodes_are_dropped_in_both_processes(launches: Callable[[str], Launch]) -> None:
    """Of rewards and of lost environments; with backfill a group of which nothing is left is replaced."""
    runs = launches("cpu_ddp")
    causes = {cause for log in runs.result("dropping")["dropped"] for cause, number in log.items() if number}
    assert causes == {"dropped/episodes", "dropped/reward", "dropped/no_reward", "dropped/environment_lost"}
    assert max(runs.result("dropping_drawn")["drawn"]) > 1
    in_both = [
        [r.get("drop") for r in read_episodes(episodes_path(runs.out / "dropping", process))] for process in (0, 1)
    ]
    assert all(any(drops) and not all(drops) for drops in in_both)


def test_a_batch_that_one_process_could_not_score_is_refused_by_both_and_the_step_before_saved(
    launches: Callable[[str], Launch],
) -> None:
    runs = launches("cpu_ddp")
    assert (runs.out / "refused" / "checkpoint-3").is_dir()
    assert_as_whole(runs, "refused", "next_random", "refused")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", BACKENDS)
def test_adapters_are_merged_for_the_engine_under_every_backend(
    launcher: Any, file: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Also offloaded to main memory (ZeRO; FSDP2 offloads from accelerators only), and reading a batch twice."""
    offloaded = f"{file}_offload" if file.startswith("zero") else file
    jobs = {
        "lora": {"engine": "transformers", "lora": True, "config": {"num_iterations": 2, "max_steps": 4}},
        "full": {"engine": "transformers", "wait_for_peer": True},
    }
    for used in {file, offloaded}:
        # DeepSpeed compiles its CPU Adam the first time
        runs = launch(launcher, tmp_path / used, tiny_model, used, jobs, timeout_s=700)
        for name in jobs:
            got = runs.result(name)
            assert min(got["grad_norms"]) > 0 and got["weights"] == runs.result(name, 1)["weights"]
            if file in ("fsdp2", "zero3"):  # decoded by a copy: it has the trainer's weights
                assert max(d for d in got["difference"] if d is not None) < 1e-4


@pytest.mark.vllm
@pytest.mark.needs_cpu_vllm
def test_each_process_has_a_vllm_of_its_own(launches: Callable[[str], Launch]) -> None:
    check_vllm(launches("cpu_ddp"))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize("file", ["fsdp2", "zero2", "zero3"])
def test_split_weights_reach_the_vllm_of_each_process(
    launcher: Any, file: str, tiny_model: Path, tmp_path: Path
) -> None:
    check_vllm(launch(launcher, tmp_path, tiny_model, file, VLLM))


def check_vllm(runs: Launch) -> None:
    for process in (0, 1):
        got = runs.result("vllm", process)
        assert got["steps"] == 3 and sum(got["calls"]) > 0 and max(got["turns"]) > 1
        assert max(got["difference"]) < 1e-4, "drawn from the weights that are trained"
    assert runs.result("vllm", 0)["weights"] == runs.result("vllm", 1)["weights"]


def test_a_process_that_fails_ends_the_run_with_its_own_error(launches: Callable[[str], Launch]) -> None:
    """And not with a time-out of the others: gloo would give up after half an hour, long after this test.

    The other process says whose fault it was (`test_failures`), unless the launcher ends it before it can.
    """
    done = launches("fsdp2").done
    assert done.returncode not in (0, None)
    assert "ValueError: the plugin of one process is broken" in done.stderr
    assert not re.search(r"(?i)timed out|TimeoutError", done.stderr)


def test_a_rollout_may_take_longer_than_a_collective_call(launches: Callable[[str], Launch]) -> None:
    runs = launches("cpu_ddp")
    assert max(runs.result("slow", 1)["rollout_seconds"]) > max(10, max(runs.result("slow", 0)["rollout_seconds"]))
    assert runs.result("slow")["weights"] == runs.result("slow", 1)["weights"]


@pytest.mark.parametrize("name", IN_SHORT)
def test_zero_in_short(launcher: Any, name: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    jobs = {**{job: JOBS[job] for job in IN_SHORT[name]}, **MORE_JOBS[name]}
    runs = launch(launcher, tmp_path, tiny_model, name, jobs)
    test_it_is_the_backend_that_was_asked_for((name, runs))
    test_all_processes_train_one_model_on_episodes_of_their_own((name, runs))
    test_a_process_that_fails_ends_the_run_with_its_own_error(lambda _: runs)
    assert "built successfully" not in runs.done.stdout, "DeepSpeed compiles nothing"
    if "shared" in jobs:
        test_shared_prompts_give_the_losses_and_gradients_of_the_padded_pass((name, runs))
        test_a_process_without_live_rows_keeps_step_with_the_others((name, runs))
