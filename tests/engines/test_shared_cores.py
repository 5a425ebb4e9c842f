"""Threads of a training and of an engine in its process: half each while both compute, all for one alone."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import Linear, Module

from toolgrpo.engines.shared_cores import SharedCores


class Engine:
    """A thread with an event loop, and how busy it says it was."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

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


def test_each_has_half_while_both_compute_and_all_alone(engine: Engine) -> None:
    cores = SharedCores(engine.loop, lambda: True, Linear(1, 1))
    cores.engine_alone()
    assert engine.threads == 4
    cores.both()
    assert (torch.get_num_threads(), engine.threads) == (2, 2)
    cores.training_alone()
    assert torch.get_num_threads() == 4


class Watched(Module):
    """Two layers; what the first makes is what the second is given, and `at` hears when one of them is done."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.first, self.second, self.at = Linear(3, 3), Linear(3, 3), at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.first(x)
        middle.register_hook(lambda _: self.at("backward"))
        self.at("forward")
        end: torch.Tensor = self.second(middle)
        return end


def test_a_pass_takes_all_threads_as_soon_as_the_engine_has_nothing_to_do(engine: Engine) -> None:
    """And gives half of them back when it has work again: before each layer, there and back."""
    working = {"now": True}
    threads: list[int] = []

    def change(where: str) -> None:
        threads.append(torch.get_num_threads())
        working["now"] = not working["now"]

    model = Watched(change)
    cores = SharedCores(engine.loop, lambda: working["now"], model)
    cores.both()
    end = model(torch.ones(2, 3, requires_grad=True))  # the engine ends between the layers
    threads.append(torch.get_num_threads())
    end.sum().backward()  # and begins again between those of the way back
    threads.append(torch.get_num_threads())
    assert threads == [2, 4, 4, 2]
    cores.training_alone()
    working["now"] = True
    model(torch.ones(2, 3))
    assert torch.get_num_threads() == 4, "no pass runs beside the engine"


def test_a_pass_in_another_thread_leaves_its_threads_alone(engine: Engine) -> None:
    model = Linear(1, 1)
    cores = SharedCores(engine.loop, lambda: True, model)
    cores.both()

    def other() -> int:
        torch.get_num_threads()
        torch.set_num_threads(3)
        model(torch.ones(1, 1))
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result(20) == 3


def test_a_model_that_is_watched_can_be_copied(engine: Engine) -> None:
    model = Linear(1, 1)
    cores = SharedCores(engine.loop, lambda: True, model)
    cores.both()
    assert torch.equal(copy.deepcopy(model)(torch.ones(1, 1)), model(torch.ones(1, 1)))


def test_one_core_is_one_thread_each(engine: Engine) -> None:
    torch.set_num_threads(1)
    cores = SharedCores(engine.loop, lambda: True, Linear(1, 1))
    cores.both()
    assert (torch.get_num_threads(), engine.threads) == (1, 1)


def test_everything_is_given_back(engine: Engine) -> None:
    sys.setswitchinterval(0.005)
    model = Linear(1, 1)
    cores = SharedCores(engine.loop, lambda: True, model)
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    cores.both()
    cores.give_back()
    assert not model._forward_pre_hooks
    assert torch.get_num_threads() == 4 and sys.getswitchinterval() == pytest.approx(0.005)
