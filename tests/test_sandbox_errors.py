"""Who catches toolgrpo's errors catches what the sandbox raises, although it knows nothing of toolgrpo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from confined_python.grading import Suite
from toolgrpo.errors import InfrastructureError, SandboxError, ToolGRPOError, UserError
from toolgrpo.sandbox import RemoteSandbox, Sandbox


def use_a_closed_one() -> None:
    sandbox = Sandbox(workers=1)
    sandbox.close()
    sandbox.run("1")


@pytest.mark.parametrize(
    ("wrong", "caught"),
    [
        *((use_a_closed_one, kind) for kind in (SandboxError, InfrastructureError, RuntimeError, ToolGRPOError)),
        *((lambda: Sandbox(workers=0), kind) for kind in (UserError, ValueError, ToolGRPOError)),
        (lambda: RemoteSandbox("no address"), UserError),
        (lambda: Suite(()), UserError),
    ],
)
def test_the_tree_is_one(wrong: Callable[[], object], caught: type[Exception]) -> None:
    with pytest.raises(caught):
        wrong()
