"""What a trainer is given as rewards, checked or plain functions, each watched while it runs.

A plain function stays what it is for TRL, which calls it as before: it may give None for a row, and
an async one runs beside the others. Whatever it is, it may drop episodes (unscored.py): TRL sees None
for these, and `noted_drops` who they are. Not covered: reward models, which are not called as
functions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from toolgrpo.errors import RewardError
from toolgrpo.rewards.base import Reward
from toolgrpo.rewards.running import Oversight
from toolgrpo.rewards.unscored import as_trl_takes_them, ask, ask_async
from toolgrpo.rewards.withdrawal import cancelled_by_withdrawal


def watched(rewards: Any, timeout_s: float | None, say: Callable[[str], None]) -> Any:
    """Return the same rewards, with a deadline for each call.

    `say` tells a person of one that runs long.
    """
    if isinstance(rewards, Sequence) and not isinstance(rewards, str):
        return [watched(reward, timeout_s, say) for reward in rewards]
    if getattr(rewards, "is_watched", False):
        return rewards
    if isinstance(rewards, Reward):
        return _named(_checked(replace(rewards, timeout_s=rewards.timeout_s or timeout_s)), rewards.name)
    if not callable(rewards) or hasattr(rewards, "parameters"):  # a model, or its name
        return rewards
    function = rewards
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    oversight = Oversight(f"reward {name}", code.co_filename if code else "", timeout_s, say)
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004
    return _named(_watched_async(rewards, oversight) if is_async else _watched_plain(rewards, oversight), name)


def _named(wrapper: Any, name: str) -> Any:
    wrapper.__name__, wrapper.is_watched = name, True
    return wrapper


def _checked(reward: Reward) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return as_trl_takes_them(reward(**arguments))

    call.__wrapped__ = reward  # type: ignore[attr-defined]
    return call


def _watched_plain(function: Callable[..., Any], oversight: Oversight) -> Callable[..., Any]:
    def once(**arguments: Any) -> Any:
        try:
            return oversight.run(lambda: function(**arguments))
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RewardError(f"{oversight.what} ended with {type(error).__name__}: {error}") from error

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        return as_trl_takes_them(ask(once, arguments, oversight.what))

    return call


def _watched_async(function: Callable[..., Any], oversight: Oversight) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(**arguments: Any) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        if task is not None:
            cancelled_by_withdrawal(functools.partial(loop.call_soon_threadsafe, task.cancel))
        try:
            async with asyncio.timeout(oversight.timeout_s) as deadline:
                return as_trl_takes_them(await ask_async(function, arguments, oversight.what))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            seconds = oversight.timeout_s
            raise RewardError(f"{oversight.what} has not returned within {seconds:g} s (reward_timeout)") from error

    return call
