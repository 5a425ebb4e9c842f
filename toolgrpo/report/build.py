"""Make the report of a run, or of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from toolgrpo import __version__
from toolgrpo.errors import ConfigError
from toolgrpo.report.files import run_folder, step_lines
from toolgrpo.report.findings import run_findings
from toolgrpo.report.html import PageWriter
from toolgrpo.report.run_lines import Names, write_run
from toolgrpo.storage import storage_errors

MOST_EPISODES = 12_000


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
            n_episodes, n_shown = _write(page, folders, places, most_episodes)
        except BaseException:
            page.abandon()
            raise
    return Built(path, path.stat().st_size, n_episodes, n_shown)


def _write(page: PageWriter, folders: Sequence[Path], places: Sequence[Path], most_episodes: int) -> tuple[int, int]:
    """Write all runs; return how many episodes were recorded, and how many the page has."""
    names, described, n_episodes, n_shown = Names(), [], 0, 0
    for number, (folder, place) in enumerate(zip(folders, places, strict=True)):
        run = write_run(place, number, names, page, most_episodes=most_episodes)
        n_episodes, n_shown = n_episodes + run.n_episodes, n_shown + run.n_shown
        described.append(
            {
                "name": folder.resolve().name,
                "folder": str(place.resolve()),
                "facts": run.facts,
                "vocabulary": run.vocabulary,
                "findings": run_findings(step_lines(place)),
                "recorded": run.n_episodes,
            }
        )
    page.finish({"version": __version__, "runs": described, **asdict(names)})
    return n_episodes, n_shown
