"""One sandbox for each rung that this machine holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolgrpo.sandbox import Rung, Sandbox
from toolgrpo.sandbox.ladder import probe


@pytest.fixture(scope="module", params=(Rung.NAMESPACES, Rung.LANDLOCK, Rung.BUBBLEWRAP, Rung.SECCOMP))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    reason = probe(request.param)
    if reason is not None:
        pytest.skip(f"this machine does not hold the rung {request.param.value}: {reason}")
    with Sandbox(rung=request.param, workers=1) as opened:
        yield opened
