"""Threads of a training and of an engine in its process: half each while both compute, all for one alone."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from toolgrpo.engines.shared_cores import SharedCores


class Engine:
    """A thread with an event loop, and how busy it says it was."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.busy_s = 0.0

    @property
    def threads(self) -> int:
        async def ask() -> int:
            return torch.get_num_threads()

        return asyncio.run_coroutine_threadsafe(ask(), self.loop).result(20)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.end()


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before, switch_s = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
    sys.setswitchinterval(switch_s)


class Now:
    s = 0.0

    def __call__(self) -> float:
        return self.s


def test_each_has_half_while_both_compute_and_all_alone(engine: Engine) -> None:
    cores = SharedCores(engine.loop, lambda: engine.busy_s)
    cores.engine_alone()
    assert engine.threads == 4
    cores.both()
    assert (torch.get_num_threads(), engine.threads) == (2, 2)
    cores.training_alone()
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("busy_s", "threads"), [(1.0, 4), (9.0, 2)])
def test_a_pass_keeps_its_threads_where_the_engine_was_mostly_idle(engine: Engine, busy_s: float, threads: int) -> None:
    now = Now()
    cores = SharedCores(engine.loop, lambda: engine.busy_s, clock=now)
    cores.both()
    now.s, engine.busy_s = 10.0, busy_s  # of a pass of ten seconds
    cores.engine_alone()
    now.s, engine.busy_s = 30.0, 30.0  # the wait for the engine counts for nothing
    cores.both()
    assert (torch.get_num_threads(), engine.threads) == (threads, 2)


def test_one_core_is_one_thread_each(engine: Engine) -> None:
    torch.set_num_threads(1)
    cores = SharedCores(engine.loop, lambda: engine.busy_s)
    cores.both()
    assert (torch.get_num_threads(), engine.threads) == (1, 1)


def test_everything_is_given_back(engine: Engine) -> None:
    sys.setswitchinterval(0.005)
    cores = SharedCores(engine.loop, lambda: engine.busy_s)
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    cores.both()
    cores.give_back()
    assert torch.get_num_threads() == 4 and sys.getswitchinterval() == pytest.approx(0.005)
