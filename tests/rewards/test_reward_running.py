"""What a reward does to the process it runs in: it may be slow, hang, exit, or change what others need."""

from __future__ import annotations

import asyncio
import contextvars
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from toolgrpo.errors import ConfigError, PluginError, RewardError
from toolgrpo.rewards import get_reward, load_reward
from toolgrpo.rewards.base import Reward, Score, watched
from toolgrpo.rewards.by_task import ByTask
from toolgrpo.rewards.guard import RewardGuard

COMPLETIONS = [[{"role": "assistant", "content": text}] for text in ("one", "two")]


def call(function: Callable[..., Any], timeout_s: float | None = None, **columns: Any) -> list[Score]:
    reward = Reward(function, name="mine", source="here.py", timeout_s=timeout_s)
    return reward(completions=COMPLETIONS, prompts=["p", "q"], **columns)


def test_one_that_runs_long_is_spoken_of_with_the_line_it_is_at(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\n\ndef reward_func(completions):\n    time.sleep(1.0)\n    return [1.0]\n")
    reward, said = load_reward(path), list[str]()
    RewardGuard("reward slow", str(path), None, said.append, every_s=0.2).run(lambda: reward.function(completions=[]))
    assert len(said) >= 2
    assert "reward slow has been running for" in said[0] and "(line 4)" in said[0]


def test_one_that_is_quick_is_not_spoken_of() -> None:
    said: list[str] = []
    assert RewardGuard("r", "f", None, said.append).run(lambda: 3) == 3 and said == []


def forever(completions: Any) -> list[float]:
    threading.Event().wait()
    return []


async def async_forever(completions: Any) -> list[float]:
    await asyncio.Event().wait()
    return []


async def blocks_its_loop(completions: Any) -> list[float]:
    return forever(completions)


async def async_fine(completions: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [forever, async_forever, blocks_its_loop])
def test_a_timeout_is_an_error_and_the_next_reward_is_served(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"reward mine \(here.py\) has not returned within 0.2 s"):
        call(function, timeout_s=0.2)
    assert call(async_fine, timeout_s=30.0) == [1.0, 1.0]
    assert call(async_fine) == [1.0, 1.0]


def test_with_a_timeout_the_function_has_its_callers_context_and_its_errors_are_the_same() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="none")
    seen: list[Any] = []

    def reward(completions: Any) -> list[float]:
        seen.append((variable.get(), torch.is_grad_enabled(), threading.current_thread()))
        raise KeyError("mine") if len(completions) > 1 else ValueError("alone")

    variable.set("set")
    with torch.no_grad(), pytest.raises(RewardError, match=r"raised KeyError: 'mine'.* at row 0") as caught:
        call(reward, timeout_s=30.0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert seen[0][:2] == ("set", False) and seen[0][2] is not threading.main_thread()


def test_without_a_timeout_it_runs_in_its_callers_thread() -> None:
    def reward(completions: Any) -> list[float]:
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    assert call(reward) == [1.0, 1.0]
    assert call(reward, timeout_s=30.0) == [0.0, 0.0]


def test_a_timeout_holds_for_the_rewards_that_another_calls() -> None:
    inner = Reward(forever, name="inner", source="inner.py")
    outer = Reward(ByTask(lambda name: inner), name="by_task", source="built in", timeout_s=0.2)
    with pytest.raises(RewardError, match=r"by_task .* has not returned"):
        outer(completions=COMPLETIONS, reward=["inner", "inner"])


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_is_a_positive_number(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="reward_timeout must be a positive number"):
        call(forever, timeout_s=timeout_s)


def leaves(completions: Any) -> None:
    os._exit(0)


def leaves_in_a_copy(completions: Any, leave: Callable[[int], Any] = os._exit) -> None:
    sys.exit(0)


def raises_base(completions: Any) -> None:
    raise BaseException("bare")


async def exits_async(completions: Any) -> None:
    sys.exit(0)


async def exits_in_a_task(completions: Any) -> None:
    await asyncio.create_task(exits_async(completions))


def cannot_say_why(completions: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit(0)

    raise Mute


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize(
    ("function", "part"),
    [
        (leaves, r"SystemExit: os._exit\(0\)"),
        (leaves_in_a_copy, "SystemExit: 0"),
        (raises_base, "BaseException: bare"),
        (exits_async, "SystemExit: 0"),
        (exits_in_a_task, "SystemExit: 0"),
        (cannot_say_why, r"Mute: \(its text raises SystemExit\)"),
    ],
)
def test_one_that_exits_is_an_error(function: Callable[..., Any], part: str, timeout_s: float | None) -> None:
    with pytest.raises(RewardError, match=f"reward mine .*raised {part}.* at row 0"):
        call(function, timeout_s)
    assert call(async_fine, timeout_s) == [1.0, 1.0]


def test_ctrl_c_is_the_users() -> None:
    def reward(completions: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(reward)


def test_a_file_that_exits_while_it_is_loaded_cannot_be_used_nor_keep_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text("import os\nos._exit(0)\n")
    with pytest.raises(PluginError, match=r"SystemExit: os._exit\(0\)"):
        load_reward(path)


def test_processes_that_a_reward_forks_may_end_themselves() -> None:
    def reward(completions: Any) -> list[float]:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        return [float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))] * len(completions)

    before = os._exit
    assert call(reward) == [7.0, 7.0]
    assert os._exit is before


class Unshowable:
    def __repr__(self) -> str:
        raise SystemExit(2)


class Unreadable(list[float]):
    def __len__(self) -> int:
        raise BaseException("no length")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([10**400, 0], "returned int 1000.* for row 0"),
        ([0, 10**5000], r"returned int \(its repr raises ValueError\) for row 1"),
        ([Fraction(10**400), 0], "returned Fraction .* for row 0"),
        ([1e39, 0], r"returned float 1e\+39 for row 0.*at most 3.4e\+38"),
        ([Unshowable(), 0], r"returned Unshowable \(its repr raises SystemExit\) for row 0"),
        (Unshowable(), r"returned Unshowable \(its repr raises SystemExit\); it must return a list"),
        (Unreadable(), r"which cannot be read as numbers: BaseException: no length"),
        (torch.zeros(2, 2), "returned list .* for row 0"),
    ],
)
def test_values_that_are_no_reward(values: Any, part: str) -> None:
    with pytest.raises(RewardError, match=part):
        call(lambda completions: values)


