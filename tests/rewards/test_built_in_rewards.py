"""What the built-in rewards give, case by case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.data import load_tasks
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.errors import ConfigError, PluginError, RewardError
from toolgrpo.rewards import calls, final_answer, get_reward, last_tool_response, tool_counts
from toolgrpo.rewards.base import Score
from toolgrpo.rewards.gold_calls import best_total
from toolgrpo.rewards.gym import _is_formula, bare_answer
from toolgrpo.rewards.numerals import last_number, marked_answer


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(content: str, name: str = "add") -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content}


def score(name: str, completion: list[dict[str, Any]], answer: str, **columns: Any) -> Score:
    (value,) = get_reward(name)(completions=[completion], answer=[answer], **{k: [v] for k, v in columns.items()})
    return value


def episode(*turns: list[tuple[CallAttempt, ToolResult]], content: str = "") -> Trajectory:
    played = [zip(*pairs, strict=True) if pairs else ((), ()) for pairs in turns]
    made = [Turn(start=0, end=0, content=content, reasoning=None, attempts=a, results=r) for a, r in played]
    nothing: dict[str, Any] = dict.fromkeys(("ids", "mask", "logprobs", "messages"), ())
    return Trajectory(prompt_ids=(1,), turns=tuple(made), stop_reason=StopReason.FINISHED, **nothing)


def good(name: str, **arguments: Any) -> tuple[CallAttempt, ToolResult]:
    return CallAttempt(AttemptStatus.OK, "", name, arguments), ToolResult("ok", name)


BROKEN = (CallAttempt(AttemptStatus.INVALID_JSON, "{"), ToolResult("Error", error=ToolErrorKind.INVALID_JSON))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ([said(""), tool(" PARIS\n"), said("It is Rome")], 1.0),
        ([said(""), tool("Paris"), said(""), tool("Rome"), said("Paris")], 0.1),
        ([said("Paris")], 0.0),
        ([], 0.0),
    ],
)
def test_accuracy(completion: list[dict[str, Any]], expected: float) -> None:
    assert score("accuracy", completion, "Paris ") == score("tool_result", completion, "Paris ") == expected


@pytest.mark.parametrize(("result", "right"), [("5", 1.0), ("5.0", 1.0), ("5.5", 0.1), ("007", 0.1), ("-5", 0.1)])
def test_a_result_is_the_number_that_the_answer_is(result: str, right: float) -> None:
    """A table whose column of answers has one fraction, or a gap, makes all of them such."""
    assert score("tool_result", [said(""), tool(result), said("")], "5.0") == right


def test_a_reward_of_trl_reads_the_final_response() -> None:
    thought = said("<think>\nIt is 3.\n</think>\n3")
    assert score("think_format_reward", [said("calls"), tool("3"), thought], "3") == 1.0
    assert score("think_format_reward", [thought, tool("3"), said("3")], "3") == 0.0
    assert score("think_format_reward", [{**said("3"), "reasoning_content": "It is 3."}], "3") == 1.0
    assert score("get_soft_overlong_punishment", [said("3")], "3", completion_ids=[1] * 1152) == -0.5


def test_formulas_are_compared_as_by_trl_and_an_endless_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    theirs = pytest.importorskip("trl.rewards")
    texts = (r"so \boxed{\frac{2}{6}}", r"\boxed{0.5}", "1/3", r"\boxed{(", r"<think>2</think>It is $\frac13$", "")
    completions, solution = [[said(text)] for text in (*texts, texts[0])], [r"$\frac{1}{3}$"] * 6 + ["?"]
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        expected = getattr(theirs, name)(completions=completions, solution=solution)
        assert get_reward(name)(completions=completions, solution=solution) == expected
    assert get_reward("accuracy_reward")(completions=[[said(r"\boxed{(10^8)!}")]], solution=["$3$"]) == [0.0]
    assert score("accuracy_reward", [said(r"\boxed{3}")], "3") == 1.0, "an answer is the solution where there is none"
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"'toolgrpo\[math\]'"):
        get_reward("accuracy_reward")


def test_a_dotted_path_is_a_reward_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rewards_of_mine.py").write_text("def half(completions, **kwargs): return [0.5] * len(completions)\n")
    assert score("rewards_of_mine.half", [said("x")], "y") == 0.5
    for path, says in (
        ("rewards_of_mine.quarter", "no function quarter"),
        ("no_such_rewards.one", r"no_such_rewards\.one"),
    ):
        with pytest.raises(PluginError, match=says):
            get_reward(path)


EXACT = {  # an answer: texts that have it, and texts that do not
    "72": (["It is 72.", "一共72个"], ["It is 720 or 72.5 or -72"]),
    "New York": (["the  capital is\nNEW york"], []),
    "York": ([], ["Yorkshire"]),
    "c++": (["C++ it is"], []),
    "12500": (["It costs $12,500."], []),
    "4.5": (["It costs 4.50 euros."], []),
    "-7": (["It is \u22127."], ["10-7 is 3"]),
    "7": (["Agent 007", "5–7"], ["It is 7/10, in Room 7b", "7.2GB", "7/10th", "user_7", "-$7", "It is –7"]),
    "4": (["It is 3/4, so 4."], ["4.5kg", "3/4", r"\frac{3}{4}"]),
    "1": ([], ["1,250km", "1.5e3", "1\u202f234"]),
    "1500": (["1.5e3"], []),
    "-5": ([], ["1e-5"]),
    "500": ([], ["-$500", "−$500"]),
    "3": ([], [r"\frac{3}{4}"]),
    "234": ([], [r"1{,}234"]),
    "北京": (["中国的首都是北京。"], []),
    "007": ([], ["Agent 7"]),
    "2024": (["on 15/03/2024", "in 05/2024", "the season 2023/2024"], []),
    "1.2": ([], ["version 1.2.3 of 10.0.0.1"]),
    "7 %": ([], ["about 7%"]),
}


NUMBERS: dict[Fraction | int | None, list[str]] = {
    72: [
        "答案是72。",
        "一共72个苹果",
        "The answer is 72.",
        r"\$72",
        r"so \boxed{72} after 3 steps",
        r"\boxed{\text{about } 72}",
        "#### 72\n",
    ],
    7: ["7%", "7cm", "USD7"],
    Fraction("1234.5"): ["**$1,234.50**"],
    -5: ["-$5", "$-5"],
    -7: ["\u22127"],
    42: ["Total \u2013 42", "Answer:\n- $42"],
    5: ["10-5", "5 = x_1"],
    3: ["3rd", "1, 2, 3"],
    50: ["saves 50 kg of CO2"],
    100000: ["1e5"],
    Fraction(1, 2): [".5"],
    Fraction(3, 4): ["3/4", r"\frac{3}{4}"],
    1234: [r"1,\!234", "1{,}234", "1\u202f234", "1_234"],
    18: ["#### 18\n(5 % of 360)", "#### Step 4: 18", "__18__", "_18_", "18 m^2", r"18 \text{ cm}^{2}"],
    10: ["2^10"],
    None: ["1/0", "none at all"],
}


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_as_people_write_them(number: Fraction | int | None) -> None:
    assert {text: last_number(marked_answer(text)) for text in NUMBERS[number]} == dict.fromkeys(
        NUMBERS[number], number
    )


def test_gsm8k_takes_bare_answers_and_its_own_text() -> None:
    assert score("gsm8k", [said("so $1,000.00 in all")], "He has 5*200=<<5*200=1000>>1000.\n#### 1,000") == 1.0
    assert score("gsm8k", [said("first 72, then 71")], "72") == 0.0
    assert score("gsm8k", [said("<think>72</think> 71")], "71") == 1.0
    assert score("gsm8k", [said("no idea")], "72") == 0.0
    with pytest.raises(RewardError, match="answer of row 0 holds no number"):
        score("gsm8k", [said("72")], "many")


MATH = {  # an answer: texts that give it, and texts that do not
    "073": ([r"\boxed{73}"], []),
    "73": (["The answer is 073.", r"\boxed{72} is wrong, \boxed{73}", r"\boxed{73"], [r"\boxed{74}, not 73"]),
    "0.5": ([r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac12}"], []),
    "x^2+1": ([r"\boxed{ x^2 + 1 }"], ["x^2+1"]),
    "(1,2)": ([r"\boxed{\left(1, 2\right)}"], []),
    "12": (
        [r"\boxed{12 \text{ cm}^{2}}", r"\boxed{12^\circ}", r"\boxed{f(2) = 12}"],
        [r"\boxed{\sqrt{12}}", r"\boxed{2^{12}}", r"\boxed{10, 12}", r"\boxed{12\pi}", r"\boxed{12π}", r"\boxed{√12}"],
    ),
    r"- \frac{1}{2}": ([r"\boxed{- \frac{1}{2}}"], []),
    "-2, 1": ([r"\boxed{-2, 1}"], [r"\boxed{1}"]),
    "50%": ([r"\boxed{50\%}", r"\boxed{50}"], [r"\boxed{51\%}"]),
    "3,5,7": ([r"\boxed{3,5,7}"], ["so it is 7"]),
    "1,234": ([r"\boxed{1234}"], []),
    "3/4": ([r"\boxed{0.75}"], []),
    r"\text{odd}": ([r"\boxed{\text{odd}}", r"\boxed{odd}"], [r"\boxed{\text{even}}", r"\boxed{}"]),
    r"5\text{ or }6": ([r"\boxed{5 \text{ or } 6}"], [r"\boxed{56}"]),
    r"12\text{ cm}^2": ([r"\boxed{12}", r"\boxed{12 \text{ cm}}"], []),
    "100, 200": ([r"\boxed{100, 200}"], [r"\boxed{100200}"]),
    r"\$18.90": ([r"\boxed{18.90}"], []),
    r"90^{\circ}": ([r"\boxed{90^\circ}", r"\boxed{90}"], []),
    r"10,\!080": ([r"\boxed{10,\!080}", r"\boxed{10080}"], []),
    "5": ([], [r"\boxed{\pm 5}", r"\boxed{5²}"]),
}


@pytest.mark.parametrize(
    ("name", "answer", "texts"),
    [(name, *row) for name, table in (("exact_match", EXACT), ("math", MATH)) for row in table.items()],
)
def test_an_answer_is_found_in_a_text(name: str, answer: str, texts: tuple[list[str], list[str]]) -> None:
    right, wrong = texts
    scores = [score(name, [said(text)], answer) for text in (*right, *wrong)]
    assert scores == [1.0] * len(right) + [0.0] * len(wrong)
    assert score(name, [said(answer), tool(answer)], answer) == 0.0, "the response comes after the tools"


@pytest.mark.parametrize("name", ["accuracy", "exact_match", "gsm8k", "math"])
def test_a_row_without_an_answer_is_not_scored(name: str) -> None:
    """A mixture fills the column with None, and "None of them" is no answer."""
    completion = [tool("None"), said(r"None of them: \boxed{None}")]
    assert get_reward(name)(completions=[completion], answer=[None]) == [None]


def test_tool_use_has_parts_that_are_logged() -> None:
    logged: dict[str, float] = {}
    trajectories = [
        episode([good("add", a=1)], content="calling"),
        episode([good("add", a=1), good("add", a=1)]),
        episode([BROKEN, good("add", a=1)]),
        episode([], content="no call"),
    ]
    rewards = get_reward("tool_use")(completions=[[]] * 4, trajectories=trajectories, log_metric=logged.__setitem__)
    assert rewards == [1.0, (1 + 1 + 1 + 0.5) / 4, (0.5 + 0.5 + 1 + 1) / 4, 0.0]
    parts = {"format": 2.5 / 4, "tool": 2.5 / 4, "arguments": 3 / 4, "economy": 2.5 / 4}
    assert logged == {f"tool_use/{name}": share for name, share in parts.items()}


def test_tool_use_with_expected_tools() -> None:
    trajectories = [episode([good("add")]), episode([good("buy")]), episode([good("add")]), episode([])]
    asked: dict[str, Any] = {"trajectories": trajectories, "expected_tools": [["add"], ["add"], [], []]}
    assert get_reward("tool_use")(completions=[[]] * 4, **asked) == [1.0, 0.75, 0.0, 1.0]


def test_by_task_scores_each_row_with_its_own_reward(tmp_path: Any) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def reward_func(completions, bonus): return [float(b) for b in bonus]\n")
    rewards = get_reward("by_task")(
        completions=[[said("72")], [said("a"), tool("x")], [said("72")]],
        answer=["72", "y", "71"],
        bonus=[5, 6, 7],
        reward=["gsm8k", "accuracy", str(mine)],
    )
    assert rewards == [1.0, 0.1, 7.0]
    with pytest.raises(RewardError, match="row 1 names no reward"):
        get_reward("by_task")(completions=[[], []], answer=["1", "1"], reward=["gsm8k", None])


def test_reading_an_episode() -> None:
    completion = [{**said(""), "tool_calls": []}, tool("3"), tool("no", "buy"), said("<think>x</think> three")]
    assert final_answer(completion) == "three"
    assert final_answer(completion[:-1]) == final_answer([]) == final_answer([said("<think>Is it three")]) == ""
    assert last_tool_response(completion) == "no" and last_tool_response([said("x")]) is None
    assert tool_counts(completion) == {"add": 1, "buy": 1}
    first, second = calls(episode([good("add", a=1), BROKEN]))
    assert (first.name, first.ok, second.name, second.ok) == ("add", True, None, False)


def test_bare_answers() -> None:
    for text in ("work\n**Answer:** 5", "the answer is 5.", "<answer>\n5\n</answer> ok", r"\boxed{5}"):
        assert bare_answer(text) == "5", text
    assert bare_answer("") == ""


def gym(task: str) -> tuple[str, Callable[[str], Score]]:
    """The right answer of a task of reasoning-gym, and what scores another one."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    (row,) = load_tasks(f"reasoning_gym:{task}:1:3")
    columns = {"gym_task": task, "gym_entry": row["gym_entry"]}
    return row["answer"], lambda text: score("reasoning_gym", [said(text)], "", **columns)


