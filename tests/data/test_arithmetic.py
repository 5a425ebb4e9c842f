"""The embedded tasks: reproducible, disjoint, right, and judged as documented."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest

from toolgrpo.data.arithmetic import OPERATIONS, arithmetic_rows, success
from toolgrpo.errors import DataError


def _solve(question: str) -> float:
    """An independent reading of the question's words."""
    words = question.rstrip(".?")
    if found := re.fullmatch(r"What is (\d+) (plus|minus|times|divided by) (\d+)", words):
        left, word, right = int(found[1]), found[2], int(found[3])
        return {"plus": left + right, "minus": left - right, "times": left * right, "divided by": left / right}[word]
    first, *rest = words.split(", then ")
    numbers = [int(n) for n in re.findall(r"\d+", first)]
    verb = first.split()[0]
    value: float = {
        "Add": numbers[0] + numbers[1],
        "Subtract": numbers[1] - numbers[0],
        "Multiply": numbers[0] * numbers[1],
        "Divide": numbers[0] / numbers[1],
    }[verb]
    for part in rest:
        n = int(re.findall(r"\d+", part)[0])
        value = {"add": value + n, "subtract": value - n, "multiply": value * n, "divide": value / n}[part.split()[0]]
    return value


def test_every_answer_is_that_of_the_words() -> None:
    for row in arithmetic_rows("train", 400) + arithmetic_rows("heldout", 400):
        assert _solve(row["prompt"][0]["content"]) == int(row["answer"])


def test_rows_are_the_same_for_the_same_seed_and_differ_for_another() -> None:
    assert arithmetic_rows("train", 50, 1) == arithmetic_rows("train", 50, 1)
    assert arithmetic_rows("train", 50, 1) != arithmetic_rows("train", 50, 2)
    assert arithmetic_rows("train", 80, 1)[:50] == arithmetic_rows("train", 50, 1)


def test_train_and_heldout_share_no_problem_in_any_wording() -> None:
    def problems(split: Literal["train", "heldout"]) -> set[tuple[str | int, ...]]:
        return {_key(row["prompt"][0]["content"]) for seed in range(3) for row in arithmetic_rows(split, 500, seed)}

    def _key(question: str) -> tuple[str | int, ...]:
        words = {"plus": "add", "minus": "subtract", "times": "multiply", "divided": "divide"}
        found = [words.get(w, w) for w in re.findall(r"[a-z]+", question.lower())]
        operations = [w for w in found if w in OPERATIONS]
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        if question.startswith("Subtract"):
            numbers[0], numbers[1] = numbers[1], numbers[0]
        return (*operations, *numbers)

    assert not problems("train") & problems("heldout")


def test_an_unknown_split_or_a_negative_size_is_refused() -> None:
    with pytest.raises(DataError, match="train and heldout"):
        arithmetic_rows("test", 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at least 0"):
        arithmetic_rows("train", -1)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "The answer is 7."}], True),
        ([CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "The answer is 8."}], False),
        ([CALL, {"role": "tool", "content": "8"}, {"role": "assistant", "content": "The answer is 7."}], False),
        ([{"role": "assistant", "content": "The answer is 7."}], False),  # right, but guessed
        ([CALL, {"role": "tool", "content": "7"}], False),  # never said
        ([CALL, {"role": "tool", "content": "7"}, CALL], False),
        ([CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": None}], False),
        ([], False),
    ],
)
def test_success_wants_the_tools_and_the_final_word_to_agree(messages: list[dict[str, Any]], expected: bool) -> None:
    assert success(messages, "7") is expected
