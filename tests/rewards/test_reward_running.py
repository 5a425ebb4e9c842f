"""What a reward may do to a run: be slow, hang, exit, or return what hangs, exits or lies when it is read."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import subprocess
import sys
import threading
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


def test_one_that_runs_long_is_spoken_of_with_the_line_it_is_at_and_a_quick_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("def reward_func(completions):\n    completions.wait()\n    return [1.0]\n")
    reward, said, spoken_twice = load_reward(path), list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            spoken_twice.set()

    guard = RewardGuard("reward slow", str(path), None, say, every_s=0.1)
    assert guard.ask(lambda: reward.function(completions=spoken_twice), len) == 1
    assert "reward slow has been running for" in said[0] and "(line 2)" in said[0]
    said.clear()
    assert RewardGuard("r", "f", None, say).ask(lambda: "abc", len) == 3 and said == []


def forever(completions: Any) -> Any:
    threading.Event().wait()


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
    seen: list[tuple[str, bool]] = []

    def reward(completions: Any) -> list[float]:
        seen.append((variable.get(), torch.is_grad_enabled()))
        raise KeyError("mine")

    variable.set("set")
    with torch.no_grad(), pytest.raises(RewardError, match=r"raised KeyError: 'mine'") as caught:
        call(reward, timeout_s=30.0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert seen == [("set", False)]


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


def exits(completions: Any) -> Any:
    sys.exit(0)


def raising(error: Any) -> Callable[..., Any]:
    def reward(completions: Any) -> Any:
        raise error

    return reward


def kind(name: str, *bases: type, **methods: Any) -> Any:
    """A class with these methods."""
    return type(name, bases, methods)


Mute = kind("Mute", Exception, __str__=exits)
Unshowable = kind("Unshowable", __repr__=exits)
Hanging = kind("Hanging", item=forever, __repr__=forever)
HangingList = kind("HangingList", list, __iter__=forever, __repr__=forever)
HangingError = kind("HangingError", Exception, __str__=forever)
Endless = kind("Endless", list, __iter__=lambda self: itertools.repeat(1.0))
Broken = kind("Broken", list, __iter__=raising(BaseException("no items")))
Odd = kind("Odd", float, __eq__=lambda self, other: 1 / 0, __hash__=float.__hash__)


async def exits_async(completions: Any) -> None:
    sys.exit(0)


async def exits_in_a_task(completions: Any) -> None:
    await asyncio.create_task(exits_async(completions))


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize(
    ("function", "part"),
    [
        (exits, "SystemExit: 0"),
        (raising(BaseException("bare")), "BaseException: bare"),
        (exits_async, "SystemExit: 0"),
        (exits_in_a_task, "SystemExit: 0"),
        (raising(Mute), r"Mute: \(its text raises SystemExit\)"),
    ],
)
def test_one_that_exits_is_an_error(function: Callable[..., Any], part: str, timeout_s: float | None) -> None:
    with pytest.raises(RewardError, match=f"reward mine .*raised {part}"):
        call(function, timeout_s)
    assert call(async_fine, timeout_s) == [1.0, 1.0]


def test_ctrl_c_is_the_users() -> None:
    with pytest.raises(KeyboardInterrupt):
        call(raising(KeyboardInterrupt))


@pytest.mark.parametrize(
    "function", [lambda _: Hanging(), lambda _: [Hanging(), 0], lambda _: HangingList([1, 2]), raising(HangingError)]
)
def test_the_deadline_holds_for_reading_what_it_returned_too(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"\(here.py\).*0.2"):
        call(lambda completions: function(completions), timeout_s=0.2)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10**12, 2**62])
def test_a_list_is_as_long_as_what_it_holds(length: int) -> None:
    lying = kind("Lying", list, __len__=lambda self: length)
    assert call(lambda completions: lying([1.0, 2.0])) == [1.0, 2.0]
    with pytest.raises(RewardError, match="returned 3 rewards for 2 completions"):
        call(lambda completions: lying([1.0, 2.0, 3.0]))


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


def test_one_that_holds_the_interpreter_is_ended_too(tmp_path: Path) -> None:
    """No other thread runs during a native call that never lets go of the interpreter; it would take our process down."""
    path = tmp_path / "program.py"
    path.write_text(
        "import re\nfrom toolgrpo.rewards.base import Reward\ndef reward(completions):\n"
        "    re.match('(a+)+$', 'a' * 60 + 'b')\n"
        "Reward(reward, name='r', source=__file__, timeout_s=1.0)(completions=[[]])\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "in reward" in done.stderr, done


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
