"""What the built-in rewards give, case by case."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.errors import ConfigError, PluginError, RewardError
from toolgrpo.rewards import calls, final_answer, get_reward, last_tool_response, tool_counts
from toolgrpo.rewards.base import Score
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
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        asked: dict[str, Any] = {
            "completions": [[said(text)] for text in (*texts, texts[0])],
            "solution": [r"$\frac{1}{3}$"] * 6 + ["?"],
        }
        assert get_reward(name)(**asked) == getattr(theirs, name)(**asked)
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
    with pytest.raises(PluginError, match="has no function quarter"):
        get_reward("rewards_of_mine.quarter")
    with pytest.raises(PluginError, match=r"no_such_rewards\.one"):
        get_reward("no_such_rewards.one")


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("It is 72.", "72", 1.0),
        ("It is 720", "72", 0.0),
        ("It is 72.5", "72", 0.0),
        ("It is -72", "72", 0.0),
        ("the  capital is\nNEW york", "New York", 1.0),
        ("Yorkshire", "York", 0.0),
        ("C++ it is", "c++", 1.0),
        ("It costs $12,500.", "12500", 1.0),
        ("It costs 4.50 euros.", "4.5", 1.0),
        ("It is \u22127.", "-7", 1.0),
        ("10-7 is 3", "-7", 0.0),
        ("It is 7/10", "7", 0.0),
        ("on 15/03/2024", "2024", 1.0),
        ("version 1.2.3 of 10.0.0.1", "1.2", 0.0),
        ("Room 7b", "7", 0.0),
        ("Agent 007", "7", 1.0),
        ("Agent 7", "007", 0.0),
        ("about 7%", "7 %", 0.0),
    ],
)
def test_exact_match(text: str, answer: str, expected: float) -> None:
    assert score("exact_match", [said(text)], answer) == expected
    assert score("exact_match", [said(text), tool(answer)], answer) == 0.0  # the response comes after the tools


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 72.", 72),
        ("**72**", 72),
        ("**$1,234.50**", Fraction("1234.5")),
        ("`72`", 72),
        (r"\$72", 72),
        (r"so \boxed{72} after 3 steps", 72),
        (r"\boxed{\text{about } 72}", 72),
        ("#### 72\n", 72),
        ("-$5", -5),
        ("$-5", -5),
        ("\u22127", -7),
        ("Total \u2013 42", 42),
        ("Answer:\n- $42", 42),
        ("10-5", 5),
        ("72%", 72),
        ("72 km", 72),
        ("72cm", 72),
        ("3rd", 3),
        ("saves 50 kg of CO2", 50),
        ("USD72", 72),
        ("1e5", 100000),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        ("1{,}234", 1234),
        ("1\u202f234", 1234),
        ("1_234", 1234),
        ("18 m^2", 18),
        (r"18 \text{ cm}^{2}", 18),
        ("2^10", 10),
        ("1, 2, 3", 3),
        ("1/0", None),
        ("none at all", None),
        ("", None),
    ],
)
def test_numbers_as_people_write_them(text: str, number: Fraction | int | None) -> None:
    assert last_number(marked_answer(text)) == number


def test_gsm8k_takes_bare_answers_and_its_own_text() -> None:
    assert score("gsm8k", [said("so $1,000.00 in all")], "He has 5*200=<<5*200=1000>>1000.\n#### 1,000") == 1.0
    assert score("gsm8k", [said("first 72, then 71")], "72") == 0.0
    assert score("gsm8k", [said("<think>72</think> 71")], "71") == 1.0
    assert score("gsm8k", [said("no idea")], "72") == 0.0
    with pytest.raises(RewardError, match="answer of row 0 holds no number"):
        score("gsm8k", [said("72")], "many")


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"\boxed{73}", "073", 1.0),
        ("The answer is 073.", "73", 1.0),
        (r"\boxed{72} is wrong, \boxed{73}", "73", 1.0),
        (r"\boxed{73", "73", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\dfrac12}", "0.5", 1.0),
        (r"\boxed{ x^2 + 1 }", "x^2+1", 1.0),
        ("x^2+1", "x^2+1", 0.0),
        (r"\boxed{\left(1, 2\right)}", "(1,2)", 1.0),
        (r"\boxed{74}, not 73", "73", 0.0),
        *((rf"\boxed{{{odd}}}", "12", 0.0) for odd in (r"\sqrt{12}", "2^{12}", "10, 12", r"12\pi")),
        (r"\boxed{12 \text{ cm}^{2}}", "12", 1.0),
        (r"\boxed{12^\circ}", "12", 1.0),
        (r"\boxed{f(2) = 12}", "12", 1.0),
        (r"\boxed{- \frac{1}{2}}", r"- \frac{1}{2}", 1.0),
        (r"\boxed{-2, 1}", "-2, 1", 1.0),
        (r"\boxed{1}", "-2, 1", 0.0),
        (r"\boxed{3,5,7}", "3,5,7", 1.0),
        ("so it is 7", "3,5,7", 0.0),
        (r"\boxed{1234}", "1,234", 1.0),
        (r"\boxed{0.75}", "3/4", 1.0),
    ],
)
def test_math(text: str, answer: str, expected: float) -> None:
    assert score("math", [said(text)], answer) == expected


def test_tool_use_has_parts_that_are_logged() -> None:
    logged: dict[str, float] = {}
    trajectories = [
        episode([good("add", a=1)], content="calling"),
        episode([good("add", a=1), good("add", a=1)]),
        episode([BROKEN, good("add", a=1)]),
        episode([], content="no call"),
    ]
    rewards = get_reward("tool_use")(
        completions=[[]] * 4, trajectories=trajectories, log_metric=lambda name, value: logged.update({name: value})
    )
    assert rewards == [1.0, (1 + 1 + 1 + 0.5) / 4, (0.5 + 0.5 + 1 + 1) / 4, 0.0]
    assert logged == {
        "tool_use/format": 2.5 / 4,
        "tool_use/tool": 2.5 / 4,
        "tool_use/arguments": 3 / 4,
        "tool_use/economy": 2.5 / 4,
    }


def test_tool_use_with_expected_tools() -> None:
    trajectories = [episode([good("add")]), episode([good("buy")]), episode([good("add")]), episode([])]
    rewards = get_reward("tool_use")(
        completions=[[]] * 4, trajectories=trajectories, expected_tools=[["add"], ["add"], [], []]
    )
    assert rewards == [1.0, 0.75, 0.0, 1.0]


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
    assert final_answer(completion[:-1]) == final_answer([]) == ""
    assert last_tool_response(completion) == "no" and last_tool_response([said("x")]) is None
    assert tool_counts(completion) == {"add": 1, "buy": 1}
    first, second = calls(episode([good("add", a=1), BROKEN]))
    assert (first.name, first.ok, second.name, second.ok) == ("add", True, None, False)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("work\n**Answer:** 5", "5"),
        ("the answer is 5.", "5"),
        ("<answer>\n5\n</answer> ok", "5"),
        (r"\boxed{5}", "5"),
        ("", ""),
    ],
)
def test_bare_answers(text: str, answer: str) -> None:
    assert bare_answer(text) == answer


def test_reasoning_gym_gives_nothing_for_parts_of_an_answer() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from toolgrpo.data import load_tasks

    (row,) = load_tasks("reasoning_gym:basic_arithmetic:1:3")
    columns = {"gym_task": row["gym_task"], "gym_entry": row["gym_entry"]}
    assert score("reasoning_gym", [said(f"The answer is {row['answer']}.")], "", **columns) == 1.0
    assert score("reasoning_gym", [said(f"{row['answer']} or something else")], "", **columns) == 0.0


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
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from toolgrpo.data import load_tasks

    (row,) = load_tasks(f"reasoning_gym:{task}:1:3")
    columns = {"gym_task": task, "gym_entry": row["gym_entry"]}
    touched = tmp_path / "touched"
    answer = "\\boxed{" + answer.replace("PATH", repr(str(touched))) + "}"
    assert score("reasoning_gym", [said(answer)], "", **columns) == 0.0
    assert not touched.exists()


@pytest.mark.parametrize(
    "task", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"]
)
def test_scorers_that_evaluate_the_answer_take_the_right_one_and_no_program(task: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from toolgrpo.data import load_tasks

    (row,) = load_tasks(f"reasoning_gym:{task}:1:3")
    columns = {"gym_task": task, "gym_entry": row["gym_entry"]}

    def scored(answer: str) -> Score:
        return score("reasoning_gym", [said(f"<answer>{answer}</answer>")], "", **columns)

    entry = "__import__('sys')._getframe(0).f_locals['entry']"
    forged = (
        "oracle_answer",
        "oracle_answer.split()",
        "entry['answer']",
        "list(entry['answer'])",
        f"{entry}['answer']",
    )
    assert {answer: scored(answer) for answer in forged} == dict.fromkeys(forged, 0.0)
    assert scored(row["answer"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "formula"),
    [
        ("X**9 - 4*X**6/6 + C", True),
        ("sqrt(3) + sin(x) * 0.5", True),
        ("6*(98 - 54) - 34 - 66", True),
        ("exec(chr(49))", False),
        ("x.__class__", False),
        ("(1).real", False),
        ("sympify('1')", False),
        ("ｅｘｅｃ(1)", False),
        ("[1][0]", False),
    ],
)
def test_what_is_a_formula(answer: str, formula: bool) -> None:
    assert _is_formula(answer) is formula


def test_an_unknown_gym_task_is_an_error() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with pytest.raises(RewardError, match="'no_such'"):
        score("reasoning_gym", [said("1")], "", gym_task="no_such", gym_entry={})
