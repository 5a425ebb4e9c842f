"""A user's own observer of a training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.trainings import by_length, call_and_answer
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.observe.records import read_episodes
from toolgrpo.rollout import EpisodeDone, Observer, RolloutBatch, RolloutBegan, TurnDone
from toolgrpo.testing import ScriptedTools, tiny_trainer


def trainer(folder: Path, *observers: Any, steps: int = 2) -> Any:
    parts = {"tools": ScriptedTools({"add": lambda a, b: str(a + b)}), "observers": observers}
    return tiny_trainer(folder, by_length, call_and_answer, parts=parts, max_steps=steps)


class Listener(Observer):
    def __init__(self) -> None:
        self.began: list[RolloutBegan] = []
        self.counts: Counter[str] = Counter()
        self.batches: list[RolloutBatch] = []

    def rollout_began(self, event: RolloutBegan) -> None:
        self.began.append(event)

    def turn_done(self, event: TurnDone) -> None:
        self.counts["turns"] += 1
        self.counts["calls"] += len(event.turn.results)

    def episode_done(self, event: EpisodeDone) -> None:
        self.counts["episodes"] += 1

    def batch_done(self, batch: RolloutBatch) -> None:
        self.batches.append(batch)

    def close(self) -> None:
        self.counts["closed"] += 1


def test_an_observer_of_the_user_hears_of_all_that_is_trained_on(tmp_path: Path) -> None:
    listener = Listener()
    running = trainer(tmp_path, listener)
    running.train()
    running.close()
    assert [(event.n_episodes, event.step, event.mode) for event in listener.began] == [
        (8, 0, "train"),
        (8, 1, "train"),
    ]
    assert listener.counts == {"turns": 32, "calls": 16, "episodes": 16, "closed": 1}
    first, second = listener.batches
    assert [len(group) for group in first.groups()] == [4, 4]
    assert all(len({one.row["answer"] for one in group}) == 1 for batch in listener.batches for group in batch.groups())
    recorded = read_episodes(tmp_path / "episodes.jsonl")
    assert [line["reward_given"] for line in recorded] == [*first.totals, *second.totals]
    assert [line["metadata"]["episode"] for line in recorded] == list(range(16))
    for episode in (*first.episodes, *second.episodes):
        assert episode.rewards == {"by_length": episode.total}
        assert episode.success == (episode.total is not None and episode.total >= 1.0)
    logs = [log for log in running.state.log_history if "loss" in log]
    for log, batch in zip(logs, listener.batches, strict=True):
        assert log["success"] == sum(batch.successes) / 8
        assert log["reward/max"] == max(total for total in batch.totals if total is not None)


def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "observers.md").read_text()
    code = guide.partition("```python\n")[2].partition("```")[0]
    assert "class FailedCalls" in code
    names: dict[str, Any] = {}
    exec(code, names)
    failed = names["FailedCalls"]()
    running = trainer(tmp_path, failed, steps=1)
    running.toolbox.answers["add"] = lambda a, b: ToolResult("no", "add", ToolErrorKind.RAISED)
    running.train()
    assert [(step, content) for step, _, _, content in failed.seen] == [(0, "no")] * 8
    assert sorted(number for _, number, _, _ in failed.seen) == list(range(8))
