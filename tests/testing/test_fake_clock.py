import asyncio

import pytest

from toolgrpo.testing import FakeClock


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
