"""A sandbox that a process shares: one for all users, replaced once it is lost, closed after its last user."""

from __future__ import annotations

import sys

import psutil
import pytest

from toolgrpo.errors import SandboxError
from toolgrpo.sandbox import Sandbox, SandboxResult
from toolgrpo.sandbox.client.pool import SharedSandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the host that is killed is Linux's")


def product(sandbox: Sandbox) -> SandboxResult:
    return sandbox.run("6 * 7")


def hosts() -> dict[int, psutil.Process]:
    """The sandboxes of this process, by the ids of their hosts."""
    children = psutil.Process().children()
    return {child.pid: child for child in children if "toolgrpo.sandbox" in " ".join(child.cmdline())}


def test_one_that_died_is_replaced_and_the_old_one_is_closed() -> None:
    before = hosts()
    shared = SharedSandbox(workers=1, preload=())
    with shared.lent() as one, shared.lent() as other:
        assert one is other
    assert shared.use(product).value == 42
    with shared.lent() as dead:
        (host,) = (process for pid, process in hosts().items() if pid not in before)
        host.kill()
        host.wait(60)
        assert shared.use(product).value == 42, "another user's run opens a new one"
        with shared.lent() as new:
            assert new is not dead
    with pytest.raises(SandboxError, match="closed"):
        dead.run("1")
    new.close()
    assert hosts().keys() == before.keys()


def test_one_that_cannot_be_replaced_is_an_error_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedSandbox(workers=1, preload=())
    before = hosts()
    assert shared.use(product).value == 42
    for pid, host in hosts().items():
        if pid not in before:
            host.kill()
            host.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")  # nothing can be started on this machine any more
        with pytest.raises(SandboxError):
            shared.use(product)
    assert shared.use(product).value == 42
    with shared.lent() as sandbox:
        sandbox.close()
