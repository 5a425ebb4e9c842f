"""One sandbox for each rung that this machine holds, and an interpreter that stands for another system's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from confined_python import Rung, Sandbox
from confined_python.client.host_process import probe


@pytest.fixture(scope="module", params=(Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    reason = probe(request.param)
    if reason is not None:
        pytest.skip(f"this machine does not hold the rung {request.param.value}: {reason}")
    with Sandbox(rung=request.param, workers=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    """A sandbox on the strongest rung that this machine holds."""
    with Sandbox(workers=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def like_macos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has nothing that only Linux has; see like_macos.py."""
    script = tmp_path_factory.mktemp("macos") / "python"
    pretending = Path(__file__).with_name("like_macos.py")
    script.write_text(
        f'#!/bin/sh\nunset PWD  # which the shell itself has set\nexec "{sys.executable}" -I "{pretending}" "$0" "$@"\n'
    )
    script.chmod(0o755)
    return str(script)
