"""Files that start runs elsewhere. `recipes/services/` and `recipes/slurm/`: what each runs on a machine of its service or of a
cluster, noted by stand-ins for the programs there. `recipes/accelerate/`: accelerate reads each, and the page lists them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from process_tree import wait_for

from toolgrpo.commands.main import launched

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "recipes" / "services"
SKYPILOT = yaml.safe_load((SERVICES / "skypilot.yaml").read_text())
KUBEFLOW = yaml.safe_load((SERVICES / "kubeflow.yaml").read_text())["spec"]["trainer"]
NOTE = 'echo "${0##*/} $*" >> "$NOTES"'
STAND_INS = {
    **dict.fromkeys(("toolgrpo", "pip", "uv"), NOTE),
    "nvidia-smi": "printf 'GPU 0\\nGPU 1\\n'",
    "python3": f'if [ "$1" = -m ]; then {NOTE}; else exec {sys.executable} "$@"; fi',
    # the command line of the service itself reads the flags, and sends nothing
    "hf": f'printf "%s\\0" "$@" > "$NOTES"; {Path(sys.executable).with_name("hf")} "${{@:1:2}}" --dry-run "${{@:3}}" > "$NOTES.understood"',
}
Run = Callable[..., str]


def put(folder: Path, programs: dict[str, str]) -> None:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return what runs a command line where the stand-ins are, and returns what they noted."""
    put(tmp_path, STAND_INS)
    (tmp_path / "toolgrpo-env" / "bin").mkdir(parents=True)
    (tmp_path / "toolgrpo-env" / "bin" / "activate").touch()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "NOTES": str(tmp_path / "notes")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_none", "TOOLGRPO": "toolgrpo[cuda]"}

    def run(*words: str, **variables: str) -> str:
        (tmp_path / "notes").unlink(missing_ok=True)
        done = subprocess.run(words, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "notes").read_text()

    return run


def is_part(noted: str, rest: str) -> None:
    """Assert that the last noted line starts the second of two machines with eight GPUs, and ends with these words."""
    launch, words = launched(noted.splitlines()[-1].split()[2:])
    given = dict(zip(launch[4::2], launch[5::2], strict=True))
    assert given.pop("--config_file").endswith("/multi_node.yaml")
    assert given.pop("--main_process_port", "29500") == "29500"
    machines = {"--num_machines": "2", "--machine_rank": "1", "--num_processes": "16", "--main_process_ip": "10.0.0.1"}
    assert given == machines and " ".join(words) == rest


