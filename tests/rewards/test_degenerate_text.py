"""Degenerate text, as a model in a loop writes it, into everything that reads what a model writes.

No reader raises, and none takes a time that grows faster than its text: four times as long a text may take eight times as
long. What is measured is the processor time of this thread, best of several tries, and what takes less than a floor passes, so
that a busy machine decides nothing. A new reader is one line in TEXT_READERS or VALUE_READERS.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from timeit import timeit
from typing import Any, NamedTuple

import pytest

from confined_python.grading import Suite, plan
from confined_python.literals import MOST_HASHED, NotPlainError, decode
from toolgrpo.data.rows import success
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.errors import UserError
from toolgrpo.evaluation.measures import given_answer
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.observe.trackers import as_markdown, episode_rows
from toolgrpo.rewards import get_reward, load_reward
from toolgrpo.rewards.code_exec import program_of
from toolgrpo.rewards.gym import bare_answer
from toolgrpo.rewards.numerals import all_numbers
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.support.plain_text import without_secrets
from toolgrpo.tools.arguments import ArgumentChecker
from toolgrpo.tools.render import cut, render_result
from toolgrpo.tools.toolbox import parse_call

pytestmark = pytest.mark.property

SHORT = 2_000  # and four times that
LONG = 32_500  # four times that: 130,000 characters, what 32,768 tokens hold
MOST_GROWTH = 8.0
FLOOR_S = 0.06
TRIES = 4

UNITS = (
    *("\\boxed{", "\\boxed{1}", "\\boxed ", "\\fbox{", "\\frac{", "\\frac{1}{", "\\frac{1}{2}", "\\frac ", "\\frac12", "\\text{"),
    *("1", "9,", "1,111", "1_000", "1{,}", "1 000", "1\u00a0000", "1/", "/1", "1.", ".", "1e", "e9", "1e999,", "٣", "½", "²"),
    *("$", "$ 1", "USD1", "Rs.", "%", "-", "−", "^{1", "a^1", "*1", "_", "####", "#### 1\n"),
    *("<answer>", "</answer>", "answer: ", "answer  ", "<think>", "</think>", "<tool_call>", '{"name": "'),
    *("```", "```python\n", "```\n", "``` ", "~~~\n", "    ", "\n", "\r", "\t", " ", "\u2028", "\u202e", "\ufeff"),
    *("--token ", "a=", "x://", "?token=", "key: ", "a-", "://@"),
    *("(", "[", "{", ")", "]", "}", "[]", "[1,", '{"a":', '"', "'", '"""', "'''", "\\", '\\"', "\\u", "\\ud800", "#"),
    *("a", "a ", "word", "if x:\n", "x=", "-1*", "not ", "lambda:", "a.", "a,", "f(", "@a\n", "assert f() == 1\n", "f'{"),
    *("\ud800", "\udfff\ud800", "\0", "\x1b[2J", "é", "e\u0301", "\U0001f600"),
)  # fmt: skip
FRAMES = (
    *(("", ""), ("\\boxed{", "}"), ("```python\n", "\n```"), ("```", "\n1\n```"), ("\\boxed{1", ""), ("1", ""), ("", " 1")),
    *(("[", "]"), ('{"a": "', '"}'), ("x = '", "'"), ("x = ", "\n"), ("<answer>", "</answer>"), ("#### ", "")),
)  # fmt: skip
NESTED = (
    *(("(", ")"), ("[", "]"), ("{", "}"), ('{"a":', "}"), ("[[],", "]")),
    *(("\\boxed{", "}"), ("\\frac{", "}{1}"), ("f(", ")")),
)


class Case(NamedTuple):
    """A kind of text or value, made in any size."""

    name: str
    make: Callable[[int], Any]


