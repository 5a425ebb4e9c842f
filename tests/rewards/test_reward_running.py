"""What a reward may do to a run: be slow, hang, exit, or return what hangs, exits or lies when it is read."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolgrpo.errors import ConfigError, RewardError
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
    RewardGuard("reward slow", str(path), None, said.append, every_s=0.2).ask(
        lambda: reward.function(completions=[]), len
    )
    assert len(said) >= 2
    assert "reward slow has been running for" in said[0] and "(line 4)" in said[0]


def test_one_that_is_quick_is_not_spoken_of() -> None:
    said: list[str] = []
    assert RewardGuard("r", "f", None, said.append).ask(lambda: "abc", len) == 3 and said == []


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
    with pytest.raises(RewardError, match=r"\(here.py\).*0.2"):
        call(function, timeout_s=0.2)
    assert call(async_fine, timeout_s=30.0) == [1.0, 1.0]
    assert call(async_fine) == [1.0, 1.0]


def test_with_a_timeout_the_function_has_its_callers_context_and_its_errors_are_the_same() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="none")
    seen: list[Any] = []

    def reward(completions: Any) -> list[float]:
        seen.append((variable.get(), torch.is_grad_enabled(), threading.current_thread()))
        raise KeyError("mine")

    variable.set("set")
    with torch.no_grad(), pytest.raises(RewardError, match=r"raised KeyError: 'mine'") as caught:
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
    with pytest.raises(RewardError, match="by_task"):
        outer(completions=COMPLETIONS, reward=["inner", "inner"])


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_is_a_positive_number(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="reward_timeout"):
        call(forever, timeout_s=timeout_s)


def leaves(completions: Any) -> None:
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
        (leaves, "SystemExit: 0"),
        (raises_base, "BaseException: bare"),
        (exits_async, "SystemExit: 0"),
        (exits_in_a_task, "SystemExit: 0"),
        (cannot_say_why, r"Mute: \(its text raises SystemExit\)"),
    ],
)
def test_one_that_exits_is_an_error(function: Callable[..., Any], part: str, timeout_s: float | None) -> None:
    with pytest.raises(RewardError, match=f"reward mine .*raised {part}"):
        call(function, timeout_s)
    assert call(async_fine, timeout_s) == [1.0, 1.0]


def test_ctrl_c_is_the_users() -> None:
    def reward(completions: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(reward)


class Unshowable:
    def __repr__(self) -> str:
        raise SystemExit(2)


class Hanging:
    """Hangs wherever it is read: as a number, in a list, in a sentence."""

    def item(self) -> float:
        return forever(None)[0]

    def __repr__(self) -> str:
        return str(forever(None))


class HangingError(Exception):
    def __str__(self) -> str:
        return str(forever(None))


class HangingList(list[Any]):
    def __iter__(self) -> Any:
        return iter(forever(None))

    def __repr__(self) -> str:
        return str(forever(None))


def fails_with_it(completions: Any) -> None:
    raise HangingError


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: Hanging(),
        lambda completions: [Hanging(), 0],
        lambda completions: HangingList([1, 2]),
        fails_with_it,
    ],
)
def test_the_deadline_holds_for_reading_what_it_returned_too(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"\(here.py\).*0.2"):
        call(function, timeout_s=0.2)


class Lying(list[float]):
    def __init__(self, values: list[float], length: int) -> None:
        super().__init__(values)
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 10**12, 2**62])
def test_a_list_is_as_long_as_what_it_holds(length: int, timeout_s: float | None) -> None:
    assert call(lambda completions: Lying([1.0, 2.0], length), timeout_s) == [1.0, 2.0]
    with pytest.raises(RewardError, match="returned 3 rewards for 2 completions"):
        call(lambda completions: Lying([1.0, 2.0, 3.0], length), timeout_s)


class Endless(list[float]):
    def __iter__(self) -> Any:
        return itertools.repeat(1.0)


class Broken(list[float]):
    def __iter__(self) -> Any:
        raise BaseException("no items")


class Odd(float):
    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = float.__hash__


@pytest.mark.parametrize("value", [Odd(0.5), Fraction(1, 2), np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_scores_are_plain_floats(value: Any) -> None:
    assert [type(score) for score in call(lambda completions: [value, True])] == [float, float]
    assert call(lambda completions: (value, 1)) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([10**400, 0], "returned int 1000.* for row 0"),
        ([0, 10**5000], r"returned int \(its repr raises ValueError\) for row 1"),
        ([Fraction(10**400), 0], "returned Fraction .* for row 0"),
        ([1e39, 0], r"returned float 1e\+39 for row 0.*at most 3.4e\+38"),
        ([Unshowable(), 0], r"returned Unshowable \(its repr raises SystemExit\) for row 0"),
        (Unshowable(), r"returned Unshowable \(its repr raises SystemExit\); it must return a list"),
        (Broken(), r"which cannot be read as numbers: BaseException: no items"),
        (Endless([1.0, 1.0]), "returned 100000 rewards for 2 completions"),
        (torch.zeros(2, 2), "returned list .* for row 0"),
    ],
)
def test_values_that_are_no_reward(values: Any, part: str) -> None:
    with pytest.raises(RewardError, match=part):
        call(lambda completions: values)


def run(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A program of its own, for what would take ours down."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)


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
    with pytest.raises(RewardError, match="async_forever"):
        waiting(completions=[1])
    assert others[:2] == [model, "name"] and others[2].timeout_s == 0.2
