"""`recipes/slurm/train.sbatch` with stand-ins for srun, scontrol, vllm and accelerate, which note how they were called."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

SBATCH = Path(__file__).parents[2] / "recipes" / "slurm" / "train.sbatch"

STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" ${3//,/ }; else echo "scontrol $*" >> "$NOTES"; fi',
    # each node of --nodelist runs the command, as a task with its place in SLURM_NODEID
    "srun": """
echo "srun cores=$SRUN_CPUS_PER_TASK" >> "$NOTES"
while [[ "$1" == --* ]]; do case "$1" in --nodelist=*) list=${1#*=} ;; esac; shift; done
number=0; tasks=()
trap 'kill -TERM "${tasks[@]}"' TERM
for node in ${list//,/ }; do NODE=$node SLURM_NODEID=$number "$@" & tasks+=($!); number=$((number + 1)); done
code=0; for task in "${tasks[@]}"; do wait "$task" || code=$?; done
for task in "${tasks[@]}"; do wait "$task" 2>/dev/null || code=$?; done; exit $code""",
    "vllm": 'echo "$NODE vllm gpus=$CUDA_VISIBLE_DEVICES dev=$VLLM_SERVER_DEV_MODE $*" >> "$NOTES"; exec sleep 60',
    "accelerate": """
echo "$NODE accelerate $*" >> "$NOTES"
while [ "$(grep -c ' vllm ' "$NOTES")" -lt "$SERVERS" ]; do sleep 0.05; done
if [ -n "$STAYS" ]; then trap 'echo "$NODE saved" >> "$NOTES"; exit 0' TERM; echo "$NODE trains" >> "$NOTES"; sleep 60 & wait; fi
exit "$CODE" """,
}


class Job:
    """The file as Slurm would start it on these nodes."""

    def __init__(
        self, folder: Path, nodes: str, *, servers: int, code: int = 0, stays: bool = False, **env: str
    ) -> None:
        programs = folder / "bin"
        programs.mkdir()
        for name, text in STAND_INS.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (programs / name).chmod(0o755)
        self.notes = folder / "notes.txt"
        self.notes.touch()
        self.said = folder / "said.txt"
        job = {
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_JOB_NUM_NODES": str(nodes.count(",") + 1),
            "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "64",
        }
        own = {"NOTES": str(self.notes), "SERVERS": str(servers), "CODE": str(code), "STAYS": "1" if stays else ""}
        self.process = subprocess.Popen(
            ["bash", str(SBATCH), "some/model", "--config", "my config.yaml"],
            env={"PATH": f"{programs}:{os.environ['PATH']}", **job, **own, **env},
            cwd=folder,
            stderr=self.said.open("w"),
            start_new_session=True,
        )

    def lines(self, word: str) -> list[str]:
        return sorted(line for line in self.notes.read_text().splitlines() if word in line.split(" "))

    def end(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(nodes: str, **options: Any) -> Job:
        started.append(Job(tmp_path, nodes, **options))
        return started[-1]

    yield start
    for one in started:
        try:
            os.killpg(one.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_the_last_nodes_generate_and_the_first_train(job: Callable[..., Job]) -> None:
    run = job("a,b,c,d", servers=4, GENERATE_NODES="2", GPUS="4", TENSOR_PARALLEL="2")
    assert run.end() == 0
    serving = run.lines("vllm")
    assert [line.split()[0] for line in serving] == ["c", "c", "d", "d"]
    assert [line.split()[2] for line in serving] == ["gpus=0,1", "gpus=2,3"] * 2
    assert all("dev=1 serve some/model" in line and "--tensor-parallel-size 2" in line for line in serving)
    assert run.lines("srun") == ["srun cores=64"] * 2
    training = run.lines("accelerate")
    assert [line.split()[0] for line in training] == ["a", "b"]
    for rank, line in enumerate(training):
        assert f"--num_machines 2 --num_processes 8 --machine_rank {rank} --main_process_ip a " in line
        urls = "http://c:8000 http://c:8002 http://d:8000 http://d:8002"
        assert (
            f"--model_name_or_path some/model --config my config.yaml --engine vllm_server --vllm_server_urls {urls}"
            in line
        )


def test_before_the_time_is_up_it_saves_and_queues_again(job: Callable[..., Job]) -> None:
    run = job("a,b", servers=8, stays=True)
    deadline = time.monotonic() + 60
    while not run.lines("trains") and time.monotonic() < deadline:
        time.sleep(0.05)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.lines("saved") == ["a saved"]
    assert run.lines("scontrol") == ["scontrol requeue 7"]


def test_no_node_left_to_train_is_said(job: Callable[..., Job]) -> None:
    run = job("a,b", servers=0, GENERATE_NODES="2")
    assert run.end() == 2
    assert "at least one has to train and one to generate" in run.said.read_text()
