"""pass@k, maj@k, differences, and the report made of them, against counting by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.tool_calls import AttemptStatus, Call, ToolErrorKind
from toolgrpo.evaluation.measures import Difference, Share, given_answer, majority_at_k, pass_at_k, wilson_interval
from toolgrpo.evaluation.report import Comparison, EpisodeFacts, ModelReport


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(n: int) -> None:
    for good in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * good + [False] * (n - good), k))
            assert pass_at_k(good, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


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
    """`a` to `z`: a vote for that answer, a capital letter if it succeeded; `-`: no answer."""
    votes = [(None if c == "-" else c.lower(), c.isupper()) for c in episodes]
    assert majority_at_k(votes, k) == pytest.approx(value)


def test_answers_are_compared_by_what_they_mean() -> None:
    texts = ("It is 1,234.50 dollars.", r"So \boxed{7} and not 8", "the  Red   one", "")
    answers = [given_answer([{"role": "assistant", "content": said}]) for said in texts]
    assert answers == ["2469/2", "7", "the red one", None]


def test_a_difference_has_newcombes_interval() -> None:
    marks = [(1.0, 1.0)] * 36 + [(0.0, 1.0)] * 12 + [(1.0, 0.0)] * 2  # Newcombe 1998c, method 10
    before, after = (dict(enumerate(values)) for values in zip(*marks, strict=True))
    paired = Difference.paired(before, after)
    apart = Difference(Share(48 / 80, 80), Share(56 / 70, 70))  # Newcombe 1998b, table II (a), method 10
    for difference, interval in ((apart, (0.0524, 0.3339)), (paired, (0.0569, 0.3404))):
        assert difference.value == pytest.approx(0.2) and difference.interval == pytest.approx(interval, abs=1e-4)


def test_what_succeeds_on_the_same_questions_differs_little() -> None:
    same = {question: float(question % 2) for question in range(100)}
    low, high = Difference.paired(same, same).interval
    wide_low, wide_high = Difference(Share(0.5, 100), Share(0.5, 100)).interval
    assert wide_low / 4 < low < 0 < high < wide_high / 4, "narrower by far, and never without a width"
    assert Difference.paired(same, {question: 1 - value for question, value in same.items()}).interval[1] > wide_high
    assert Difference.paired({0: 1.0}, {1: 0.0}).correlation == 0, "no question in common"


def test_wilson_interval_against_published_values() -> None:
    published = {(0, 10): (0.0, 0.2775), (10, 10): (0.7225, 1.0), (81, 263): (0.2553, 0.3662), (0, 0): (0.0, 1.0)}
    for (successes, n), interval in published.items():  # Newcombe 1998
        assert wilson_interval(successes, n) == pytest.approx(interval, abs=1e-4)
    assert str(Share.of([1.0] * 228 + [0.0] * 12)) == "0.950 [0.915, 0.971]"
    assert str(Share.of([])) == "-", "nothing was measured"


def episode(question: int, success: bool, *calls: Call) -> EpisodeFacts:
    return EpisodeFacts(question, float(success), success, str(int(success)), 2, 10, "finished", calls)


ADD = Call(0, "add", {}, AttemptStatus.OK, "", None, 0.5)
BAD = replace(ADD, name="sub", error=ToolErrorKind.TIMEOUT, duration_s=1.5)


def report(name: str, pattern: str) -> ModelReport:
    episodes = [
        episode(question, mark == "+", ADD, *([BAD] if mark == "-" else []))
        for question, marks in enumerate(pattern.split())
        for mark in marks
    ]
    return ModelReport(name, tuple(episodes), samples=4, ks=(1, 4), seconds=3.0)


def printed(comparison: Comparison) -> str:
    console = Console(file=(shown := io.StringIO()), width=160)
    for table in comparison.tables():
        console.print(table)
    return shown.getvalue()


def test_a_report_counts_by_question_and_its_tools() -> None:
    shares = report("m", "++++ +--- ----").shares()
    assert list(shares) == ["pass@1", "pass@4", "maj@4"] and shares["pass@1"].n == 3
    assert [share.value for share in shares.values()] == pytest.approx([5 / 12, 2 / 3, 1 / 3])
    tools = report("m", "++-- ++++").tools()
    assert list(tools) == ["add", "sub"]
    assert tools["add"] == {
        **{"calls": 8, "calls_per_episode": 1.0, "episodes_using_it": 1.0, "failures": 0, "unmarked": 0},
        **{"failures_by_cause": {}, "seconds_p50": 0.5},
    }
    assert (tools["sub"]["failures"], tools["sub"]["failures_by_cause"]) == (2, {"timeout": 2})


def test_names_that_a_model_made_up_are_one_line_at_the_end() -> None:
    made_up = [replace(ADD, name=name, status=AttemptStatus.UNKNOWN_TOOL) for name in ("ad", "addd", "sum")]
    found = replace(report("m", "+"), episodes=(episode(0, True, *made_up, ADD),))
    assert {tool: of["calls"] for tool, of in found.tools().items()} == {"(names of no tool)": 3, "add": 1}
    shown = printed(Comparison("d.jsonl", 1.0, found, None))
    assert shown.index("add") < shown.index("(names of no tool)")


def test_what_the_episodes_met_is_said_with_the_flag_that_helps() -> None:
    def failing(error: ToolErrorKind, *more: EpisodeFacts, **changes: Any) -> list[str]:
        bad = replace(ADD, error=error)
        met = replace(episode(0, False, *[bad] * (2 if more else 1)), **changes)
        return ModelReport("m", (met, *more), samples=1, ks=(1,), seconds=1.0).lines(Path("out"))

    cut = {"stop_reason": "max_turns", "repeats": True, "copies": True}
    ends, calls, repeats, copies = failing(ToolErrorKind.UNMARKED, episode(1, True, ADD), **cut)
    assert ends.startswith("ends      max_turns 1, finished 1 of 2 episodes; --max_turns ")
    assert calls.startswith("calls     2 of 3 failed: unmarked 2; --unmarked_calls accept ")
    assert repeats.startswith("repeats   1 of 2 episodes") and copies.startswith("copies    1 of 2 answers")
    for in_turn, end, flag in (
        (True, "length_of_turn 1", "max_turn_tokens"),
        (False, "length 1", "max_completion_length"),
    ):
        said = failing(ToolErrorKind.UNMARKED, stop_reason="length", cut_in_turn=in_turn)[0]
        assert end in said and f"--{flag} " in said, said
    ends, calls = failing(ToolErrorKind.RAISED)
    assert ends == "ends      finished 1 of 1 episodes" and "toolgrpo show out --cause raised" in calls
    assert failing(ToolErrorKind.DIED)[2].startswith("lost      1 calls")


def test_two_models_side_by_side_as_json_and_as_a_table() -> None:
    comparison = Comparison("d.jsonl", 1.0, report("after", "++++ ++++"), report("before", "---- +---"))
    found = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert (found["questions"], found["samples"]) == (2, 4)
    assert found["model"]["pass@1"]["value"] == 1.0 and found["baseline"]["pass@1"]["value"] == 0.125
    assert found["difference"]["pass@1"]["value"] == pytest.approx(0.875)
    lines = printed(comparison).split("\n")
    for texts in (("before", "after", "difference"), ("pass@1", "+0.875"), ("sub", "0.88 (1.00)", " - ")):
        assert any(all(text in line for text in texts) for line in lines), texts


def test_a_report_tells_tasks_apart_where_rows_name_them() -> None:
    whole = report("m", "++++ +--- ----")
    named = [replace(fact, task="easy" if fact.question == 0 else "hard") for fact in whole.episodes]
    dropped = replace(named[-1], success=None, reward=None, drop=Drop(DropCause.TOOL, "no network"))
    by_task = replace(whole, episodes=(*named[:-1], dropped)).by_task()
    assert list(by_task) == ["easy", "hard"] and whole.by_task() == {}
    assert (by_task["easy"]["pass@1"].value, by_task["easy"]["pass@1"].n) == (1.0, 1)
    assert (by_task["hard"]["pass@1"].value, by_task["hard"]["pass@1"].n) == (pytest.approx(1 / 8), 2)
    assert by_task["hard"]["pass@4"].n == 1, "a question with fewer episodes than k is left out"
    fewer = Comparison("d.jsonl", 1.0, replace(whole, episodes=(*named[8:-1], dropped)))
    assert "pass@4 (0 questions)" in printed(fewer) and fewer.as_json()["model"]["pass@4"]["value"] is None
    apart = replace(whole, episodes=tuple(named))
    comparison = Comparison("d.jsonl", 1.0, apart, apart)
    assert comparison.as_json()["model"]["by_task"]["easy"]["questions"] == 1
    assert "by_task" not in Comparison("d.jsonl", 1.0, whole).as_json()["model"]
    (table,) = [table for table in comparison.tables() if "by task" in str(table.title)]
    assert table.row_count == 2 and len(table.columns) == 4