def test_skypilot(run: Run) -> None:
    assert run("bash", "-c", SKYPILOT["setup"]).endswith("toolgrpo-env/bin/python --find-links . toolgrpo[cuda]\n")
    machine = {"NODE_RANK": "1", "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    variables = SKYPILOT["envs"] | {f"SKYPILOT_{name}": value for name, value in machine.items()}
    is_part(run("bash", "-c", SKYPILOT["run"], **variables), "--config shop.yaml")


def test_kubeflow(run: Run) -> None:
    gpus, first = str(KUBEFLOW["numProcPerNode"]), {"PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29500"}
    machine = {"PET_NNODES": str(KUBEFLOW["numNodes"]), "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": gpus, **first}
    noted = run(*KUBEFLOW["command"], *KUBEFLOW["args"], **machine)
    is_part(noted, "--config shop.yaml --output_dir /outputs/shop --resume_from_checkpoint auto")
    assert KUBEFLOW["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": gpus}


def test_sagemaker(run: Run) -> None:
    machine = {"SM_HOSTS": '["10.0.0.2", "10.0.0.1"]', "SM_CURRENT_HOST": "10.0.0.2", "SM_NUM_GPUS": "8"}
    words = ("bash", str(SERVICES / "sagemaker.sh"), "--config", "shop.yaml")
    noted = run(*words, **machine, SM_NETWORK_INTERFACE_NAME="eth0")
    assert noted.startswith("python3 -m pip install --quiet --find-links . toolgrpo[cuda]\n")
    is_part(noted, "--output_dir /opt/ml/checkpoints --resume_from_checkpoint auto --config shop.yaml")


def test_hugging_face_jobs(run: Run, tmp_path: Path) -> None:
    sent = run("bash", str(SERVICES / "hf_jobs.sh"), "shop", "you/shop", "--config", "my shop.yaml").split("\0")[:-1]
    understood = (tmp_path / "notes.understood").read_text().split("\n")
    fields = {line.split()[0]: line.split()[1] for line in understood if len(line.split()) > 1}
    assert (fields["image"], fields["flavor"], fields["timeout"]) == ("python:3.12", "a100-large", "8h")
    assert fields["volumes"] == "shop:/files" and fields["secrets"].startswith("HF_TOKEN=")
    (tmp_path / "files").mkdir()
    words = [word.replace("/files", str(tmp_path / "files")) for word in sent[sent.index("python:3.12") + 1 :]]
    installs, trains = run(*words).splitlines()[:2]
    assert installs == "pip install --quiet --find-links . toolgrpo[cuda]"
    own = "--num_processes 2 --config my shop.yaml --push_to_hub --hub_model_id you/shop"
    assert trains.startswith(f"toolgrpo train {own}")


# `recipes/slurm/train.sbatch`

SBATCH = ROOT / "recipes" / "slurm" / "train.sbatch"

OF_A_CLUSTER = {
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
""",
}


class Job:
    """The file as Slurm would start it on these nodes."""

    def __init__(self, folder: Path, nodes: str, servers: int, **env: str) -> None:
        put(folder, OF_A_CLUSTER)
        self.notes, self.said = folder / "notes.txt", folder / "said.txt"
        self.notes.touch()
        job = {"JOB_NODELIST": nodes, "JOB_NUM_NODES": nodes.count(",") + 1, "JOB_ID": 7, "CPUS_PER_TASK": 64}
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(self.notes), "SERVERS": str(servers)}
        self.process = subprocess.Popen(
            ["bash", str(SBATCH), "some/model", "--config", "my config.yaml"],
            env={**{f"SLURM_{name}": str(value) for name, value in job.items()}, **own, **env},
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

    def start(nodes: str, servers: int, **env: str) -> Job:
        started.append(Job(tmp_path, nodes, servers, **env))
        return started[-1]

    yield start
    for one in started:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)


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
    own = "--model_name_or_path some/model --config my config.yaml --engine vllm_server"
    urls = "http://c:8000 http://c:8002 http://d:8000 http://d:8002"
    for rank, line in enumerate(training):
        assert f"--num_machines 2 --num_processes 8 --machine_rank {rank} --main_process_ip a " in line
        assert f"{own} --vllm_server_urls {urls}" in line


def test_before_the_time_is_up_it_saves_and_queues_again(job: Callable[..., Job]) -> None:
    run = job("a,b", servers=8, STAYS="1")
    wait_for(lambda: bool(run.lines("trains")))
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.lines("saved") == ["a saved"]
    assert run.lines("scontrol") == ["scontrol requeue 7"]


def test_no_node_left_to_train_is_said(job: Callable[..., Job]) -> None:
    run = job("a,b", servers=0, GENERATE_NODES="2")
    assert run.end() == 2
    assert "at least one has to train" in run.said.read_text()


# `recipes/accelerate/`

LAUNCH_FILES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_a_launch_file_can_be_read_and_says_what_it_is(path: Path) -> None:
    first, second = path.read_text().split("\n")[:2]
    assert first.startswith("# ") and first.endswith(".") and not second.startswith("#")
    config = load_config_from_file(str(path))
    assert config.mixed_precision == ("no" if path.stem.startswith("cpu") else "bf16")
    assert config.use_cpu == path.stem.startswith("cpu")
    assert (config.num_processes > 1) == (path.stem not in ("cpu", "single_gpu"))
    if path.stem.startswith("zero"):
        settings = config.deepspeed_config
        assert settings["zero_stage"] == int(path.stem[4])
        assert (settings["offload_optimizer_device"] == "cpu") == path.stem.endswith("offload")
        assert settings.get("zero3_save_16bit_model") == (True if path.stem[4] == "3" else None)
    if path.stem.startswith("fsdp"):
        settings = config.fsdp_config
        assert settings["fsdp_version"] == 2 and not settings["fsdp_cpu_ram_efficient_loading"]
        assert settings["fsdp_offload_params"] == path.stem.endswith("offload")


def test_the_page_on_scaling_lists_every_file() -> None:
    page = (ROOT / "docs" / "how-to" / "scaling.md").read_text()
    assert [path.name for path in LAUNCH_FILES if f"`{path.name}`" not in page] == []
