"""`recipes/services/`: what each file runs on a machine of its service, noted by stand-ins for the programs there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from toolgrpo.commands.main import launched

pytestmark = pytest.mark.e2e

SERVICES = Path(__file__).parents[2] / "recipes" / "services"
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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return what runs a command line where the stand-ins are, and returns what they noted."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "toolgrpo-env" / "bin").mkdir(parents=True)
    (tmp_path / "toolgrpo-env" / "bin" / "activate").touch()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "NOTES": str(tmp_path / "notes")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_none", "TOOLGRPO": "toolgrpo[cuda]"}

    def run(*words: str, **variables: str) -> str:
        (tmp_path / "notes").write_text("")
        done = subprocess.run(words, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "notes").read_text()

    return run


def is_part(noted: str, rest: str) -> None:
    """Assert that the last noted line starts the second of two machines with eight GPUs, and ends with these words."""
    launch, words = launched(noted.splitlines()[-1].split()[2:])
    given = dict(zip(launch[4::2], launch[5::2], strict=True))
    assert (
        given.pop("--config_file").endswith("/multi_node.yaml") and given.pop("--main_process_port", "29500") == "29500"
    )
    machines = {"--num_machines": "2", "--machine_rank": "1", "--num_processes": "16", "--main_process_ip": "10.0.0.1"}
    assert given == machines and " ".join(words) == rest


def test_every_file_says_that_it_was_not_run() -> None:
    heads = {path.name: path.read_text()[:200] for path in SERVICES.iterdir()}
    assert sorted(heads) == ["hf_jobs.sh", "kubeflow.yaml", "sagemaker.sh", "skypilot.yaml"]
    assert all("Not run on" in head for head in heads.values())


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
    assert fields["image"] == "python:3.12" and fields["flavor"] == "a100-large" and fields["timeout"] == "8h"
    assert fields["volumes"] == "shop:/files" and fields["secrets"].startswith("HF_TOKEN=")
    (tmp_path / "files").mkdir()
    words = [word.replace("/files", str(tmp_path / "files")) for word in sent[sent.index("python:3.12") + 1 :]]
    noted = run(*words).splitlines()
    assert noted[0] == "pip install --quiet --find-links . toolgrpo[cuda]"
    assert noted[1].startswith(
        "toolgrpo train --num_processes 2 --config my shop.yaml --push_to_hub --hub_model_id you/shop"
    )
