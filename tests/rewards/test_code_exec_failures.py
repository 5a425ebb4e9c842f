"""`code_exec` and `reasoning_gym`, and a sandbox that is lost: tried again, then an error; never a score."""

from __future__ import annotations

import sys

import psutil
import pytest

from toolgrpo.data import load_tasks
from toolgrpo.errors import SandboxError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.unscored import Score


def score(program: str) -> Score:
    completion = [{"role": "assistant", "content": f"```python\n{program}\n```"}]
    (value,) = get_reward("code_exec")(completions=[completion], tests=[["assert twice(2) == 4"]])
    return value


def kill_the_sandbox() -> None:
    """As the kernel does it where memory is short."""
    hosts = [child for child in psutil.Process().children() if "toolgrpo.sandbox" in " ".join(child.cmdline())]
    assert hosts
    for host in hosts:
        host.kill()
        host.wait(60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")
def test_a_sandbox_that_is_lost_is_opened_anew_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = "def twice(x): return 2 * x", "def twice(x): return x"
    assert (score(right), score(wrong)) == (1.0, 0.0)
    kill_the_sandbox()
    assert score(right) == 1.0, "opened anew"
    kill_the_sandbox()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")  # nothing can be started on this machine any more
        with pytest.raises(SandboxError):
            score(right)
    assert (score(right), score(wrong)) == (1.0, 0.0), "and when it can, it is"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")
def test_the_sandbox_of_reasoning_gym_is_replaced_too() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    row = load_tasks("reasoning_gym:basic_arithmetic:1:1")[0]

    def mark() -> list[Score]:
        completion = [{"role": "assistant", "content": str(row["answer"])}]
        columns = {name: [row[name]] for name in ("gym_task", "gym_entry")}
        return list(get_reward("reasoning_gym")(completions=[completion], **columns))

    assert mark() == [1.0]
    kill_the_sandbox()
    assert mark() == [1.0], "opened anew"
