"""Which episodes of a run become examples, and why the others do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_run import record_run
from toolgrpo.commands.main import main
from toolgrpo.sft.from_run import offered, run_examples

ROOT = Path(__file__).resolve().parents[2]


ANSWER = {"role": "assistant", "content": "5"}


def record(question: str, *calls: tuple[str, dict[str, Any], str], **more: Any) -> dict[str, Any]:
    """One recorded episode: calls with their results, then an answer."""
    made = [{"id": f"x{n}", "function": {"name": name, "arguments": a}} for n, (name, a, _) in enumerate(calls)]
    messages = [{"role": "assistant", "content": "", "tool_calls": made}] if calls else []
    messages += [{"role": "tool", "tool_call_id": f"x{n}", "content": one[2]} for n, one in enumerate(calls)]
    attempts = [{"status": "ok", "name": name, "arguments": a} for name, a, _ in calls]
    turn = {"attempts": attempts, "results": [{"content": result} for _, _, result in calls]}
    done = {"prompt": [{"role": "user", "content": question}], "messages": [*messages, ANSWER]}
    return {"success": True, "row": {}, "turns": [turn], **done, **more}


def add(a: int, b: int) -> tuple[str, dict[str, Any], str]:
    return "add", {"a": a, "b": b}, str(a + b)


def test_each_success_is_used_once_and_the_others_are_counted_by_their_reason() -> None:
    broken = record("What is 9 + 9?", add(9, 9))
    broken["turns"][0]["attempts"].append({"status": "invalid_json", "name": None, "arguments": None})
    found = run_examples(
        [
            record("What is 2 + 3?", add(2, 3)),
            record("  what is 2 + 3 ", add(3, 2)),  # the same question
            record("What is 2 - 3?", ("add", {"a": 2, "b": -3}, "-1")),  # another
            record("Two and three make?", ("add", {"b": 3, "a": 2}, "5")),  # the same call
            record("Now?", ("state", {}, "one")),
            record("And now?", ("state", {}, "two")),  # the same call of another state
            record("Hello", success=False),
            record("Hello", success=None),
            record("Hello"),
            record("Say it."),  # neither of the two calls anything
            broken,
            record("Cut", add(7, 7), messages=[{"role": "assistant", "content": ""}]),
            record("Hello", messages=[ANSWER, {"role": "user", "content": "Sure?"}, ANSWER]),  # it goes on otherwise
        ]
    )
    first = [one["messages"][0]["content"] for one in found.conversations]
    assert first == ["What is 2 + 3?", "What is 2 - 3?", "Now?", "And now?", "Hello", "Say it.", "Hello"]
    assert str(found) == (
        "7 of 13 episodes (2 without success; 1 with the question of an earlier one; 1 with the calls of an earlier "
        "one; 1 with a call that could not be run; 1 without an answer)"
    )
    twice = [record("What is 2 + 3?", add(*numbers)) for numbers in ((2, 3), (3, 2), (2, 3))]
    assert str(run_examples(twice, near=False)) == "2 of 3 episodes (1 that repeat an earlier one)"
    said = json.dumps(found.conversations[0]["messages"])
    assert "x0" not in said and "tool_call_id" not in said, "families write ids in their own form"


def test_what_a_training_measured_on_is_no_example_and_all_of_an_evaluation_is() -> None:
    measured = [record(f"Add {n}", add(n, n), mode="eval") for n in range(3)]
    drawn = [record("Add 2", add(2, 2), mode="train"), record("Add 9", add(9, 9), mode="train")]
    assert str(run_examples(measured)) == "3 of 3 episodes"
    found = run_examples([*measured, *drawn], of_training=True)
    assert [one["messages"][0]["content"] for one in found.conversations] == ["Add 2", "Add 9"]
    assert str(found) == "2 of 5 episodes (3 of held-out rows)"


def test_a_conversation_is_shown_the_tools_that_its_row_was() -> None:
    schemas = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
    rows = [{}, {"tools": ["a", "b"]}, {"hidden_tools": ["c"]}, {"tools": ["a", "c"], "hidden_tools": ["c"]}]
    found = run_examples(record(str(number), row=row) for number, row in enumerate(rows))
    names = [[one["function"]["name"] for one in offered(schemas, each)] for each in found.conversations]
    assert names == [["a", "b", "c"], ["a", "b"], ["a", "b"], ["a"]]


def test_what_an_environment_said_first_stands_in_the_example_and_tells_questions_apart() -> None:
    def opened(said: str) -> dict[str, Any]:
        return record("How many?", ("query", {"sql": said}, said), metadata={"observation": f"\n\nTables: {said}"})

    found = run_examples([opened("a"), opened("b"), opened("a")])
    first = [one["messages"][0]["content"] for one in found.conversations]
    assert first == ["How many?\n\nTables: a", "How many?\n\nTables: b"]
    assert [one["n_prompt"] for one in found.conversations] == [1, 1], "what stands before is not learnt"


@pytest.mark.e2e
def test_a_student_learns_from_a_run_in_its_own_format(
    mini_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run = record_run(tmp_path / "run")
    words = ["--model", str(mini_nano), "--from_run", str(run), "--output_dir", str(tmp_path / "out")]
    words += ["--max_steps", "1", "--batch_size", "1", "--use_cpu", "true"]
    recorded = run / "episodes.jsonl"
    messages = record("q", add(1, 2))["messages"]
    lines = [{**json.loads(line), "messages": messages} for line in recorded.read_text().splitlines()]
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["sft", *words]) == 2
    said = capsys.readouterr().err
    assert "its run.yaml does not say which" in said
    (run / "run.yaml").write_text(f"tools_script: {run / 'mine.py'}\n")
    (run / "mine.py").write_text("raise SystemExit('it was run')")
    assert main(["sft", *words]) == 2
    said = capsys.readouterr().err
    assert "are in that folder itself" in said, "what came with a recording is not run"
    (run / "run.yaml").write_text("tools_script: arithmetic\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([sys.executable, "recipes/sft.py", *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "examples  2 of 24 episodes" in done.stderr and "without success" in done.stderr
    assert "shards" not in done.stderr, "the bars of a library are not ours"
    assert (tmp_path / "out" / "model.safetensors").is_file()
