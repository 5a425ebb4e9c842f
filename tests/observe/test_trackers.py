"""W&B, TensorBoard and trackio in real runs: what reaches them, and that none of them can stop a training."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.observe.trackers import as_markdown, episode_rows
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[1] / "fixtures" / "scale" / "train_tiny.py"


@pytest.fixture
def train(train_tiny: Any, tiny_model: Path, tmp_path: Path) -> Any:
    """Two steps of the tiny run, with these options; its result."""

    def run(**config: Any) -> dict[str, Any]:
        options = {"max_steps": 2, "use_cpu": True, "log_completions": True, **config}
        job = train_tiny.Job(out=str(tmp_path / "out"), model=str(tiny_model), config=options)
        result: dict[str, Any] = train_tiny.run(job)
        return result

    return run


def texts(folder: Path) -> dict[str, list[str]]:
    """Everything TensorBoard was told in words, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[str]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["tensors"]:
            found[tag] = [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
        if "train/loss" in events.Tags()["scalars"]:
            found["scalars"] = events.Tags()["scalars"]
    return found


def test_tensorboard_and_wandb_offline_have_all(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    try:
        train(report_to=["tensorboard", "wandb"], max_steps=3)
        config = dict(wandb.run.config)
        folder = Path(wandb.run.dir)  # wandb may keep the WANDB_DIR of an earlier run of this process
    finally:
        wandb.finish()
        wandb.teardown()  # its process writes its file to the end
    found = texts(tmp_path / "tb")
    assert {"train/loss", "train/reward", "train/rollout/turns", "train/tools/add/calls"} <= set(found["scalars"])
    assert '"max_turns": 3' in found["args/text_summary"][0]
    assert "* trl 1." in found["versions/text_summary"][0] and "* torch 2." in found["versions/text_summary"][0]
    assert len(found["rollouts/text_summary"]) == 3, "one table for each log"
    assert "add(a=1, b=2) -> 3" in found["rollouts/text_summary"][0]
    assert config["max_turns"] == 3 and config["versions"]["trl"].startswith("1.")
    tables = sorted(folder.rglob("rollouts_*.table.json"))
    assert len(tables) == 3
    (log,) = folder.parent.glob("*.wandb")
    assert b"doctor: " in log.read_bytes(), "an alert for what the doctor has found"
    table = json.loads(tables[0].read_text())
    (first, *_) = table["data"]
    row = dict(zip(table["columns"], first, strict=True))
    assert len(table["data"]) == 4 and row["tools"] == "add(a=1, b=2) -> 3" and row["turns"] == 2
    assert row["rewards"] == f"checked_reward {row['reward']:g}"


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_has_them_too(tiny_qwen3: Any, tmp_path: Path) -> None:
    """In a process of its own: trackio reads its folder from the environment when it is first imported."""
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    config = {"max_steps": 2, "use_cpu": True, "log_completions": True, "report_to": "trackio", "project": "tiny"}
    job = {"out": str(tmp_path / "out"), "model": str(tmp_path / "model"), "config": config}
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    subprocess.run([sys.executable, str(SCRIPT), json.dumps(job)], env=environment, check=True, timeout=600)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file())
    assert b"rollouts" in stored and b"versions" in stored and b"add(a=1, b=2)" in stored


def test_a_tracker_that_fails_stops_nothing_and_one_that_is_not_installed_is_left_out(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    blocked = tmp_path / "a file"
    blocked.write_text("where a folder should be")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(blocked / "tb"))
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's own way to say that there is no such module
    with caplog.at_level(logging.WARNING):
        assert train(report_to=["tensorboard", "wandb"])["steps"] == 2
    warnings = [r.getMessage() for r in caplog.records if "failed and is switched off" in r.getMessage()]
    assert len(warnings) == 1 and "the run goes on" in warnings[0]
    (said,) = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert said.startswith("report_to: wandb is left out, and the run goes on without it: ")
    assert "install" in said, "and what to do"


# The table of episodes that people look at.

FAILED = ToolResult("Error: by | zero\nagain", "divide", ToolErrorKind.RAISED)


def batch(prompt: Any, rewards: dict[str, float | None]) -> RolloutBatch:
    said = 'call add {"a": 1, "b": 2}\ncall divide {"a": 1, "b": 0}'
    tools = ScriptedTools({"add": lambda a, b: str(a + b), "divide": lambda a, b: FAILED})
    played = run_episode(ScriptedEngine([ByteChat.say(said), ByteChat.say("It is 3.")]), tools)
    made = RolloutBatch(episodes=(Scored({"prompt": prompt}, played),), step=4).numbered(17)
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
