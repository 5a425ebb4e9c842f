"""A file of lines that begins anew past a size: whole for its readers, and for a resumed run."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest

from toolgrpo.observe.line_file import LineFile, lines_of, parts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


def line_file(path: Path, limit: int = 100) -> LineFile:
    return LineFile(path, what="the lines", remedy="Mend it.", limit=limit)


def written(path: Path) -> list[str]:
    return [line.text.removesuffix("\n") for line in lines_of(path) if not line.fault]


def test_past_its_size_a_file_is_set_aside_gzipped_and_read_as_one(path: Path, tmp_path: Path) -> None:
    file = line_file(path)
    lines = [f"line {number} {'é' * (number % 40)}" for number in range(40)]
    for line in lines:
        file.write([f"{line}\n"])
        assert written(path) == lines[: lines.index(line) + 1], "a reader finds every line at any time"
    file.close()
    names = [part.name for part in parts(path)]
    assert len(names) > 5 and names[0] == "a.jsonl.0001.gz" and names[-1] == "a.jsonl"
    assert not list(tmp_path.glob("*.half"))
    again = line_file(path)
    again.write(["one more\n"])
    assert written(path) == [*lines, "one more"]
    assert again.sync() == sum(len(line.encode()) + 1 for line in [*lines, "one more"])
    again.close()


def test_a_part_that_is_gzipped_while_the_folder_is_listed_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("two\n")
    aside = path.with_name("a.jsonl.0001")
    aside.write_text("one\n")
    listed = os.listdir

    def then_gzipped(folder: Path) -> list[str]:
        names = listed(folder)
        if aside.is_file():
            aside.with_name("a.jsonl.0001.gz").write_bytes(gzip.compress(aside.read_bytes()))
            aside.unlink()
        return names

    monkeypatch.setattr(os, "listdir", then_gzipped)
    assert written(path) == ["one", "two"]


@pytest.mark.property
def test_a_resumed_run_cuts_where_its_checkpoint_was_in_whichever_part_that_is(tmp_path: Path) -> None:
    for seed in range(60):
        drawn = random.Random(seed)
        path = tmp_path / str(seed) / "a.jsonl"
        file = line_file(path, limit=drawn.randrange(1, 200))
        places = [0]
        for number in range(drawn.randrange(1, 30)):
            file.write([f"{number} {'x' * drawn.randrange(60)}\n" for _ in range(drawn.randrange(1, 4))])
            places.append(file.sync())
        before = written(path)
        whole = "".join(f"{line}\n" for line in before).encode()
        place = drawn.choice(places)
        assert file.cut(place) is None, seed
        assert file.sync() == place
        kept = whole[:place].decode().splitlines()
        assert written(path) == kept, seed
        file.write(["again\n"])
        assert written(path) == [*kept, "again"], seed
        file.close()


def test_a_kill_while_a_part_is_gzipped_loses_nothing(path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.0001").write_text("first\n")
    (tmp_path / "a.jsonl.0001.gz.half").write_bytes(gzip.compress(b"fir")[:8])
    (tmp_path / "a.jsonl.0002").write_text("second\n")  # killed between the two forms
    (tmp_path / "a.jsonl.0002.gz").write_bytes(gzip.compress(b"second\n"))
    path.write_text("third\ntor")
    assert written(path) == ["first", "second", "third"]
    file = line_file(path)
    file.write(["fourth\n"])
    assert written(path) == ["first", "second", "third", "fourth"]
    assert file.cut(len("first\n")) is None
    assert written(path) == ["first"]
    assert [part.name for part in parts(path)] == ["a.jsonl.0001", "a.jsonl"]


def test_a_damaged_part_is_read_as_far_as_it_goes(path: Path, tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"line {number}\n" for number in range(20000)).encode())
    (tmp_path / "a.jsonl.0001.gz").write_bytes(packed[: len(packed) // 2])
    path.write_text("after\n")
    read = written(path)
    assert read[-1] == "after" and 0 < len(read) < 20000 and read[0] == "line 0"


def test_what_was_there_before_is_set_aside_with_its_parts(path: Path, tmp_path: Path) -> None:
    for run in ("old", "new"):
        file = line_file(path, limit=20)
        file.start_anew()
        file.write([f"{run} 1 {'x' * 30}\n"])
        file.write([f"{run} 2\n"])
        file.close()
    assert [line[:5] for line in written(path)] == ["new 1", "new 2"]
    assert [line[:5] for line in written(tmp_path / "a.jsonl.previous")] == ["old 1", "old 2"]