def test_what_it_changes_in_torch_is_put_back() -> None:
    def reward(completions: Any) -> list[float]:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return [1.0] * len(completions)

    assert call(reward) == [1.0, 1.0]
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
    with torch.no_grad():
        call(reward)
        assert not torch.is_grad_enabled()


def test_streams_that_it_replaces_are_put_back_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(completions: Any) -> list[float]:
        sys.stdout = None
        sys.stderr = io.StringIO()
        return [1.0] * len(completions)

    said: list[str] = []
    before = sys.stdout, sys.stderr
    for _ in range(2):
        Reward(reward, name="replacing", source="here", say=said.append)(completions=COMPLETIONS)
    assert (sys.stdout, sys.stderr) == before
    assert said == [
        f"reward replacing (here) changed sys.{name}, which is put back each time" for name in ("stdout", "stderr")
    ]


def test_the_folder_and_the_handlers_that_it_changes_are_put_back(tmp_path: Path) -> None:
    changed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD)
    handled = [signal.getsignal(number) for number in changed]

    def reward(completions: Any) -> list[float]:
        os.chdir(tmp_path)
        for number in changed:
            signal.signal(number, lambda *_: None)
        return [1.0] * len(completions)

    said: list[str] = []
    folder = Path.cwd()
    for _ in range(2):
        Reward(reward, name="moving", source="here", say=said.append)(completions=COMPLETIONS)
    assert Path.cwd() == folder
    assert [signal.getsignal(number) for number in changed] == handled
    assert len(said) == len(changed) + 1 and all("which is put back each time" in text for text in said)
    assert any("the working folder" in text for text in said) and any("SIGINT" in text for text in said)


def run(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A program of its own, for what would take ours down."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("deed", ["os.close(1); os.close(2)", "sys.stdout.close(); sys.stderr.close()"])
def test_streams_that_it_closes_work_again(tmp_path: Path, deed: str) -> None:
    done = run(
        f"""
        import os, sys
        from toolgrpo.rewards.base import Reward
        def reward(completions):
            {deed}
            return [1.0]
        assert Reward(reward, name="r", source="f")(completions=[[]]) == [1.0]
        print("out")
        print("err", file=sys.stderr)
        os.write(1, b"again")
        """,
        tmp_path,
    )
    assert done.returncode == 0 and done.stdout == "out\nagain" and "err\n" in done.stderr, done


def test_a_run_whose_reward_exits_with_0_does_not_end_with_0(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("from os import _exit\ndef reward_func(completions): _exit(0)\n")
    done = run(
        f"""
        from toolgrpo.rewards import load_reward
        load_reward({str(tmp_path / "reward.py")!r})(completions=[[]])
        """,
        tmp_path,
    )
    assert done.returncode == 1 and "SystemExit: os._exit(0) (line 2)" in done.stderr, done


def test_one_that_holds_the_interpreter_is_ended_too(tmp_path: Path) -> None:
    """No other thread runs during a native call that never lets go of the interpreter."""
    started = time.monotonic()
    done = run(
        """
        import re
        from toolgrpo.rewards.base import Reward
        def reward(completions):
            re.match("(a+)+$", "a" * 60 + "b")
        Reward(reward, name="r", source=__file__, timeout_s=1.0)(completions=[[]])
        """,
        tmp_path,
    )
    assert done.returncode == 1 and "in reward" in done.stderr, done
    assert time.monotonic() - started < 100


def test_plain_functions_are_watched_as_those_of_files_and_models_are_not() -> None:
    def gives_none(completions: Any, **_: Any) -> list[float | None]:
        return [None] * len(completions)

    def leaves_bare(completions: Any, **_: Any) -> None:
        raise SystemExit(0)

    model = torch.nn.Linear(1, 1)
    rewards = watched([gives_none, forever, leaves_bare, async_forever, model, "name", get_reward("math")], 0.2, print)
    plain, hanging, leaving, waiting, *others = rewards
    assert plain(completions=[1]) == [None] and plain.__name__ == "gives_none"
    with pytest.raises(RewardError, match=r"reward forever .* has not returned"):
        hanging(completions=[1])
    with pytest.raises(RewardError, match=r"reward leaves_bare .* raised SystemExit: 0"):
        leaving(completions=[1])
    with pytest.raises(RewardError, match=r"reward async_forever .* has not returned"):
        waiting(completions=[1])
    assert others[:2] == [model, "name"] and others[2].timeout_s == 0.2