def test_reasoning_gym_gives_nothing_for_parts_of_an_answer() -> None:
    answer, scored = gym("basic_arithmetic")
    assert scored(f"The answer is {answer}.") == 1.0 and scored(f"{answer} or something else") == 0.0
    with pytest.raises(RewardError, match="'no_such'"):
        score("reasoning_gym", [said("1")], "", gym_task="no_such", gym_entry={})


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("n_queens", "[__import__('pathlib').Path(PATH).touch()]"),
        ("puzzle24", "9**9**9**9"),
        ("n_queens", "__import__('os')._exit(0)"),
        ("basic_arithmetic", "\ud800"),
    ],
)
def test_scorers_that_evaluate_the_answer_do_so_in_the_sandbox(tmp_path: Path, task: str, answer: str) -> None:
    _, scored = gym(task)
    touched = tmp_path / "touched"
    assert scored("\\boxed{" + answer.replace("PATH", repr(str(touched))) + "}") == 0.0
    assert not touched.exists()


@pytest.mark.parametrize(
    "task", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"]
)
def test_scorers_that_evaluate_the_answer_take_the_right_one_and_no_program(task: str) -> None:
    answer, scored = gym(task)
    entry = "__import__('sys')._getframe(0).f_locals['entry']"
    forged = (
        "oracle_answer",
        "oracle_answer.split()",
        "entry['answer']",
        "list(entry['answer'])",
        f"{entry}['answer']",
    )
    assert [scored(f"<answer>{text}</answer>") for text in (answer, *forged)] == [1.0] + [0.0] * len(forged)


