"""The lock files install without make: what their heads say is what the Makefile does. And one `.venv` holds one lock."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-cuda.lock"])
def test_a_lock_says_how_plain_pip_installs_it(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    pins = [Requirement(line) for line in lines[len(head) :]]
    assert all(re.fullmatch(r"==[^*,]+", str(pin.specifier)) for pin in pins), (
        "every line below the head pins one version"
    )
    commands = [line.removeprefix("#   ") for line in head if line.startswith("#   pip install ")]
    assert commands[-2:] == [f"pip install --no-deps -r {name}", "pip install --no-deps -e ."]
    (torch,) = [pin for pin in pins if pin.name == "torch"]
    makefile = (ROOT / "Makefile").read_text()
    if "+cpu" in str(torch.specifier):
        (index,) = set(re.findall(r"--index-url (\S+)", makefile))
        assert commands[0] == f"""pip install --no-deps --index-url {index} "$(grep '^torch=' {name})\""""
        assert [line for line in lines if line.startswith("torch=")] == [str(torch)]
    else:
        assert len(commands) == 2
    assert not any("==" in line for line in head), "make and .ci/newest count the lines with =="


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
