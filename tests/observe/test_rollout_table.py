"""The table of episodes that people look at."""

from __future__ import annotations

from typing import Any

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.observe.trackers import as_markdown, episode_rows
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored


def trajectory() -> Trajectory:
    attempts = (
        CallAttempt(AttemptStatus.OK, "", "add", {"a": 1, "b": 2}),
        CallAttempt(AttemptStatus.OK, "", "divide", {"a": 1, "b": 0}),
    )
    results = (ToolResult("3", "add"), ToolResult("Error: by | zero\nagain", "divide", ToolErrorKind.RAISED))
    return Trajectory(
        prompt_ids=(1,),
        ids=(2, 3),
        mask=(1, 1),
        logprobs=(-0.5, -0.25),
        messages=(
            {"role": "assistant", "content": ""},
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ),
        turns=(
            Turn(start=0, end=1, content="", reasoning=None, attempts=attempts, results=results, closed=True),
            Turn(start=1, end=2, content="It is 3.", reasoning=None, attempts=(), closed=True),
        ),
        stop_reason=StopReason.FINISHED,
        metadata={"episode": 17},
    )


def batch(prompt: Any, rewards: dict[str, float | None]) -> RolloutBatch:
    made = RolloutBatch(episodes=(Scored({"prompt": prompt}, trajectory()),), step=4)
    return made.graded([Grade(rewards, 1.5)], lambda one: True)


def test_a_row_says_what_happened() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 2?" + "x" * 2000}]
    (row,) = episode_rows(batch(prompt, {"accuracy": 1.0, "format": 0.5, "style": None}))
    expected = {"step": 4, "episode": 17, "reward": 1.5, "success": "yes", "stop": "finished", "turns": 2}
    assert {name: row[name] for name in expected} == expected and row["failed_calls"] == 1
    assert row["tools"] == "add(a=1, b=2) -> 3\ndivide(a=1, b=0) -> Error: by | zero\nagain"
    assert row["prompt"].startswith("1 + 2?") and len(row["prompt"]) < 1100 and row["prompt"].endswith(" ...")
    for part in ("calls: divide(a=1, b=0)\nresult, 0.00 s, raised: Error: by | zero", "turn 2", "says: It is 3."):
        assert part in row["conversation"]
    assert row["answer"] == "It is 3." and row["rewards"] == "accuracy 1, format 0.5, style none"


def test_markdown_keeps_the_table_whole() -> None:
    rows = episode_rows(batch("q", {}))
    lines = as_markdown(rows).split("\n")
    assert len(lines) == 3 and lines[0].count("|") == len(rows[0]) + 1
    assert lines[2].replace("\\|", "").count("|") == len(rows[0]) + 1
