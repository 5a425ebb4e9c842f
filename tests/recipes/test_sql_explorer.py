"""The recipe of unknown databases: rows from seeds, an environment that only reads, a reward that knows the answer alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from toolgrpo.sft.encoder import read_conversations
from toolgrpo.support.plugin_files import import_file
from toolgrpo.tools import Toolbox, load_tools

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "sql_explorer"
CASES = yaml.safe_load((ROOT / "tests" / "fixtures" / "recipes" / "sql_explorer.yaml").read_text())
checks = import_file(RECIPE / "check_rows.py")
HOTEL = {"database": "hotel-1", "rung": "schema", "tools": ["query"]}
ROWS = ("train", "heldout")
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def box() -> Iterator[Toolbox]:
    with load_tools(RECIPE / "sql_environment.py", workers=1) as box:
        yield box


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE / "sql_rows.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, env={"PYTHONHASHSEED": "1"})
    for split, n, n_databases, each in (("train", 400, 40, 10), ("heldout", 240, 12, 20)):
        assert (tmp_path / f"{split}.jsonl").read_text() == (RECIPE / f"{split}.jsonl").read_text()
        written = [json.loads(line) for line in (RECIPE / f"{split}.jsonl").read_text().splitlines()]
        assert {tuple(row) for row in written} == {("prompt", "answer", "database", "rung", "tools", "task")}
        assert Counter(Counter(row["database"] for row in written).values()) == {each: n_databases}
        assert all(n // 12 <= of_task <= n // 12 + 1 for of_task in Counter(row["task"] for row in written).values())


@pytest.mark.parametrize("n", [24, pytest.param(400, marks=pytest.mark.slow)])
def test_a_worked_conversation_is_written_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    rows = import_file(RECIPE / "sql_rows.py")
    monkeypatch.setitem(rows.ROWS, "train", n)
    monkeypatch.setattr(sys, "argv", ["sql_rows.py", str(tmp_path), "--worked", "--example"])
    rows.main()
    shown = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert all(len(prompt) > 2 and prompt[-1]["role"] == "user" for prompt in shown), "each after worked questions"
    worked = read_conversations(tmp_path / "worked.jsonl")
    told = [" ".join(m["content"] for m in row["messages"] if m["role"] == "tool") for row in worked]
    assert len(worked) == n and n // 4 <= sum("Error: query: " in text for text in told) <= n // 3


def test_half_of_the_kinds_are_shown_and_the_others_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = import_file(RECIPE / "sql_rows.py")
    monkeypatch.setitem(rows.ROWS, "train", 40)
    monkeypatch.setattr(sys, "argv", ["sql_rows.py", str(tmp_path), "--worked", "clean", "--half", "--rung", "schema"])
    rows.main()
    asked = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert {row["database"].rpartition("-")[0] for row in asked} == set(list(rows.KINDS["train"])[10:])
    shown = [row["messages"][0]["content"] for row in read_conversations(tmp_path / "worked.jsonl")]
    assert len(asked) == len(shown) == 20
    assert not [row for row in asked for question in shown if row["prompt"] in question]


def test_each_kind_of_row_earns_all_when_it_is_played_right_and_none_is_guessed(box: Toolbox) -> None:
    for split in ROWS:
        of_each = {task.row()["task"]: task for task in checks.tasks(split)}.values()
        assert [checks.play_worked(task, box, mistaken=True) for task in of_each] == [1.0] * 12
    assert max(checks.rightly_guessed().values()) <= 12, "5 % of the held-out rows"
    assert not checks.shared_names(), "not even a column, a city or a word of a comment"


def test_the_worked_questions_of_a_prompt_are_of_a_database_of_neither_split(box: Toolbox) -> None:
    rows = import_file(RECIPE / "sql_rows.py")
    for rung, first in (("schema", "query"), ("tables", "describe")):
        shown = rows.example(rung, box)
        assert [m["role"] for m in shown].count("user") == 2 and shown[-1]["role"] == "assistant"
        assert sum("no such" in m["content"] for m in shown if m["role"] == "tool") == 1
        assert shown[1]["tool_calls"][0]["function"]["name"] == first
    named = {json.loads(line)["database"] for split in ROWS for line in (RECIPE / f"{split}.jsonl").open()}
    assert "hotel-2" in named and "hotel-3" not in named


def test_a_query_is_answered_and_bounded(box: Toolbox) -> None:
    with box.session(HOTEL) as session, box.session({**HOTEL, "rung": "nothing"}) as other:
        assert "CREATE TABLE booking (" in (session.observation or "") and not other.observation
        many = "SELECT " + "(" * 100_000 + "1" + ")" * 100_000
        for sql, ok, says in [*CASES["queries"], [many, False, "too large"]]:
            result = session.run({"name": "query", "arguments": {"sql": sql}})
            assert (result.ok, says in result.content) == (ok, True), (sql, result.content)
            assert ok or len(result.content.splitlines()) == 1, result.content
        count = {"name": "query", "arguments": {"sql": "SELECT COUNT(*) FROM booking"}}
        assert [one.run(count).content for one in (session, other)] == ["COUNT(*)\n290"] * 2
        assert "booking" in other.run({"name": "list_tables", "arguments": {}}).content.split()
        assert "no such table: x" in other.run({"name": "describe", "arguments": {"table": "x"}}).content


@pytest.mark.parametrize(("question", "answer", "queries", "final", "earned"), CASES["answers"])
def test_an_answer_is_paid_that_was_seen_and_is_said(
    box: Toolbox, question: str, answer: str, queries: list[str], final: str, earned: float
) -> None:
    row = {"prompt": question, "answer": answer, **HOTEL}
    calls = ["call query " + json.dumps({"sql": sql}) for sql in queries]
    assert checks.earns(row, checks.play(row, [*calls, final], box)) == earned
    if calls:
        assert checks.earns(row, checks.play(row, [*calls, final], box, max_turns=len(calls))) == 0.0, "no end"


def test_a_number_of_a_worked_question_is_no_part_of_the_question(box: Toolbox) -> None:
    row = {"prompt": "What is the number of bookings?", "answer": "290", **HOTEL}
    episode = checks.play(row, ['call query {"sql": "SELECT COUNT(*) FROM booking"}', "There are 290 bookings."], box)
    before = [{"role": "user", "content": "Are there 290 rooms?"}, {"role": "assistant", "content": "No, there are 3."}]
    assert checks.earns(row, episode) == checks.earns(row, episode, before) == 1.0
