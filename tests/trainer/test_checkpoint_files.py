"""Which checkpoints count: only whole ones, whatever a kill left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from toolgrpo.errors import ConfigError
from toolgrpo.trainer import checkpoint_files as files


def saved(output: Path, step: int, *, sealed: bool = True, run: str | None = None) -> Path:
    folder = files.checkpoint_folder(output, step)
    files.begin(folder)
    (folder / "model.safetensors").write_bytes(b"m" * 100)
    (folder / "global_step1").mkdir()
    (folder / "global_step1" / "optimizer.pt").write_bytes(b"o" * 50)
    (folder / "trainer_state.json").write_text("{}")
    if sealed:
        files.seal(folder, step=step, n_processes=2, run=run)
    return folder


def steps(output: Path) -> list[int]:
    return [checkpoint.step for checkpoint in files.complete_checkpoints(output)]


def test_what_was_not_sealed_does_not_count_whether_ours_or_of_trl(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    folder = saved(tmp_path, 2, sealed=False)
    assert steps(tmp_path) == [1] and not files.is_foreign(folder)
    files.begin(folder)
    assert not (folder / "model.safetensors").exists(), "saving again starts from an empty folder"
    of_trl = tmp_path / "checkpoint-7"
    of_trl.mkdir()
    assert not files.is_foreign(of_trl)
    (of_trl / "trainer_state.json").write_text("{}")
    assert files.is_foreign(of_trl) and steps(tmp_path) == [1]


def test_rotation_keeps_those_sealed_last_and_the_best_and_never_counts_what_is_torn(tmp_path: Path) -> None:
    """A folder may hold the checkpoints of an older, longer run."""
    for step in (10, 20, 1, 2, 3):
        saved(tmp_path, step)
    assert steps(tmp_path) == [10, 20, 1, 2, 3]
    files.rotate(tmp_path, keep=3)
    torn = saved(tmp_path, 4, sealed=False)
    files.rotate(tmp_path, keep=None)
    assert steps(tmp_path) == [1, 2, 3] and torn.exists(), "without a limit nothing is deleted"
    files.rotate(tmp_path, keep=2, best=tmp_path / "checkpoint-1")
    assert steps(tmp_path) == [1, 3] and not torn.exists()


def test_a_checkpoint_of_which_a_file_is_gone_or_shorter_does_not_count(tmp_path: Path) -> None:
    """As a kill leaves it: deleting is killed halfway too."""
    saved(tmp_path, 1)
    folder = saved(tmp_path, 2)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for size in (0, len(whole) // 2, len(whole) - 2):  # a seal ends with a newline that it does not need
            path.write_bytes(whole[:size])
            assert steps(tmp_path) == [1], path
        path.unlink()
        assert steps(tmp_path) == [1], path
        path.write_bytes(whole)
    assert steps(tmp_path) == [1, 2]


def dying(removal: Callable[..., None], left: Iterator[int]) -> Callable[..., None]:
    """This removal until the process is killed: when none is left."""

    def removed(path: Path, **options: bool) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        removal(path, **options)

    return removed


@pytest.mark.parametrize("again", ["rotate", "begin"])
def test_a_deletion_that_was_killed_leaves_nothing_that_counts(tmp_path: Path, again: str) -> None:
    """After any number of removals: it is neither a checkpoint of ours nor one of Transformers, and goes the next time."""
    for survived in range(5):
        output, left = tmp_path / str(survived), iter(range(survived))
        for step in (1, 2, 3):
            saved(output, step)
        killed = mock.patch.multiple(Path, unlink=dying(Path.unlink, left), rmdir=dying(Path.rmdir, left))
        with killed, pytest.raises(KeyboardInterrupt):
            files.rotate(output, keep=2)
        half = files.checkpoint_folder(output, 1)
        assert half.exists() and not files.is_foreign(half)
        assert steps(output) == ([1, 2, 3] if survived == 0 else [2, 3])
        if again == "rotate":
            files.rotate(output, keep=2)
            assert not half.exists()
        else:
            assert files.why_incomplete(saved(output, 1)) is None
            assert steps(output) == [2, 3, 1]


def test_at_no_moment_of_sealing_is_it_taken_for_one_of_transformers(tmp_path: Path) -> None:
    seen: list[bool] = []
    folder = saved(tmp_path, 1, sealed=False)
    with mock.patch.object(os, "fsync", side_effect=lambda descriptor: seen.append(files.is_foreign(folder))):
        files.seal(folder, step=1, n_processes=1)
    assert seen and not any(seen)
    assert steps(tmp_path) == [1] and sorted(path.name for path in folder.iterdir())[-1] == "trainer_state.json"


# Whose checkpoints these are.

FINISHED = ("model.safetensors", "config.json", "Modelfile", "README.md", "summary.json", "report.html", "steps.jsonl")


def finished(output: Path, run: str | None = "aa", *more: str) -> dict[str, bytes]:
    """The folder of a run that has ended, as a tree of what is in its files."""
    output.mkdir(exist_ok=True)
    for name in (*FINISHED, "episodes.jsonl", "train.log", "train.rank1.log", "agent.log", *more):
        (output / name).write_text(f"{name} of {run}")
    (output / "run.yaml").write_text("max_steps: 14\n" + (f"run_id: {run}\n" if run else ""))
    saved(output, 14, run=run)
    return tree(output)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("run", ["aa", None], ids=["with an identity", "of an older version"])
@pytest.mark.parametrize("wanted", [None, "false", "auto"])
def test_a_run_that_begins_sets_the_one_before_aside_whole(tmp_path: Path, wanted: Any, run: str | None) -> None:
    """`auto` goes on with it, where the checkpoint is one; then nothing moves."""
    before, said = finished(tmp_path, run), list[str]()
    (tmp_path / "my_tools.py").write_text("mine")
    begun = files.begin_run(tmp_path, wanted, said.append)
    if wanted == "auto":
        assert (begun.run, begun.checkpoint) == (run, tmp_path / "checkpoint-14") and not said
        assert tree(tmp_path) == {**before, "my_tools.py": b"mine"}
        return
    assert begun.checkpoint is None and begun.run not in (None, run)
    assert tree(tmp_path / "earlier-1") == before
    assert {one.name for one in tmp_path.iterdir()} == {"earlier-1", "my_tools.py"}
    assert len(said) == 1 and str(tmp_path / "earlier-1") in said[0]
    finished(tmp_path, "bb")
    files.begin_run(tmp_path, None, said.append)
    assert tree(tmp_path / "earlier-1") == before and (tmp_path / "earlier-2" / "Modelfile").is_file()


def test_nothing_of_another_run_is_gone_on_from(tmp_path: Path) -> None:
    """The second run was killed before it saved; what an older version left in between is of nobody."""
    said: list[str] = []
    finished(tmp_path, "bb")
    for step, run in ((20, "aa"), (30, None)):
        saved(tmp_path, step, run=run)
    assert files.to_resume(tmp_path, "auto", said.append) == tmp_path / "checkpoint-14"
    assert len(said) == 2 and "checkpoint-20: " in min(said) and "checkpoint-30: " in max(said)
    assert all(line.endswith(": it belongs to another run") for line in said)
    shutil.rmtree(tmp_path / "checkpoint-14")
    assert files.to_resume(tmp_path, "auto", said.append) is None
    with pytest.raises(ConfigError, match="there is no complete checkpoint in"):
        files.to_resume(tmp_path, "true", said.append)
    named = tmp_path / "checkpoint-20"
    assert files.to_resume(tmp_path, str(named), said.append) == named
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(ConfigError, match="checkpoint-20, checkpoint-30"):
        files.to_resume(tmp_path, "auto", said.append)


def test_a_checkpoint_from_elsewhere_begins_a_run_in_its_folder(tmp_path: Path) -> None:
    finished(tmp_path / "one", "aa")
    finished(tmp_path / "two", "bb")
    begun = files.begin_run(tmp_path / "two", tmp_path / "one" / "checkpoint-14", lambda text: None)
    assert begun.checkpoint == tmp_path / "one" / "checkpoint-14" and begun.run not in ("aa", "bb", None)
    assert (tmp_path / "two" / "earlier-1" / "checkpoint-14").is_dir()
    moved = shutil.move(tmp_path / "one" / "checkpoint-14", tmp_path / "kept")
    assert files.begin_run(tmp_path / "one", moved, lambda text: None).run == "aa", "the run's own, wherever it lies"
    assert (tmp_path / "one" / "episodes.jsonl").is_file()


def test_a_run_does_not_begin_over_the_model_that_it_trains(tmp_path: Path) -> None:
    before = finished(tmp_path)
    for model in (tmp_path, tmp_path / "checkpoint-14"):
        with pytest.raises(ConfigError, match="is in the output folder"):
            files.begin_run(tmp_path, None, lambda text: None, model=str(model))
        assert files.begin_run(tmp_path, "auto", lambda text: None, model=str(model)).run == "aa"
    assert tree(tmp_path) == before


def test_what_came_to_nothing_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_id: aa\n")
    (tmp_path / "train.log").write_text("it ended while it loaded")
    begun = files.begin_run(tmp_path, "auto", lambda text: None)
    assert {one.name for one in tmp_path.iterdir()} == {"train.log"}
    checkpoint = files.checkpoint_in(saved(tmp_path, 1, run=begun.run))
    assert checkpoint is not None and checkpoint.run == begun.run
    assert files.begin_run(tmp_path, "auto", lambda text: None).run == begun.run
    files.seal(checkpoint.path, step=1, n_processes=2, run=begun.run)  # saved a second time
    assert files.why_unusable(checkpoint.path) is None


def test_what_transformers_alone_saved_will_do_where_a_run_seals_nothing(tmp_path: Path) -> None:
    """A supervised run of an older version; a newer one that was killed while it saved is passed over."""
    for step in (9, 10):
        files.checkpoint_folder(tmp_path, step).mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert files.to_resume(tmp_path, "auto", lambda text: None, unsealed=True) == tmp_path / "checkpoint-10"
    assert files.to_resume(tmp_path, "auto", lambda text: None) is None
    (tmp_path / "run.yaml").write_text("run_id: aa\n")
    assert files.to_resume(tmp_path, "auto", lambda text: None, unsealed=True) is None
    saved(tmp_path, 5, run="aa")
    assert files.to_resume(tmp_path, "auto", lambda text: None, unsealed=True) == tmp_path / "checkpoint-5"
