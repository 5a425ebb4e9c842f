"""pass@k, maj@k, differences, and the report made of them, against counting by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console

from toolgrpo.episode.tool_calls import AttemptStatus, Call, ToolErrorKind
from toolgrpo.evaluation.measures import (
    Difference,
    Share,
    Vote,
    given_answer,
    majority_at_k,
    pass_at_k,
    wilson_interval,
)
from toolgrpo.evaluation.report import Comparison, EpisodeFacts, ModelReport


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(n: int) -> None:
    for good in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * good + [False] * (n - good), k))
            assert pass_at_k(good, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def votes(text: str) -> list[Vote]:
    """`a` to `z`: a vote for that answer, a capital letter if it succeeded; `-`: no answer."""
    return [(None if c == "-" else c.lower(), c.isupper()) for c in text]


@pytest.mark.parametrize(
    ("episodes", "k", "value"),
    [
        ("AAb", 3, 1.0),  # the majority is right
        ("Abb", 3, 0.0),  # and wrong
        ("Ab", 2, 0.5),  # a tie is worth the mean of the winners
        ("A---", 4, 1.0),  # no answer, no vote
        ("---", 3, 0.0),
        ("AaB", 3, 0.5),  # the same answer once with and once without success (a reward that also looks at tools)
        ("AAbbbA", 3, 0.5),  # two sets of three: AAb is right, bbA wrong
        ("AAbb", 3, 1.0),  # one set of three; what is left over does not count
    ],
)
def test_majority(episodes: str, k: int, value: float) -> None:
    assert majority_at_k(votes(episodes), k) == pytest.approx(value)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("It is 1,234.50 dollars.", "2469/2"),
        (r"So \boxed{7} and not 8", "7"),
        ("the  Red   one", "the red one"),
        ("", None),
    ],
)
def test_answers_are_compared_by_what_they_mean(said: str, answer: str | None) -> None:
    assert given_answer([{"role": "assistant", "content": said}]) == answer


def test_a_difference_has_newcombes_interval() -> None:
    difference = Difference(Share(48 / 80, 80), Share(56 / 70, 70))  # Newcombe 1998b, table II (a), method 10
    assert difference.value == pytest.approx(0.2)
    assert difference.interval == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_a_difference_on_the_same_questions_has_newcombes_interval_for_pairs() -> None:
    marks = [(1.0, 1.0)] * 36 + [(0.0, 1.0)] * 12 + [(1.0, 0.0)] * 2  # Newcombe 1998c, method 10
    before, after = (dict(enumerate(values)) for values in zip(*marks, strict=True))
    difference = Difference.paired(before, after)
    assert difference.value == pytest.approx(0.2)
    assert difference.interval == pytest.approx((0.0569, 0.3404), abs=1e-4)


def test_what_succeeds_on_the_same_questions_differs_little() -> None:
    same = {question: float(question % 2) for question in range(100)}
    low, high = Difference.paired(same, same).interval
    wide_low, wide_high = Difference(Share(0.5, 100), Share(0.5, 100)).interval
    assert wide_low / 4 < low < 0 < high < wide_high / 4, "narrower by far, and never without a width"
    other = {question: 1 - value for question, value in same.items()}
    assert Difference.paired(same, other).interval[1] > wide_high
    assert Difference.paired({0: 1.0}, {1: 0.0}).correlation == 0, "no question in common"


def test_wilson_interval_against_published_values() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, example
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_share_prints_with_its_interval() -> None:
    assert str(Share.of([1.0] * 228 + [0.0] * 12)) == "0.950 [0.915, 0.971]"
    assert str(Share.of([])) == "0.000 [0.000, 1.000]"


def call(tool: str, error: ToolErrorKind | None, duration_s: float) -> Call:
    return Call(0, tool, {}, AttemptStatus.OK, "", error, duration_s)


def episode(question: int, success: bool, *calls: Call) -> EpisodeFacts:
    return EpisodeFacts(question, float(success), success, str(int(success)), 2, 10, "finished", calls)


def report(name: str, pattern: str) -> ModelReport:
    add, bad = call("add", None, 0.5), call("sub", ToolErrorKind.TIMEOUT, 1.5)
    episodes = [
        episode(question, mark == "+", add, *([bad] if mark == "-" else []))
        for question, marks in enumerate(pattern.split())
        for mark in marks
    ]
    return ModelReport(name, tuple(episodes), samples=4, ks=(1, 4), seconds=3.0)


def test_a_report_counts_by_question() -> None:
    shares = report("m", "++++ +--- ----").shares()
    assert list(shares) == ["pass@1", "pass@4", "maj@4"]
    assert (shares["pass@1"].value, shares["pass@1"].n) == (pytest.approx(5 / 12), 3)
    assert (shares["pass@4"].value, shares["maj@4"].value) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


def test_the_tools_of_a_report() -> None:
    tools = report("m", "++-- ++++").tools()
    assert list(tools) == ["add", "sub"]
    assert tools["add"] == {
        **{"calls": 8, "calls_per_episode": 1.0, "episodes_using_it": 1.0, "failures": 0, "unmarked": 0},
        **{"failures_by_cause": {}, "seconds_p50": 0.5},
    }
    assert (tools["sub"]["failures"], tools["sub"]["failures_by_cause"]) == (2, {"timeout": 2})


def test_names_that_a_model_made_up_are_one_line_at_the_end() -> None:
    add = call("add", None, 0.5)
    made_up = [replace(add, name=name, status=AttemptStatus.UNKNOWN_TOOL) for name in ("ad", "addd", "sum")]
    episode = replace(report("m", "+").episodes[0], calls=(*made_up, add))
    found = replace(report("m", "+"), episodes=(episode,))
    assert {tool: of["calls"] for tool, of in found.tools().items()} == {"(names of no tool)": 3, "add": 1}
    shown = io.StringIO()
    for table in Comparison("d.jsonl", 1.0, found, None).tables():
        Console(file=shown, width=100).print(table)
    assert shown.getvalue().index("add") < shown.getvalue().index("(names of no tool)")


def test_what_the_episodes_met_is_said_with_the_flag_that_helps() -> None:
    bad = call("add", ToolErrorKind.UNMARKED, 0.0)
    cut = replace(episode(0, False, bad, bad), stop_reason="max_turns", repeats=True, copies=True)
    found = ModelReport("m", (cut, cut, episode(1, True, call("add", None, 0.5))), samples=1, ks=(1,), seconds=1.0)
    ends, calls, repeats, copies = found.lines(Path("out"))
    assert ends == "ends      max_turns 2, finished 1 of 3 episodes; --max_turns allows more turns"
    assert calls == "calls     4 of 5 failed: unmarked 4; --unmarked_calls accept runs such calls"
    assert repeats.startswith("repeats   2 of 3 episodes") and copies.startswith("copies    2 of 3 answers")
    for in_turn, end in ((True, "length_of_turn 2"), (False, "length 2")):
        short = replace(cut, stop_reason="length", cut_in_turn=in_turn)
        flag = "--max_turn_tokens allows" if in_turn else "--max_completion_length allows"
        said = replace(found, episodes=(short, short)).lines(Path("out"))[0]
        assert end in said and flag in said, said
    raised = replace(found, episodes=(episode(0, False, call("add", ToolErrorKind.RAISED, 0.0)),))
    ends, calls = raised.lines(Path("out"))
    assert ends == "ends      finished 1 of 1 episodes" and calls.endswith("toolgrpo show out --cause raised has them")
    died = replace(found, episodes=(episode(0, False, call("add", ToolErrorKind.DIED, 0.0)),))
    assert died.lines(Path("out"))[2].startswith("lost      1 calls got no result from this machine")


def test_two_models_side_by_side_as_json_and_as_a_table() -> None:
    comparison = Comparison("d.jsonl", 1.0, report("after", "++++ ++++"), report("before", "---- +---"))
    found = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert (found["questions"], found["samples"]) == (2, 4)
    assert found["model"]["pass@1"]["value"] == 1.0 and found["baseline"]["pass@1"]["value"] == 0.125
    assert found["difference"]["pass@1"]["value"] == pytest.approx(0.875)
    shown = io.StringIO()
    for table in comparison.tables():
        Console(file=shown, width=160).print(table)
    lines = shown.getvalue().split("\n")
    assert any("before" in line and "after" in line and "difference" in line for line in lines)
    assert any("pass@1" in line and "+0.875" in line for line in lines)
    assert any("sub" in line and "0.88 (1.00)" in line and " - " in line for line in lines)


def test_a_report_tells_tasks_apart_where_rows_name_them() -> None:
    whole = report("m", "++++ +--- ----")
    named = [replace(fact, task="easy" if fact.question == 0 else "hard") for fact in whole.episodes]
    dropped = replace(named[-1], success=None, reward=None, dropped="tool")
    by_task = replace(whole, episodes=(*named[:-1], dropped)).by_task()
    assert list(by_task) == ["easy", "hard"] and whole.by_task() == {}
    assert (by_task["easy"]["pass@1"].value, by_task["easy"]["pass@1"].n) == (1.0, 1)
    assert (by_task["hard"]["pass@1"].value, by_task["hard"]["pass@1"].n) == (pytest.approx(1 / 8), 2)
    assert by_task["hard"]["pass@4"].n == 1, "a question with fewer episodes than k is left out"
    comparison = Comparison(
        "d.jsonl", 1.0, replace(whole, episodes=tuple(named)), replace(whole, episodes=tuple(named))
    )
    assert comparison.as_json()["model"]["by_task"]["easy"]["questions"] == 1
    assert "by_task" not in Comparison("d.jsonl", 1.0, whole).as_json()["model"]
    (table,) = [table for table in comparison.tables() if "by task" in str(table.title)]
    assert table.row_count == 2 and len(table.columns) == 4