def _repeated(unit: str, before: str, after: str, n: int) -> str:
    return before + (unit * (n // len(unit) + 1))[: n - len(before) - len(after)] + after


def _nested(opening: str, inside: str, closing: str, n: int) -> str:
    depth = n // (len(opening) + len(closing))
    return opening * depth + inside + closing * depth


def _mixed(seed: int, n: int) -> str:
    rng = random.Random(seed)
    few = rng.sample(UNITS, 5)  # of few kinds, so that they meet
    return "".join(rng.choices(few, k=n))[:n]


def text_cases(frames: tuple[tuple[str, str], ...], mixtures: int) -> Iterator[Case]:
    for unit in UNITS:
        for before, after in frames:
            yield Case(repr((before, unit, after)), partial(_repeated, unit, before, after))
    for opening, closing in NESTED:
        for inside in ("", "1"):
            yield Case(f"nested {opening}{inside}{closing}", partial(_nested, opening, inside, closing))
    for seed in range(mixtures):
        yield Case(f"mixture {seed}", partial(_mixed, seed))


SCHEMA = {
    "type": "object",
    "properties": {
        "i": {"type": "integer", "multipleOf": 7},
        "x": {"type": "number", "multipleOf": 0.1, "maximum": 10},
        "b": {"type": "boolean"},
        "s": {"type": "string", "maxLength": 10},
        "e": {"enum": ["red", "green"]},
        "l": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "d": {"type": "object", "additionalProperties": {"type": "array"}},
        "u": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"type": "array", "items": {}}]},
    },
    "required": ["i"],
}
CHECKER = ArgumentChecker("f", SCHEMA)
REWARDS = Path(__file__).parents[2] / "rewards"


def said(text: str) -> list[dict[str, Any]]:
    tool = {"role": "tool", "name": "f", "content": text}
    return [{"role": "assistant", "content": "", "tool_calls": []}, tool, {"role": "assistant", "content": text}]


def episode(text: str, arguments: dict[str, Any]) -> Trajectory:
    attempts = (
        CallAttempt(AttemptStatus.OK, text, "f", arguments),
        CallAttempt(AttemptStatus.UNKNOWN_TOOL, text, text, {}),
    )
    turn = Turn(start=0, end=0, content=text, reasoning=text, attempts=attempts, results=(ToolResult(text, "f"),))
    turns, messages = (turn, turn), tuple(said(text))
    return Trajectory((1,), (), (), (), messages=messages, turns=turns, stop_reason=StopReason.FINISHED)


def scored(reward: Any, answer: Any, text: str) -> list[float]:
    trajectories = [episode(text, {"a": text})]
    columns = {"prompts": ["?"], "answer": [answer], "trajectories": trajectories, "expected_tools": [["f"]]}
    scores: list[float] = reward(completions=[said(text)], **columns)
    return scores


def graded(row: dict[str, Any], trajectory: Trajectory) -> RolloutBatch:
    return RolloutBatch(episodes=(Scored(row, trajectory),), step=1).graded([Grade({"r": 1.0}, 1.0)], lambda one: True)


def recorded(text: str) -> str:
    return as_markdown(episode_rows(graded({"prompt": text}, episode(text, {"a": text}))))


def planned(text: str) -> None:
    for suite in (Suite((text,)), Suite(("assert f(1)",), setup=text), Suite((text,), entry_point="f")):
        with suppress(UserError):
            plan(suite)


def checked_as_text(text: str) -> None:
    CHECKER.check(dict.fromkeys(SCHEMA["properties"], text))
    CHECKER.check({text: text})


def read_call(text: str) -> None:
    parse_call(text)
    parse_call({"name": "f", "arguments": text})


TEXT_READERS: dict[str, Callable[[str], object]] = {
    "accuracy": partial(scored, get_reward("accuracy"), "1"),
    "exact_match": partial(scored, get_reward("exact_match"), "11"),
    "exact_match of words": partial(scored, get_reward("exact_match"), "word word"),
    "gsm8k": partial(scored, get_reward("gsm8k"), "#### 11"),
    "math": partial(scored, get_reward("math"), "11"),
    "math of text": partial(scored, get_reward("math"), "\\frac{1}{x}"),
    "tool_use": partial(scored, get_reward("tool_use"), "11"),
    "math_reward.py": partial(scored, load_reward(REWARDS / "math_reward.py"), "11"),
    "financial_tools_reward.py": partial(scored, load_reward(REWARDS / "financial_tools_reward.py"), "11"),
    "bare_answer": bare_answer,
    "all_numbers": all_numbers,
    "without_secrets": without_secrets,
    "given_answer": lambda text: given_answer(said(text)),
    "success of arithmetic": lambda text: success(said(text), "11"),
    "rollout_table": recorded,
    "arguments": checked_as_text,
    "parse_call": read_call,
    "render": lambda text: (cut(text, 1000), render_result(text, 1000), render_result({"a": [text]}, 1000)),
    "program_of": program_of,
    "plan": planned,
}


