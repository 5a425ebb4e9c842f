"""What a trainer is given as rewards, checked or plain functions, each watched while it runs.

A plain function stays what it is for TRL, which calls it as before: it may give None for a row, and
an async one runs beside the others. Not covered: reward models, which are not called as functions.
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
from toolgrpo.rewards.withdrawal import cancelled_by_withdrawal

__all__ = ["watched"]


def watched(rewards: Any, timeout_s: float | None, say: Callable[[str], None]) -> Any:
    """Return the same rewards, with a deadline for each call.

    `say` tells a person of one that runs long.
    """
    if isinstance(rewards, Sequence) and not isinstance(rewards, str):
        return [watched(reward, timeout_s, say) for reward in rewards]
    if isinstance(rewards, Reward):
        return replace(rewards, timeout_s=rewards.timeout_s or timeout_s)
    if not callable(rewards) or hasattr(rewards, "parameters"):  # a model, or its name
        return rewards
    function = rewards
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    oversight = Oversight(f"reward {name}", code.co_filename if code else "", timeout_s, say)
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004
    wrapper = _watched_async(rewards, oversight) if is_async else _watched_plain(rewards, oversight)
    wrapper.__name__ = name
    return wrapper


def _watched_plain(function: Callable[..., Any], oversight: Oversight) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        try:
            return oversight.run(lambda: function(**arguments))
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RewardError(f"{oversight.what} ended with {type(error).__name__}: {error}") from error

    return call


def _watched_async(function: Callable[..., Any], oversight: Oversight) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(**arguments: Any) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        if task is not None:
            cancelled_by_withdrawal(functools.partial(loop.call_soon_threadsafe, task.cancel))
        try:
            async with asyncio.timeout(oversight.timeout_s) as deadline:
                return await function(**arguments)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            seconds = oversight.timeout_s
            raise RewardError(f"{oversight.what} has not returned within {seconds:g} s (reward_timeout)") from error

    return call
