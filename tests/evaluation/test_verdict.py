"""Whether a model is worse than its baseline: planted comparisons, tools that get worse, and how many questions decide."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from toolgrpo.episode.tool_calls import AttemptStatus, Call
from toolgrpo.evaluation.measures import Difference, Share
from toolgrpo.evaluation.report import Comparison, EpisodeFacts, ModelReport
from toolgrpo.evaluation.verdict import Verdict

TOOLS = [f"tool_{number}" for number in range(8)]
Chance = Callable[[int, float], float]  # of a question, from its number and how easy it is


def report(rng: random.Random, ease: Sequence[float], chance: Chance, samples: int, named: bool) -> ModelReport:
    """Episodes of a policy that succeeds with this chance. Each question wants one of `TOOLS`."""
    episodes = []
    for question, easy in enumerate(ease):
        tool = TOOLS[question % len(TOOLS)]
        for _ in range(samples):
            success = rng.random() < chance(question, easy)
            call = Call(0, tool if rng.random() < 0.9 else rng.choice(TOOLS), {}, AttemptStatus.OK, "", None)
            played = (question, float(success), success, None, 2, 10, "finished", (call,))
            episodes.append(EpisodeFacts(*played, tools=(tool,) if named else ()))
    return ModelReport("m", tuple(episodes), samples, (1,), 0.0)


def equal(_: int, easy: float) -> float:
    return easy


def verdicts(chance: Chance, n: int = 40, questions: int = 100, samples: int = 4, named: bool = True) -> list[Verdict]:
    """Of so many comparisons of a policy with one that succeeds as often as its questions are easy."""
    found = []
    for seed in range(n):
        rng = random.Random(seed)
        ease = [rng.betavariate(1.0, 1.0) for _ in range(questions)]
        same, other = (report(rng, ease, one, samples, named) for one in (equal, chance))
        found.append(Comparison("d", 1.0, other, same).verdict)
    return [one for one in found if one is not None]


@pytest.mark.parametrize("samples", [1, 4])
def test_equal_policies_raise_at_most_one_false_alarm_in_twenty(samples: int) -> None:
    found = verdicts(equal, samples=samples)
    assert len(found) == 40 and sum(one.verdict == "worse" for one in found) <= 2
    assert sum(bool(one.regressions) for one in found) <= 2, "all tools of a comparison together"


def test_more_samples_find_a_smaller_drop() -> None:
    def found(samples: int) -> int:
        return sum(one.verdict == "worse" for one in verdicts(lambda _, easy: max(0.0, easy - 0.1), samples=samples))

    assert found(4) >= 36 and found(1) <= 15, "the page names both"


def test_questions_that_one_model_dropped_make_no_difference() -> None:
    """They may be the hard ones."""
    before, after = dict.fromkeys(range(20, 100), 1.0), {question: float(question >= 20) for question in range(100)}
    found = Verdict.of("pass@1", before, after, {})
    assert found.difference.value == 0 and found.verdict == "undecided"


def test_a_planted_drop_is_found() -> None:
    found = verdicts(lambda _, easy: easy * 0.7)
    assert sum(one.verdict == "worse" for one in found) >= 38
    assert all(one.verdict == "better" for one in verdicts(lambda _, easy: easy * 0.5 + 0.5, 10))


@pytest.mark.parametrize(
    ("named", "least"), [(True, 38), (False, 30)], ids=["rows name their tools", "tools that were called"]
)
def test_a_tool_that_got_worse_is_named_and_no_other(named: bool, least: int) -> None:
    found = verdicts(lambda question, easy: 0.0 if question % 8 == 3 else easy, questions=200, named=named)
    names = [one.name for each in found for one in each.regressions]
    assert names.count("tool tool_3") >= least and len(names) - names.count("tool tool_3") <= 2
    first = next(one for one in found if one.regressions)
    assert first.as_json()["worse_on"][0]["name"] == "tool tool_3"
    assert "worse on tool tool_3 (" in first.lines()[1] and "corrected for 8 tools" in first.lines()[1]


def test_an_undecided_comparison_says_how_many_questions_more_decide_it() -> None:
    undecided = Verdict("pass@1", Difference(Share(0.50, 100), Share(0.45, 100), 0.5))
    assert undecided.verdict == "undecided" and undecided.questions_more is not None
    n = 100 + undecided.questions_more
    decided, fewer = (Difference(Share(0.50, k), Share(0.45, k), 0.5).interval for k in (n, n - 1))
    assert decided[1] < 0 <= fewer[1]
    assert f"about {n - 100} questions more would decide it" in undecided.lines()[0]
    equal = Verdict("pass@1", Difference(Share(0.5, 100), Share(0.5, 100)))
    assert equal.questions_more is None and "no number of questions within reach" in equal.lines()[0]
    assert equal.as_json() == {"measure": "pass@1", "verdict": "undecided", "questions_more": None, "worse_on": []}


def test_questions_that_were_dropped_and_tools_of_few_questions_say_nothing() -> None:
    empty = Verdict.of("pass@1", {}, {}, {})
    assert empty.verdict == "undecided" and empty.questions_more is None
    before, after = dict.fromkeys(range(40), 1.0), dict.fromkeys(range(4, 40), 1.0) | dict.fromkeys(range(4), 0.0)
    assert Verdict.of("pass@1", before, after, {"tool few": range(4)}).regressions == ()
