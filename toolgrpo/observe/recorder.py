"""Write every trajectory as one JSON line, as it was trained on.

A line is `Trajectory.to_record()` plus `step`, `mode`, `reward_given` and the row's own columns, so that a run can be
read, searched and replayed without the trainer. Not covered: rotation; a long run writes a large file, and
`record_episodes: false` turns it off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolgrpo.trajectory import Trajectory

__all__ = ["EpisodeRecorder", "read_episodes"]


class EpisodeRecorder:
    """Appends to one file; with no path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def record(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float],
        rows: Sequence[Mapping[str, Any]],
        *,
        step: int,
        mode: str,
    ) -> None:
        """Append one line per trajectory and flush, so that a killed run keeps what it did."""
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        for trajectory, reward, row in zip(trajectories, rewards, rows, strict=True):
            columns = {key: value for key, value in row.items() if key != "trajectories"}
            line = {
                "step": step,
                "mode": mode,
                "reward_given": reward,
                "row": columns,
                **trajectory.to_record(),
            }
            self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a recording; a last line that was torn by a kill is left out."""
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            records.append(json.loads(line))
    return records
