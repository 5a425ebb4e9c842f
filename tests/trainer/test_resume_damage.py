"""A damaged checkpoint is never resumed from: the one before it is, and the terminal says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.trainings import recorded
from toolgrpo.errors import ConfigError
from toolgrpo.trainer import checkpoint_files

pytestmark = pytest.mark.e2e

SEAL = "toolgrpo_complete.json"
MODEL = "model.safetensors"
FILES = (MODEL, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "toolgrpo_place_0.pt", SEAL)


def flip_bit(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def other_kind(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit at its head": lambda path: flip_bit(path, 0.0),
    "a bit near its end": lambda path: flip_bit(path, 0.9),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "nothing in it": lambda path: path.write_bytes(b""),
    "more than it was": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "not there": lambda path: path.unlink(),
    "a folder": lambda path: other_kind(path, Path.mkdir),
    "a link to itself": lambda path: other_kind(path, lambda link: link.symlink_to(link)),
}


@pytest.fixture(scope="module")
def trained(train_tiny: ModuleType, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps with a checkpoint of each."""
    out: Path = tmp_path_factory.mktemp("trained")
    train_tiny.run(train_tiny.Job(**job(out, tiny_model)))
    return out


def job(out: Path, model: Path, **config: Any) -> dict[str, Any]:
    of_each_step = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    return {"out": str(out), "model": str(model), "config": {**of_each_step, **config}}


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resumed_from(out: Path, wanted: str = "auto") -> tuple[str | None, str]:
    """The name of the folder that a run would go on from, and what it says."""
    said: list[str] = []
    folder = checkpoint_files.to_resume(out, wanted, said.append)
    return None if folder is None else folder.name, "\n".join(said)


def test_the_files_of_the_table_are_all_there_are(trained: Path) -> None:
    written = {path.name for path in (trained / "checkpoint-3").iterdir()}
    assert set(FILES) <= written
    assert resumed_from(trained) == ("checkpoint-3", "")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", DAMAGES)
def test_every_damage_falls_back_to_the_checkpoint_before_and_is_said(run: Path, name: str, what: str) -> None:
    DAMAGES[what](run / "checkpoint-3" / name)
    folder, said = resumed_from(run)
    assert folder == "checkpoint-2"
    (line,) = said.splitlines()
    assert line.startswith(f"passed over {run / 'checkpoint-3'}: ")
    assert ("seal" if name == SEAL else name) in line
    with pytest.raises(ConfigError, match=r"cannot resume from .*checkpoint-3.* last complete .*checkpoint-2\."):
        resumed_from(run, str(run / "checkpoint-3"))


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": []},
        {"files": {MODEL: None}},
        {"files": {MODEL: {"bytes": None, "digest": ""}}},
        {"files": {MODEL: {"bytes": float("inf"), "digest": ""}}},
        {"files": {"\0": {"bytes": 1, "digest": ""}}},
        {"sealed_at": "yesterday"},
        {"sealed_at": None},
        {"sealed_at": float("nan")},
        {"sealed_at": float("inf")},
        {"step": []},
        {"n_processes": {}},
    ],
    ids=str,
)
def test_a_seal_that_was_written_with_odd_values_is_passed_over(run: Path, change: dict[str, Any]) -> None:
    path = run / "checkpoint-3" / SEAL
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "step": 30}))
    assert resumed_from(run)[0] == "checkpoint-2", "it is not as it was written"
    content |= change
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": checkpoint_files._digest_of_json(content)}))
    folder, said = resumed_from(run)
    assert folder == "checkpoint-2" and "checkpoint-3" in said


@pytest.mark.parametrize("content", ["null", "3", "[]", '"x"', "[" * 10**5, '{"digest": ' * 10**5, "9" * 10**4])
def test_a_seal_that_is_no_seal_is_passed_over(run: Path, content: str) -> None:
    (run / "checkpoint-3" / SEAL).write_text(content)
    folder, said = resumed_from(run)
    assert folder == "checkpoint-2" and "its seal cannot be read" in said


def test_every_checkpoint_damaged_is_said_before_the_run_begins_anew(run: Path) -> None:
    for step in (1, 2, 3):
        flip_bit(run / f"checkpoint-{step}" / MODEL, 0.7)
    folder, said = resumed_from(run)
    assert folder is None
    assert said.count("has changed since it was saved") == 3 and "no checkpoint in" in said
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        resumed_from(run, "true")


def test_a_flipped_bit_does_not_change_the_run(
    train_tiny: ModuleType, tiny_model: Path, run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: resumed from the checkpoint before, with the results and the recording of the undamaged run."""
    flip_bit(run / "checkpoint-3" / MODEL, 0.9)
    whole = json.loads((trained / "rank0.json").read_text())
    resumed = train_tiny.run(train_tiny.Job(**job(run, tiny_model, resume_from_checkpoint="auto")))
    shown = "".join(capsys.readouterr().err.split())
    assert "checkpoint-3:itsfilemodel.safetensorshaschanged" in shown and "resumingfrom" in shown
    for key in ("losses", "rewards", "weights", "n_episodes"):
        assert resumed[key] == whole[key]
    assert recorded(run) == recorded(trained)


def test_files_named_like_checkpoints_disturb_no_run(
    train_tiny: ModuleType, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note, an archive, links, and somebody's own folder; one of them in the way of a step."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("checkpoint-notes.txt", "checkpoint-1.zip", "checkpoint-2", "checkpoint-"):
        (out / name).write_text("mine")
    (out / "checkpoint-7").symlink_to(out / "checkpoint-7")
    (out / "checkpoint-8").symlink_to(tmp_path / "nowhere")
    (out / "checkpoint-1-good").mkdir()
    (out / "checkpoint-1-good" / "weights").write_text("mine")
    mine = {path.name for path in out.iterdir()} - {"checkpoint-2"}
    for resume in ("auto", "auto"):
        train_tiny.run(train_tiny.Job(**job(out, tiny_model, save_total_limit=1, resume_from_checkpoint=resume)))
    found = {path.name for path in out.glob("checkpoint-*")}
    assert found == mine | {"checkpoint-3", "checkpoint-2.previous"}
    assert (out / "checkpoint-2.previous").read_text() == "mine"
    assert (out / "checkpoint-1-good" / "weights").read_text() == "mine"
    assert "passed over" not in capsys.readouterr().err
