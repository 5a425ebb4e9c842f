"""Make the report of a run, or of two side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolgrpo import __version__
from toolgrpo.errors import ConfigError
from toolgrpo.observe.doctor import over_run
from toolgrpo.report.files import run_folder, step_lines
from toolgrpo.report.html import PageWriter
from toolgrpo.report.run_lines import Names, write_run
from toolgrpo.storage import storage_errors

MOST_EPISODES = 12_000


# What the doctor's rules say of a whole run, for the page: a list of
# `{rule, sentence, link, steps, filter}`.
#
# The rules and their sentences are those of `observe/doctor.py`. `filter` is what the page's search
# shows as examples of a rule: the same words as in a link to the search.

# The episodes that show what a rule means.
_EXAMPLES = {
    "world_fails": {"cause": "timeout"},
    "no_tool_calls": {"ready": "nocall"},
    "groups_all_failed": {"success": "no", "ready": "dead"},
    "groups_all_solved": {"success": "yes", "ready": "dead"},
    "groups_all_alike": {"ready": "dead"},
    "broken_calls": {"ready": "failedcall"},
    "cut_by_length": {"ready": "cut"},
    "tool_fails": {"ready": "failedcall"},
    "void_turns": {"ready": "void"},
    "reward_without_success": {"ready": "hack"},
}


def run_findings(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each rule that held, with its last sentence and the steps at which it held.

    `lines` are those of `steps.jsonl`.
    """
    logs = ({**_numbers(line["metrics"]), "step": line["step"] + 1} for line in lines if line["kind"] == "step")
    found: dict[str, dict[str, Any]] = {}
    for spoken in over_run(logs):
        steps = [*found.get(spoken.rule, {"steps": []})["steps"], spoken.step]
        found[spoken.rule] = {
            "rule": spoken.rule,
            "sentence": spoken.sentence,
            "link": spoken.link,
            "steps": steps,
            "filter": {"from": max(1, spoken.step - 10), "to": spoken.step, **_EXAMPLES.get(spoken.rule, {})},
        }
    return list(found.values())


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


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
