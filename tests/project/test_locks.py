"""The lock files install without make: what their heads say is what the Makefile does."""

from __future__ import annotations

import re
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
