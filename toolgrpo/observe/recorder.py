"""Write every trajectory as one JSON line, as it was trained on.

A line is `Trajectory.to_record()` plus `step`, `mode`, `reward_given` and the row's own columns, so
that a run can be read, searched and replayed without the trainer: `Trajectory.from_record` takes
what `read_episodes` gives. Each process writes its own file (`episodes_path`). A checkpoint
remembers how long the file was, and a resumed run cuts it there, so no episode stands in it twice;
a run that starts from the beginning sets an older recording aside.

A line holds no character that a terminal obeys or that `str.splitlines` takes for an end: those
stand there as escapes.

Not covered: rotation; a long run writes a large file, and `record_episodes: false` turns it off.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

from toolgrpo.errors import StorageError
from toolgrpo.plain_text import plain_json
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.rollout.observers import Observer

__all__ = ["EpisodeRecorder", "episodes_path", "read_episodes"]


def episodes_path(output_dir: Path, process_index: int) -> Path:
    """Return the recording of one process: `episodes.jsonl`, `episodes.rank1.jsonl` and so on."""
    return output_dir / ("episodes.jsonl" if process_index == 0 else f"episodes.rank{process_index}.jsonl")


class EpisodeRecorder(Observer):
    """Appends to one file what is trained on or evaluated; with no path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def batch_done(self, batch: RolloutBatch) -> None:
        """Append one line per trajectory and flush, so that a killed run keeps what it did."""
        if self.path is None or batch.mode == "heldout":
            return
        lines = []
        for episode in batch.episodes:
            line = {
                "step": batch.step,
                "mode": batch.mode,
                "reward_given": episode.total,
                "drop": None if episode.drop is None else {"cause": episode.drop.cause, "reason": episode.drop.reason},
                "row": dict(episode.row),
                **({} if episode.trained else {"trained": False}),
                **episode.trajectory.to_record(),
            }
            lines.append(plain_json(json.dumps(line, ensure_ascii=False, default=str)) + "\n")
        try:
            file = self._opened(self.path)
            file.writelines(lines)
            file.flush()
        except OSError as error:
            self._drop()
            raise _not_written(self.path, error) from error

    def sync(self) -> int:
        """Bring everything to the disk, and return how many bytes the recording has."""
        if self.path is None or self._file is None:
            return self.path.stat().st_size if self.path is not None and self.path.exists() else 0
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._drop()
            raise _not_written(self.path, error) from error
        return os.fstat(self._file.fileno()).st_size

    def start_anew(self) -> None:
        """Set aside, as `<name>.previous`, what an earlier run recorded under this name."""
        if self.path is None or self._file is not None or not self.path.is_file():
            return
        try:
            self.path.replace(self.path.with_name(f"{self.path.name}.previous"))
        except OSError as error:
            raise _not_written(self.path, error) from error

    def cut(self, n_bytes: int) -> str | None:
        """Forget what was recorded after the first `n_bytes`:
        the resumed run records those episodes again.

        Returns what is wrong with the recording up to there, or None. A line that was torn there is
        given up.
        """
        self.close()
        if self.path is None:
            return None
        try:
            return _cut(self.path, n_bytes)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self, path: Path) -> IO[str]:
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
        return self._file

    def _drop(self) -> None:
        """Forget the file after a failure; closing it would write the rest and fail again."""
        with contextlib.suppress(OSError):
            self.close()
        self._file = None


def _cut(path: Path, n_bytes: int) -> str | None:
    if not path.is_file():
        return f"{path} is missing; it had {n_bytes} bytes" if n_bytes else None
    size = path.stat().st_size
    if size < n_bytes:
        return f"{path} has {size} of {n_bytes} bytes, so episodes are missing at its end"
    with path.open("rb+") as file:
        file.truncate(n_bytes)
        file.seek(max(0, n_bytes - 1))
        whole = file.read(1) in (b"", b"\n")
    return None if whole else f"{path} was changed: a line ends after {n_bytes} bytes no more"


def _cut_torn_line(path: Path) -> None:
    """Cut off the half line that a killed run may have left: nothing may be appended to it."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                break
            end = start
        whole = start + newline + 1 if end > 0 else 0
        file.truncate(whole)


def _not_written(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the episodes could not be recorded in {path}: {error.strerror or error}. Free some space and go on with "
        f"resume_from_checkpoint auto, or turn the recording off with record_episodes false."
    )


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Read all complete lines of a recording; a last line that was torn by a kill is left out."""
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            records.append(json.loads(line))
    return records
