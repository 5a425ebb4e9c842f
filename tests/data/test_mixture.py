"""Mixtures: shares, tools and rewards of each task, and what is wrong with a file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.errors import DataError


def rows_file(path: Path, n: int) -> None:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "answer": i}) + "\n" for i in range(n)))


def mixture(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mixture.yaml"
    path.write_text(text.replace("DIR", str(tmp_path)))
    return path


def test_weights_are_shares_and_no_row_comes_twice(tmp_path: Path) -> None:
    rows_file(tmp_path / "a.jsonl", 100)
    rows_file(tmp_path / "b.jsonl", 10)
    tasks = "system_prompt: S\ntasks:\n- {data: DIR/a.jsonl, name: a, weight: 3, tools: [add], reward: gsm8k}\n"
    path = mixture(tmp_path, tasks + "- {data: DIR/b.jsonl, name: b, reward: accuracy, system_prompt: T}\n")
    rows = load_tasks(path, seed=1)
    assert Counter(row["task"] for row in rows) == {"a": 30, "b": 10}
    assert len({row["prompt"][1]["content"] for row in rows}) == 40
    for row in rows:
        assert (row["tools"], row["reward"]) == ((["add"], "gsm8k") if row["task"] == "a" else (None, "accuracy"))
        assert row["prompt"][0] == {"role": "system", "content": "S" if row["task"] == "a" else "T"}
    assert list(rows) == list(load_tasks(path, seed=1)) != list(load_tasks(path, seed=2))
    assert len(load_tasks(path, limit=7)) == 7
    asked = [{row["prompt"][1]["content"] for row in load_tasks(path, seed=seed)} for seed in range(12)]
    assert len(set.union(*asked)) > 100, "not the first rows of a file, which may be sorted"


def test_the_data_sets_of_trl_are_whole_or_by_their_fractions(tmp_path: Path) -> None:
    rows_file(tmp_path / "a.jsonl", 20)
    (tmp_path / "b/main").mkdir(parents=True)
    rows_file(tmp_path / "b/main/test.jsonl", 5)
    a, b = "datasets:\n- {path: json, data_files: DIR/a.jsonl%s}\n", "- {path: DIR/b, name: main, split: test%s}\n"
    path = mixture(tmp_path, f"learning_rate: 1\n{a}{b}" % ("", ""))
    assert len(load_tasks(path)) == 25
    with pytest.raises(DataError, match="already names the split"):
        load_tasks(path, split="heldout")
    rows = load_tasks(mixture(tmp_path, (a + b) % (", columns: [prompt], fraction: 0.6", ", fraction: 0.2")))
    assert Counter(row["prompt"][0]["content"].split()[0] for row in rows) == {"a": 15, "test": 5}
    assert all((row["answer"] is None) == row["prompt"][0]["content"].startswith("a") for row in rows)


def test_a_task_may_hide_the_tools_that_its_prompts_do_not_show(tmp_path: Path) -> None:
    rows_file(tmp_path / "a.jsonl", 3)
    rows_file(tmp_path / "b.jsonl", 3)
    text = "tasks:\n- {data: DIR/a.jsonl, name: a, tools: [], hidden_tools: [add]}\n- {data: DIR/b.jsonl, name: b}\n"
    for row in load_tasks(mixture(tmp_path, text)):
        assert (row["tools"], row["hidden_tools"]) == (([], ["add"]) if row["task"] == "a" else (None, None))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "q", "answer": 1, "tools": ["sub"]}) + "\n")
    rows = load_tasks(mixture(tmp_path, text))
    assert [row["tools"] for row in rows if row["task"] == "b"] == [["sub"]], "a row's own, where its task says nothing"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tasks: []", "tasks: List should have at least 1 item"),
        ("", "`tasks:`"),
        ("tasks:\n- {data: x.jsonl, wieght: 2}", r"tasks.0.wieght: Extra inputs"),
        ("tasks:\n- {data: x.jsonl, weight: 0}", "greater than 0"),
        ("tasks:\n- {data: other.yaml}", "names another mixture"),
        ("tasks: [", "YAML"),
        ("tasks:\n- {data: DIR/none.jsonl}", "does not exist"),
        ("datasets:\n- {path: a/b, fraction: 0.5}\n- c/d", "give one for all, or none"),
        ("datasets:\n- {path: a/b, data_files: x.json}", r"a/b: data_files.*data_dir"),
        ("datasets: a/b", "`tasks:`"),
        ("tasks: []\nexamples: [{role: user, content: u}]", "must begin with a user message and end with an assistant"),
        ("tasks: []\nexamples: [{role: robot, content: u}]", "has the role 'robot'"),
    ],
)
def test_a_mixture_file_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load_tasks(mixture(tmp_path, text))
    with pytest.raises(DataError, match="cannot be read"):
        load_tasks(tmp_path / "none.yaml")


def test_worked_examples_stand_before_the_rows_own_messages(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "q", "answer": 1}\n'
        '{"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}], "answer": 1}\n'
    )
    text = "system_prompt: S\nexamples:\n- {role: user, content: u}\n- {role: assistant, content: a}\ntasks:\n"
    rows = load_tasks(mixture(tmp_path, text + "- {data: DIR/a.jsonl}"))
    examples = [("user", "u"), ("assistant", "a"), ("user", "q")]
    found = sorted([(m["role"], m["content"]) for m in row["prompt"]] for row in rows)
    assert found == [[("system", "S"), *examples], [("system", "own"), *examples]]
    call = "{role: assistant, content: '', tool_calls: [{type: function, function: {name: f, arguments: {}}}]}"
    of_the_task = f"- {{data: DIR/a.jsonl, examples: [{{role: user, content: v}}, {call}]}}"
    own = load_tasks(mixture(tmp_path, text + of_the_task))
    assert own[0]["prompt"][1]["content"] == "v" and own[0]["prompt"][2]["tool_calls"][0]["function"]["name"] == "f"
