"""Nothing is written through a link that somebody planted in a run's folder, whatever writes there."""

from __future__ import annotations

import gzip
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.commands.run_config import keep_run_config, run_text
from toolgrpo.commands.terminal import RunLog
from toolgrpo.folder_claim import claim_folder, other_run_in
from toolgrpo.observe.line_file import LineFile, lines_of
from toolgrpo.report.html import PageWriter
from toolgrpo.storage import open_own, write_whole
from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.tools.workers.output_log import OutputLog

SECRET = "somebody else's\n"
PLANTS = ("a link", "a link to nothing", "a link to a link", "a hard link", "a pipe", "a socket")


def plant(kind: str, path: Path, victims: Path) -> None:
    """Put something under a name that a run writes to."""
    victim = victims / f"{path.name}.victim"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = Path.cwd()
        os.chdir(path.parent)  # the names of sockets are short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "a link to nothing":
        path.symlink_to(victims / f"{path.name}.none")
    else:
        victim.write_text(SECRET)
        if kind == "a hard link":
            os.link(victim, path)
        elif kind == "a link":
            path.symlink_to(victim)
        else:
            (victims / f"{path.name}.middle").symlink_to(victim)
            path.symlink_to(victims / f"{path.name}.middle")


def check_untouched(victims: Path) -> None:
    for victim in victims.glob("*.victim"):
        assert victim.read_text() == SECRET, victim.name
    assert not list(victims.glob("*.none"))


def whole(path: Path) -> None:
    write_whole(path, "ours\n")


def log(path: Path) -> None:
    RunLog(path).write("ours\n")


def moved_log(path: Path) -> None:
    first = RunLog(path.with_name("first.log"))
    first.write("ours\n")
    first.move(path)


def appended_log(path: Path) -> None:
    first = RunLog(path.with_name("first.log"))
    first.write("ours\n")
    first.move(path, append=True)


def lines(path: Path) -> None:
    file = LineFile(path, what="it", remedy="")
    file.write(["ours\n"])
    file.close()


def many_lines(path: Path) -> None:
    file = LineFile(path, what="it", remedy="", limit=3)
    for _ in range(3):
        file.write(["ours\n"])
    file.close()
    assert list(lines_of(path))[-3:] == ["ours\n"] * 3


def cut_lines(path: Path) -> None:
    file = LineFile(path, what="it", remedy="")
    file.cut(0)
    file.write(["ours\n"])
    file.close()


def printed(path: Path) -> None:
    tool_log = OutputLog(path)
    tool_log.record(b"ours\n")
    tool_log.close()


def page(path: Path) -> None:
    writer = PageWriter(path, "ours\n")
    writer.finish({})


WRITERS: list[Callable[[Path], None]] = [
    whole,
    log,
    moved_log,
    appended_log,
    lines,
    many_lines,
    cut_lines,
    printed,
    page,
]


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("write", WRITERS)
def test_a_file_of_a_run_is_its_own(write: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    folder, victims = tmp_path / "out", tmp_path / "victims"
    folder.mkdir()
    victims.mkdir()
    path = folder / "file.log"
    for name in (path, path.with_name("file.log.half"), path.with_name("file.log.0001.gz.half")):
        plant(kind, name, victims)
    write(path)
    check_untouched(victims)
    aside = path.with_name("file.log.0002.gz")
    text = gzip.decompress(aside.read_bytes()).decode() if aside.exists() else path.read_text()
    assert "ours" in text and stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_nlink == 1


def test_what_a_hard_link_holds_is_kept_with_its_mode(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("before\n")
    (tmp_path / "one").chmod(0o640)
    os.link(tmp_path / "one", tmp_path / "two")
    with os.fdopen(open_own(tmp_path / "two"), "a") as file:
        file.write("after\n")
    assert (tmp_path / "one").read_text() == "before\n" and (tmp_path / "two").read_text() == "before\nafter\n"
    assert stat.S_IMODE((tmp_path / "two").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", PLANTS)
def test_the_lock_of_a_run_is_its_own(kind: str, tmp_path: Path) -> None:
    folder, victims = tmp_path / "out", tmp_path / "victims"
    folder.mkdir()
    victims.mkdir()
    plant(kind, folder / ".run.lock", victims)
    assert other_run_in(folder) is None
    claim = claim_folder(folder)
    assert claim.warning is None
    check_untouched(victims)
    os.link(folder / ".run.lock", tmp_path / "second name")
    child = os.fork()  # another process meets the lock under its two names, too
    if child == 0:
        os._exit(0 if other_run_in(folder) is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    claim.release()


@pytest.mark.parametrize("kind", PLANTS)
def test_what_a_run_was_given_is_for_its_owner(kind: str, tmp_path: Path) -> None:
    folder, victims = tmp_path / "out", tmp_path / "victims"
    folder.mkdir()
    victims.mkdir()
    plant(kind, folder / "run.yaml", victims)
    keep_run_config(run_text(["--model_name_or_path", "nano"]), folder)
    check_untouched(victims)
    assert "nano" in (folder / "run.yaml").read_text()
    assert stat.S_IMODE((folder / "run.yaml").stat().st_mode) == 0o600


def train(folder: Path) -> None:
    trainer = tiny_trainer(folder, zero, speaks, quiet=True, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(folder))
    trainer.save_state()
    trainer.close()


def speaks(request: Any, number: int) -> list[int]:
    return ByteChat.say("end")


def zero(completions: list[Any], **_: Any) -> list[float]:
    return [float(number) for number in range(len(completions))]


def test_a_whole_training_writes_through_no_link(tmp_path: Path) -> None:
    """Every name that a training leaves in its folder, and each of them planted before the next."""
    earlier = os.umask(0o027)
    try:
        train(tmp_path / "first")
        names = sorted(path.name for path in (tmp_path / "first").iterdir() if path.is_file())
        assert len(names) > 8 and {"config.json", "README.md", ".run.lock", "episodes.jsonl"} <= set(names)
        for kind in ("a link", "a hard link"):
            folder, victims = tmp_path / f"after {kind}", tmp_path / f"victims of {kind}"
            folder.mkdir()
            victims.mkdir()
            for name in names:
                plant(kind, folder / name, victims)
            train(folder)
            check_untouched(victims)
            for name in names:
                assert not (folder / name).is_symlink(), name
            json.loads((folder / "config.json").read_text())
            modes = {
                name: stat.S_IMODE((folder / name).stat().st_mode) for name in names if name.endswith(".safetensors")
            }
            assert modes == dict.fromkeys(modes, 0o640) and modes, "weights follow the umask"
            weights = folder / "checkpoint-1" / "model.safetensors"
            assert stat.S_IMODE(weights.stat().st_mode) == 0o640
    finally:
        os.umask(earlier)


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """`/dev/null` was removed by a recording into it."""
    nowhere, looks_like_one = Path(os.devnull), tmp_path / "null"
    before = nowhere.stat()
    log(nowhere)
    lines(nowhere)
    assert os.path.samestat(before, nowhere.stat())
    looks_like_one.symlink_to(nowhere)
    log(looks_like_one)
    assert looks_like_one.read_text() == "ours\n"