def test_what_is_a_formula() -> None:
    formulas = ("X**9 - 4*X**6/6 + C", "sqrt(3) + sin(x) * 0.5", "6*(98 - 54) - 34 - 66")
    programs = ("exec(chr(49))", "x.__class__", "(1).real", "sympify('1')", "ｅｘｅｃ(1)", "[1][0]")
    assert tuple(filter(_is_formula, (*formulas, *programs))) == formulas


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def gold_score(gold: Any, *made: dict[str, Any] | None) -> Any:
    """What these calls are worth; None is one that cannot be read."""
    turn = [BROKEN if one is None else good(one["name"], **one["arguments"]) for one in made]
    (value,) = get_reward("gold_calls")(completions=[[]], trajectories=[episode(turn)], gold_calls=[gold])
    return value


ADD, MULTIPLY = call("add", a=1, b=2), call("multiply", a=3, b=4)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((ADD, MULTIPLY), 1.0),
        ((MULTIPLY, ADD), 1.0),  # order does not matter
        ((), 0.0),
        ((ADD,), (1 / 2 + 3) / 7),
        ((call("add", a=1, b=9), MULTIPLY), (1 + 2 + 3) / 7),
        ((call("add", a=1), MULTIPLY), (1 + 1.5 + 3) / 7),
        ((ADD, MULTIPLY, ADD), (2 / 3 + 6) / 7),  # a call too many
        ((ADD, MULTIPLY, None), (2 / 3 + 6) / 7),  # one that cannot be read
        ((call("divide", a=1, b=2),), 0.0),
    ],
)
def test_the_formula_of_gold_calls(made: tuple[Any, ...], expected: float) -> None:
    assert gold_score([ADD, MULTIPLY], *made) == pytest.approx(expected)
    assert gold_score(json.dumps([ADD, MULTIPLY]), *made) == pytest.approx(expected)


