"""Answers that search for the tests earn nothing through the reward."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import Score

SEARCH = (Path(__file__).parents[2] / "confined-python/tests/searching.py").read_text()


def answer(program: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": f"Here it is.\n```python\n{program}\n```"}]


def forged(name: str) -> str:
    """Knows the function's name and nothing else."""
    return f"{SEARCH}\ndef {name}(*args):\n    return solved({name!r}, args)\n"


def mbpp(name: str, factor: int) -> dict[str, Any]:
    return {
        "tests": [f"assert {name}({given}) == {given * factor}" for given in (3, 14, 159)],
        "right": f"def {name}(x):\n    return {factor} * x",
        "wrong": f"def {name}(x):\n    return {factor} + x",
        "name": name,
    }


def humaneval(name: str, factor: int) -> dict[str, Any]:
    asserts = "".join(f"    assert candidate({given}) == {given * factor}\n" for given in (2, 71, 828))
    return {**mbpp(name, factor), "tests": f"def check(candidate):\n{asserts}", "entry_point": name}


@pytest.fixture
def with_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets how many workers the reward has, in a sandbox that it opens for this test."""
    module = import_module("toolgrpo.rewards.code_exec")
    shared = module._SHARED
    monkeypatch.setattr(shared, "_sandbox", None)

    def choose(count: int) -> None:
        monkeypatch.setattr(module, "SHARED_WORKERS", count)
        monkeypatch.setattr(shared, "_workers", count)

    yield choose
    if shared._sandbox is not None:
        shared._sandbox.close()


def scores(rows: list[tuple[dict[str, Any], str]]) -> list[Score]:
    """Of one call of the reward: pairs of a task and an answer's program."""
    return get_reward("code_exec")(
        completions=[answer(program) for _, program in rows],
        tests=[task["tests"] for task, _ in rows],
        entry_point=[task.get("entry_point") for task, _ in rows],
    )


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_reward_pays_no_forged_answer_of_a_group(with_workers: Any, workers: int) -> None:
    """One honest answer that is wrong, one that is right, and six that search for the tests."""
    with_workers(workers)
    for task in (mbpp("scale", 7), humaneval("stretch", 11)):
        group = [task["wrong"], *[forged(task["name"])] * 3, task["right"], *[forged(task["name"])] * 3]
        assert scores([(task, program) for program in group]) == [0.0] * 4 + [1.0] + [0.0] * 3


def test_the_reward_pays_no_forged_answer_of_a_batch(with_workers: Any) -> None:
    with_workers(3)
    tasks = [mbpp("scale", 7), humaneval("stretch", 11), mbpp("widen", 13)]
    batch = [(task, forged(task["name"])) for task in tasks for _ in range(3)]
    assert scores(batch) == [0.0] * 9
    assert scores(batch) == [0.0] * 9, "nor where every test was judged before"
    assert scores([(task, task["right"]) for task in tasks]) == [1.0] * 3
