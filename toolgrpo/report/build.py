"""Make the report of a run, or of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolgrpo import __version__
from toolgrpo.errors import ConfigError
from toolgrpo.report.files import MOST_EPISODES, Episodes, RunPieces, read_run, run_folder, vocabulary_of
from toolgrpo.report.findings import run_findings
from toolgrpo.report.html import PageWriter
from toolgrpo.storage import storage_errors

__all__ = ["Built", "build_report"]


@dataclass(frozen=True, slots=True)
class Built:
    """A report that was written."""

    path: Path
    n_bytes: int
    n_episodes: int  # recorded
    n_shown: int  # in the page

    @property
    def url(self) -> str:
        return self.path.resolve().as_uri()


def build_report(
    folders: Sequence[Path], to: Path | None = None, *, live: bool = False, most_episodes: int = MOST_EPISODES
) -> Built:
    """Read one or two output folders and write one page, into the first of them unless told otherwise."""
    places = [run_folder(folder) for folder in folders]
    path = to or folders[0] / "report.html"
    with storage_errors(f"the report {path}", path.parent):
        names = " and ".join(folder.resolve().name for folder in folders)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            page = PageWriter(path, f"{names} · toolgrpo report", live=live)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise ConfigError(
                f"the report cannot be written to {path}: {error.strerror}; give another place with --out"
            ) from error
        try:
            runs, shown = _write(page, folders, places, most_episodes)
        except BaseException:
            page.abandon()
            raise
    return Built(path, path.stat().st_size, sum(run.n_episodes for run in runs), shown)


def _write(
    page: PageWriter, folders: Sequence[Path], places: Sequence[Path], most_episodes: int
) -> tuple[list[RunPieces], int]:
    episodes = Episodes()
    runs = []
    for number, place in enumerate(places):
        run = read_run(place, number, episodes, page.piece, most_episodes=most_episodes)
        run.name = folders[number].resolve().name
        runs.append(run)
    described = [
        {**_run_json(run, place), "vocabulary": page.piece(vocabulary_of(place, run.token_ids))}
        for run, place in zip(runs, places, strict=True)
    ]
    page.finish({"version": __version__, "runs": described, "episodes": episodes.as_json()})
    return runs, len(episodes.rows["n"])


def _run_json(run: RunPieces, place: Path) -> dict[str, object]:
    return {
        "name": run.name,
        "folder": str(place.resolve()),
        "facts": run.facts,
        "chunks": run.chunks,
        "sums": run.sums,
        "steps": [{name: one.get(name) for name in ("step", "metrics", "phases", "time")} for one in run.steps],
        "measured": run.measured,
        "events": run.events,
        "findings": run_findings(run),
        "recorded": run.n_episodes,
    }
