"""Which checkpoints count: only whole ones, whatever a kill left behind."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolgrpo.trainer.checkpoint_files import (
    begin,
    checkpoint_folder,
    complete_checkpoints,
    is_foreign,
    rotate,
    seal,
    why_incomplete,
)


def saved(output: Path, step: int, *, sealed: bool = True) -> Path:
    folder = checkpoint_folder(output, step)
    begin(folder)
    (folder / "model.safetensors").write_bytes(b"m" * 100)
    (folder / "global_step1").mkdir()
    (folder / "global_step1" / "optimizer.pt").write_bytes(b"o" * 50)
    (folder / "trainer_state.json").write_text("{}")
    if sealed:
        seal(folder, step=step, n_processes=2)
    return folder


def steps(output: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(output)]


def test_what_was_begun_and_not_sealed_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    folder = saved(tmp_path, 2, sealed=False)
    assert steps(tmp_path) == [1] and not is_foreign(folder)
    begin(folder)
    assert not (folder / "model.safetensors").exists(), "saving again starts from an empty folder"


def test_a_checkpoint_of_trl_is_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    assert not is_foreign(folder)
    (folder / "trainer_state.json").write_text("{}")
    assert is_foreign(folder) and steps(tmp_path) == []


def test_the_last_one_is_the_one_sealed_last(tmp_path: Path) -> None:
    """A folder may hold the checkpoints of an older, longer run."""
    for step in (10, 20, 1, 2):
        saved(tmp_path, step)
    assert steps(tmp_path) == [10, 20, 1, 2]
    rotate(tmp_path, keep=2)
    assert steps(tmp_path) == [1, 2]


def test_rotation_keeps_the_best_and_never_counts_what_is_torn(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    torn = saved(tmp_path, 5, sealed=False)
    rotate(tmp_path, keep=None)
    assert torn.exists(), "without a limit nothing is deleted"
    rotate(tmp_path, keep=2, best=tmp_path / "checkpoint-1")
    assert steps(tmp_path) == [1, 4] and not torn.exists()
    rotate(tmp_path, keep=None)
    assert steps(tmp_path) == [1, 4]


def test_whatever_part_of_a_checkpoint_a_kill_leaves_it_does_not_count(tmp_path: Path) -> None:
    """Deleting is killed halfway too: any missing or shorter file is seen."""
    rng = random.Random(0)
    for trial in range(60):
        output = tmp_path / str(trial)
        saved(output, 1)
        folder = saved(output, 2)
        path = rng.choice([p for p in sorted(folder.rglob("*")) if p.is_file()])
        if rng.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
        assert steps(output) == [1]
        shutil.rmtree(output)


@pytest.mark.parametrize("again", ["rotate", "begin"])
def test_a_deletion_that_was_killed_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """After any number of removals: it is neither a checkpoint of ours nor one of Transformers, and goes the next time."""

    class Killed(BaseException):
        pass

    removals = {"unlink": Path.unlink, "rmdir": Path.rmdir}
    for survived in range(5):
        output = tmp_path / str(survived)
        for step in (1, 2, 3):
            saved(output, step)
        left = iter(range(survived))

        def dying(name: str, left: Iterator[int] = left) -> Callable[..., None]:
            def removal(path: Path, **options: bool) -> None:
                if next(left, None) is None:
                    raise Killed
                removals[name](path, **options)

            return removal

        with monkeypatch.context() as patch:
            for name in removals:
                patch.setattr(Path, name, dying(name))
            with pytest.raises(Killed):
                rotate(output, keep=2)
        half = checkpoint_folder(output, 1)
        assert half.exists() and not is_foreign(half)
        assert steps(output) == ([1, 2, 3] if survived == 0 else [2, 3])
        if again == "rotate":
            rotate(output, keep=2)
            assert not half.exists()
        else:
            assert why_incomplete(saved(output, 1)) is None
            assert steps(output) == [2, 3, 1]


def test_at_no_moment_of_sealing_is_it_taken_for_one_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    sync = os.fsync
    folder = saved(tmp_path, 1, sealed=False)

    def watching(descriptor: int) -> None:
        seen.append(is_foreign(folder))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watching)
    seal(folder, step=1, n_processes=1)
    assert seen and not any(seen)
    assert steps(tmp_path) == [1] and sorted(path.name for path in folder.iterdir())[-1] == "trainer_state.json"
