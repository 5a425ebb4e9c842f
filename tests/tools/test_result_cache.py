"""The cache of pure tools' answers: what is shared, what stays, and what a long run keeps in memory. In use: test_toolbox.py."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import Future

import pytest

from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools.backends import CacheLookup, ResultCache
from toolgrpo.tools.base import Reply


def ask(cache: ResultCache, number: int, reply: Reply | Exception | None) -> CacheLookup:
    """A call of a tool; None: it is still running."""

    def run() -> Future[Reply]:
        future: Future[Reply] = Future()
        if isinstance(reply, Exception):
            future.set_exception(reply)
        elif reply is not None:
            future.set_result(reply)
        return future

    return cache.get("double", {"n": number}, run)


def test_an_answer_is_asked_for_once_and_a_running_call_is_shared() -> None:
    cache = ResultCache()
    first, second = ask(cache, 1, None), ask(cache, 1, Reply("another"))
    assert (first.hit, second.hit) == (False, True) and first.future is second.future
    first.future.set_result(Reply("2"))
    third = ask(cache, 1, Reply("another"))
    assert third.hit and third.future.result(timeout=0).text == "2"
    assert not ask(cache, 2, Reply("4")).hit


@pytest.mark.parametrize("bad", [Reply("no", ToolErrorKind.RAISED), RuntimeError("gone")])
def test_only_good_answers_stay(bad: Reply | Exception) -> None:
    cache = ResultCache()
    ask(cache, 1, bad)
    again = ask(cache, 1, Reply("2"))
    assert not again.hit and again.future.result(timeout=0).text == "2"
    cancelled = ask(cache, 3, None)
    cancelled.future.cancel()
    assert not ask(cache, 3, Reply("6")).hit


def test_the_least_recently_used_answers_go_first() -> None:
    cache = ResultCache(max_entries=2)
    for number in (1, 2, 1, 3):
        ask(cache, number, Reply(str(number)))
    assert len(cache) == 2
    assert [ask(cache, number, Reply("")).hit for number in (1, 3)] == [True, True]
    assert not ask(cache, 2, Reply("")).hit


def test_long_answers_are_bounded_by_their_text() -> None:
    cache = ResultCache(max_chars=1000)
    for number in range(50):
        ask(cache, number, Reply("x" * 200))
    assert len(cache) == 4
    ask(cache, 50, Reply("x" * 2000))
    assert len(cache) == 0, "one that is longer than all the room is not kept"
    ask(cache, 51, Reply("x" * 200))
    assert ask(cache, 51, Reply("")).hit


def test_an_answer_that_stays_keeps_no_event_loop_alive() -> None:
    """Each rollout has a loop of its own; a run of many steps would keep them all."""
    cache = ResultCache()

    async def waits_for_a_running_call() -> weakref.ref[asyncio.AbstractEventLoop]:
        lookup = ask(cache, 1, None)
        waiting = asyncio.wrap_future(lookup.future)
        lookup.future.set_result(Reply("2"))
        assert (await waiting).text == "2"
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(waits_for_a_running_call())
    gc.collect()
    assert len(cache) == 1 and loop() is None