def test_pairs_of_calls_are_those_that_are_worth_most_not_the_first_that_fit() -> None:
    gold = [call("f", a=1, b=2), call("f", a=1, b=3)]
    made = [call("f", a=1, b=3), call("f", a=9, b=2)]  # greedily, the first gold call takes the first call
    assert gold_score(gold, *made) == pytest.approx((1 + (1 + 1) + (1 + 2)) / 7)


SAME = (  # a made and a gold argument
    *((3, "3"), (3.0, 3), (" Paris ", "paris"), ("a  b", "A b"), ([1, {"x": "2"}], ["1", {"x": 2.0}]), (True, "true")),
    *((10**400, 10**400), (1234567890123456789, "1234567890123456789")),
    (0.052500000000000005, 0.0525),  # as a column of calls comes back from the files that keep rows
)
OTHER = (
    *((True, 1), (float("nan"), 1), ("1_000", 1000), ([1], 1), (0.05251, 0.0525)),
    *((1234567890123456700, 1234567890123456789), ("2139", "02139"), (7, "007")),
)


@pytest.mark.parametrize(("pairs", "expected"), [(SAME, 1.0), (OTHER, 2 / 3)])
def test_arguments_are_compared_as_what_they_mean(pairs: tuple[tuple[Any, Any], ...], expected: float) -> None:
    for made, gold in pairs:
        assert gold_score([call("f", x=gold)], call("f", x=made)) == pytest.approx(expected), (made, gold)


