"""The embedded tasks: `arithmetic`, questions that need one to three tool calls, and `chains`, which need four, each
on the result of the one before. nano has seen three at most, so before training it almost never solves a chain.

Invariants:

* A split, a size and a seed always give the same rows, on every machine.
* Train and held-out rows, of both tasks, are disjoint by the problem itself (its operations and numbers), not only by its
  wording.
* Every answer is a non-negative integer of at most four digits; divisions have no remainder.

Both are judged by `success` of rows.py: the tools gave the answer, and the final message says it. The built-in `accuracy`
reward looks at the last tool response only.

Not covered: negative numbers, decimals, brackets.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolgrpo.errors import DataError

Operation = Literal["add", "subtract", "multiply", "divide"]
Split = Literal["train", "heldout"]

OPERATIONS: tuple[Operation, ...] = ("add", "subtract", "multiply", "divide")
SPLITS: tuple[Split, ...] = ("train", "heldout")
LARGEST = 9999
N_CALLS = 4  # of a chain

_CALLS_WEIGHTS = {1: 0.40, 2: 0.35, 3: 0.25}
_HELDOUT_ONE_IN = 5
_WORDS: dict[Operation, str] = {"add": "plus", "subtract": "minus", "multiply": "times", "divide": "divided by"}
_COMPUTED = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}
_COMMANDS: dict[Operation, str] = {
    "add": "Add {left} and {right}",
    "subtract": "Subtract {right} from {left}",
    "multiply": "Multiply {left} by {right}",
    "divide": "Divide {left} by {right}",
}
_CONTINUATIONS: dict[Operation, str] = {
    "add": "add {right}",
    "subtract": "subtract {right}",
    "multiply": "multiply by {right}",
    "divide": "divide by {right}",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a problem; `left` is the result of the step before, except in the first."""

    operation: Operation
    left: int
    right: int

    @property
    def result(self) -> int:
        return _COMPUTED[self.operation](self.left, self.right)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question in words, and the calls that answer it."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def split(self) -> Split:
        """Decided by operations and numbers, so that no other wording of a held-out problem is ever trained on."""
        key = f"{self.steps[0].left}" + "".join(f" {step.operation} {step.right}" for step in self.steps)
        return "heldout" if zlib.crc32(key.encode()) % _HELDOUT_ONE_IN == 0 else "train"


def draw_problem(rng: random.Random, n_calls: int) -> Problem:
    """A random problem of `n_calls` operations, of either split."""
    steps: list[Step] = []
    while len(steps) < n_calls:
        operation = rng.choice(OPERATIONS)
        step = _first_step(rng, operation) if not steps else _next_step(rng, operation, steps[-1].result)
        if step is not None:
            steps.append(step)
    return Problem(_wording(rng, steps), tuple(steps))


def arithmetic_rows(split: Split, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """`n` different questions: {"prompt": messages, "answer": text of the number, "n_calls": calls it needs}."""
    rng = random.Random(f"arithmetic {split} {seed}")
    calls, weights = list(_CALLS_WEIGHTS), list(_CALLS_WEIGHTS.values())
    problems = _problems("arithmetic tasks", rng, lambda: rng.choices(calls, weights)[0], split, n)
    return [_row(problem) for problem in problems]


def chain_rows(split: Split, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """`n` different questions of `N_CALLS` calls each, with the calls that answer them for the reward `gold_calls`."""
    problems = _problems("chains", random.Random(f"chains {split} {seed}"), lambda: N_CALLS, split, n)
    return [{**_row(problem), "gold_calls": _calls(problem)} for problem in problems]


def _problems(what: str, rng: random.Random, n_calls: Callable[[], int], split: Split, n: int) -> Iterator[Problem]:
    """The first `n` problems of this split that are drawn, each question once."""
    if split not in SPLITS:
        raise DataError(f"the {what} have the splits {' and '.join(SPLITS)}, got {split!r}")
    if n < 0:
        raise DataError(f"the number of {what} must be at least 0, got {n}")
    found: dict[str, Problem] = {}
    while len(found) < n:
        problem = draw_problem(rng, n_calls())
        if problem.split == split:
            found[problem.question] = problem
    yield from found.values()


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "answer": str(problem.answer),
        "n_calls": len(problem.steps),
    }


def _calls(problem: Problem) -> str:
    calls = [{"name": step.operation, "arguments": {"a": step.left, "b": step.right}} for step in problem.steps]
    return json.dumps(calls)


def _first_step(rng: random.Random, operation: Operation) -> Step:
    if operation == "divide":
        right = rng.randint(2, 12)
        return Step(operation, right * rng.randint(2, 99), right)
    left, right = rng.randint(2, 99), rng.randint(2, 99)
    if operation == "subtract":
        left, right = max(left, right), min(left, right)
    return Step(operation, left, right)


def _next_step(rng: random.Random, operation: Operation, left: int) -> Step | None:
    """A step that goes on from `left`, or None where this operation does not fit it."""
    right = rng.randint(2, 99 if operation in ("add", "subtract") else 9)
    step = Step(operation, left, right)
    exact = operation != "divide" or left % right == 0
    return step if exact and 0 < step.result <= LARGEST else None


def _wording(rng: random.Random, steps: Sequence[Step]) -> str:
    first = steps[0]
    if len(steps) == 1 and rng.random() < 0.5:
        return f"What is {first.left} {_WORDS[first.operation]} {first.right}?"
    sentence = _COMMANDS[first.operation].format(left=first.left, right=first.right)
    for step in steps[1:]:
        sentence += ", then " + _CONTINUATIONS[step.operation].format(right=step.right)
    return sentence + "."
