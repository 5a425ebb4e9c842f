"""Files of a run: modes that follow the umask, what a run was given for its owner alone, and devices."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import by_length, run_to_end, varied
from toolgrpo.commands.main import read
from toolgrpo.commands.run_file import keep_run_config, run_text
from toolgrpo.commands.terminal import RunLog
from toolgrpo.observe.line_file import LineFile
from toolgrpo.support.storage import write_whole
from toolgrpo.testing import tiny_trainer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("left", ["", "half"])
def test_what_a_run_was_given_is_for_its_owner(left: str, tmp_path: Path) -> None:
    for name in ("run.yaml", "run.yaml.half") if left else ():
        (tmp_path / name).write_text("of a killed run\n")
        (tmp_path / name).chmod(0o666)
    keep_run_config(run_text(read("chat", ["nano"])), tmp_path)
    assert "nano" in (tmp_path / "run.yaml").read_text() and mode(tmp_path / "run.yaml") == 0o600
    assert not list(tmp_path.glob("*.half"))


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "one", "before\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "one", "\ud800")
    assert (tmp_path / "one").read_text() == "before\n" and not list(tmp_path.glob("*.half"))


def test_weights_follow_the_umask(tmp_path: Path) -> None:
    earlier = os.umask(0o027)
    try:
        saving: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
        trainer = run_to_end(tiny_trainer(tmp_path, by_length, varied, quiet=True, **saving))
        trainer.save_model(str(tmp_path))
    finally:
        os.umask(earlier)
    weights = list(tmp_path.rglob("*.safetensors"))
    assert len(weights) == 2 and {mode(path) for path in weights} == {0o640}


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """`/dev/null` was removed by a recording into it."""
    nowhere, looks_like_one = Path(os.devnull), tmp_path / "null"
    before = nowhere.stat()
    looks_like_one.symlink_to(nowhere)
    for path in (nowhere, looks_like_one):
        RunLog(path).write("ours\n")
        file = LineFile(path, what="it", remedy="")
        file.write(["ours\n"])
        file.close()
    assert os.path.samestat(before, nowhere.stat()) and looks_like_one.is_symlink()