def test_rows_that_want_no_call_or_are_not_scored() -> None:
    assert gold_score([]) == 1.0 and gold_score([], ADD) == 0.0
    assert gold_score(None, ADD) is None


def test_what_a_table_fills_gold_calls_with_is_absent() -> None:
    assert gold_score([call("add", a=1, b=2, city=None)], ADD) == 1.0
    filled = call("find", q="x", filter={"city": "Oslo", "zip": None})
    assert gold_score([filled], call("find", q="x", filter={"city": "Oslo"})) == 1.0


@pytest.mark.parametrize(
    "gold", ["nonsense", 5, [5], [{"arguments": {}}], [{"name": 3}], [{"name": "f", "arguments": 3}]]
)
def test_gold_calls_that_cannot_be_read_are_named_by_their_row(gold: Any) -> None:
    with pytest.raises(RewardError, match=r"gold_calls .*row 0"):
        gold_score(gold, ADD)


def test_a_flood_of_calls_is_scored_in_time() -> None:
    assert gold_score([ADD] * 20, *[ADD] * 5000) < 1


@pytest.mark.property
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_pairing_is_scipys(n: int, m: int, data: st.DataObject) -> None:
    cell = st.floats(0, 5, width=16)
    worth = data.draw(st.lists(st.lists(cell, min_size=m, max_size=m), min_size=n, max_size=n))
    rows, columns = pytest.importorskip("scipy.optimize").linear_sum_assignment(numpy.array(worth), maximize=True)
    assert best_total(worth) == pytest.approx(float(numpy.array(worth)[rows, columns].sum()))