def _deep(around: Callable[[Any], Any], n: int) -> Any:
    value: Any = 1
    for _ in range(n // 4):
        value = around(value)
    return value


ARGUMENT_VALUES = (
    Case("digits", lambda n: 10 ** min(n, 4000)),
    Case("a float that is large", lambda n: 1e308),
    Case("deep lists", partial(_deep, lambda value: [value])),
    Case("deep objects", partial(_deep, lambda value: {"a": value})),
    Case("wide lists", lambda n: list(range(n // 4))),
    Case("wide lists of lists", lambda n: [[k] for k in range(n // 8)]),
    Case("wide objects", lambda n: {str(k): [] for k in range(n // 8)}),
    Case("a text with half a character", lambda n: "\ud800" * n),
)
_SAME_HASH = 2**61 - 1  # integers that differ by it fall into one place of a set
FRAMES_OF_PROGRAMS = (
    Case("integers that collide", lambda n: {"s": [{"i": hex(k * _SAME_HASH)} for k in range(n)]}),
    Case("keys that collide", lambda n: {"d": [[{"i": hex(k * _SAME_HASH)}, None] for k in range(n)]}),
    Case("floats that collide", lambda n: {"s": [{"f": float(k * 2**61).hex()} for k in range(n)]}),
    Case("a long integer", lambda n: {"i": "0x" + "f" * n}),
    Case("a long float", lambda n: {"f": "0x" + "f" * n + "p0"}),
    Case("a long text", lambda n: "\ud800" * n),
    Case("long bytes", lambda n: {"b": "00" * n}),
    Case("bytes with spaces", lambda n: {"b": " " * n}),
    Case("a wide list", lambda n: {"l": [None] * n}),
    Case("wide tags", lambda n: {"x" * n: 1}),
    Case("many tags", lambda n: {str(k): 1 for k in range(n // 8)}),
    Case("deep forms", lambda n: json.loads('{"l":[' * 400 + "1" + "]}" * 400)),
)


def checked(value: Any) -> None:
    CHECKER.check(dict.fromkeys(SCHEMA["properties"], value))
    CHECKER.check({"i": value, "unknown": value})


def decoded(form: Any) -> None:
    with suppress(NotPlainError):
        decode(form, most_hashed=MOST_HASHED)  # as the trainer does, whose time it would take


def written(value: Any) -> None:
    recorder = EpisodeRecorder(Path(os.devnull))
    recorder.batch_done(graded({}, episode("", {"a": value})))
    recorder.close()
    scored(get_reward("tool_use"), "1", "")


VALUE_READERS: dict[str, tuple[Callable[[Any], object], tuple[Case, ...]]] = {
    "arguments": (checked, ARGUMENT_VALUES),
    "parse_call": (lambda value: parse_call({"name": "f", "arguments": value}), ARGUMENT_VALUES),
    "decode": (decoded, FRAMES_OF_PROGRAMS),
    "recorder and tool_use": (written, ARGUMENT_VALUES[:2] + ARGUMENT_VALUES[4:]),
}


def seconds(read: Callable[[Any], object], made: Any) -> float:
    return timeit(lambda: read(made), timer=time.thread_time, number=1)  # without passes of the garbage collector


def what_is_wrong(read: Callable[[Any], object], case: Case, n: int) -> str | None:
    """Why a reader is not linear in this case, or that it raised; None if all is well."""
    try:
        small, large = case.make(n), case.make(4 * n)
        took = seconds(read, large)
        if took <= FLOOR_S:
            return None
        least = seconds(read, small)
        for _ in range(TRIES):
            if took <= max(FLOOR_S, MOST_GROWTH * least):
                return None
            if took > 2.0:
                break
            least, took = min(least, seconds(read, small)), min(took, seconds(read, large))
        return f"{case.name}: {took:.3f} s for {4 * n}, {least:.3f} s for {n}"
    except BaseException as error:
        return f"{case.name}: {type(error).__name__}: {error}"[:200]


def check(read: Callable[[Any], object], cases: Iterator[Case] | tuple[Case, ...], n: int) -> None:
    found = filter(None, (what_is_wrong(read, case, n) for case in cases))
    assert not (first := list(islice(found, 5))), "\n".join(first)


LENGTHS = [pytest.param(SHORT, id="short"), pytest.param(LONG, id="as long as a context", marks=pytest.mark.slow)]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("reader", TEXT_READERS)
def test_text_is_read_in_linear_time_and_without_an_error(reader: str, n: int) -> None:
    check(TEXT_READERS[reader], text_cases(*((FRAMES[:2], 10) if n == SHORT else (FRAMES[2:7], 30))), n)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("reader", VALUE_READERS)
def test_values_are_read_in_linear_time_and_without_an_error(reader: str, n: int) -> None:
    check(*VALUE_READERS[reader], n)
