"""What only the scripted engine does; that it keeps the engine contract is tested in tests/engines/test_engine_contract.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.sampling import sample_in_turn
from toolgrpo.engines.base import FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.errors import EngineError
from toolgrpo.testing import FakeClock, ScriptedEngine, ScriptedReply, scripted_logprob

STOP = 9


def request(max_tokens: int = 8, stop_ids: tuple[int, ...] = (STOP,)) -> SampleRequest:
    return SampleRequest(ids=(1, 2), max_tokens=max_tokens, stop_ids=stop_ids, options=SamplingOptions())


@pytest.mark.parametrize(
    ("reply", "max_tokens", "ids", "finish"),
    [
        ((5, 6, STOP), 8, (5, 6, STOP), FinishReason.STOP),
        ((5, 6), 8, (5, 6, STOP), FinishReason.STOP),  # closed with the first stop token
        ((5, STOP, 6), 8, (5, STOP), FinishReason.STOP),
        ((5, 6, 7), 2, (5, 6), FinishReason.LENGTH),
        ((5, 6), 2, (5, 6), FinishReason.LENGTH),  # no room to close
        ((5, STOP), 2, (5, STOP), FinishReason.STOP),  # the last token allowed is the stop token
        ((5, STOP), 1, (5,), FinishReason.LENGTH),
        ((), 3, (STOP,), FinishReason.STOP),
    ],
)
def test_a_reply_is_cut_as_a_real_engine_would(
    reply: Any, max_tokens: int, ids: tuple[int], finish: FinishReason
) -> None:
    (sample,) = sample_in_turn(ScriptedEngine([reply]), request(max_tokens))
    assert sample == Sample(ids, tuple(scripted_logprob(token) for token in ids), finish)


def test_a_script_that_is_too_short_or_cannot_end_says_so() -> None:
    with pytest.raises(AssertionError, match="the script has 1 replies, but request number 2 came"):
        sample_in_turn(ScriptedEngine([(5,)]), request(), request())
    with pytest.raises(ValueError, match="names none that could be added"):
        sample_in_turn(ScriptedEngine([(5,)]), request(stop_ids=()))


def test_exceptions_in_the_script_are_raised_and_counted() -> None:
    engine = ScriptedEngine([EngineError("gone"), (5,)])

    async def main() -> Sample:
        await engine.open()
        with pytest.raises(EngineError, match="gone"):
            await engine.sample(request())
        return await engine.sample(request())

    assert asyncio.run(main()).ids == (5, STOP)
    assert (engine.failed, engine.answered, engine.open_requests) == (1, 1, 0)


def test_delays_overlap_and_follow_the_loop_clock() -> None:
    clock = FakeClock()
    engine = ScriptedEngine([ScriptedReply((5, 6), delay_s=1.0), (5,)], step_s=2.0)

    async def main() -> list[float]:
        await engine.open()

        async def one() -> float:
            await engine.sample(request())
            return clock()

        return list(await asyncio.gather(one(), one()))

    assert clock.run(main()) == [7.0, 4.0]  # 1 s and three steps; two steps
    assert engine.most_open_requests == 2


def test_a_stalled_request_ends_by_cancellation_or_close() -> None:
    engine = ScriptedEngine(lambda request, number: ScriptedReply((), stalls=True))

    async def main() -> None:
        await engine.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await engine.sample(request())
        assert (engine.cancelled, engine.open_requests) == (1, 0)
        waiting = asyncio.create_task(engine.sample(request()))
        await asyncio.sleep(1)
        await engine.close()
        with pytest.raises(EngineError, match="closed while this request was open"):
            await waiting

    FakeClock().run(main())
    assert (engine.cancelled, engine.failed, engine.open_requests) == (1, 1, 0)


def test_weights_are_walked_to_the_end_and_counted() -> None:
    walked: list[str] = []

    def weights() -> Iterator[tuple[str, Any]]:
        for name in "ab":
            walked.append(name)
            yield name, None

    engine = ScriptedEngine([])
    engine.load_weights(weights())
    assert (walked, engine.weight_loads) == (["a", "b"], 1)


# The clock that tests run on.


# Were the hour below a real one, pytest's own timeout would end the test.
def test_sleeps_and_timeouts_keep_their_order_and_length() -> None:
    clock = FakeClock(start_s=100.0)
    seen: list[tuple[str, float]] = []

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, clock()))

    async def main() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(nap("long", 3600.0))
            group.create_task(nap("short", 0.5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await asyncio.Event().wait()
        return "done"

    assert clock.run(main()) == "done"
    assert seen == [("short", pytest.approx(100.5)), ("long", pytest.approx(3700.0))]
    assert clock() == pytest.approx(3760.0)


def test_threads_still_work_in_real_time() -> None:
    assert FakeClock().run(asyncio.wait_for(asyncio.to_thread(lambda: 7), timeout=None)) == 7


def test_time_can_be_moved_by_hand_but_not_backwards() -> None:
    clock = FakeClock()
    clock.advance(2.5)
    assert clock() == 2.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
