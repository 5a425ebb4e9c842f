"""What a report of `toolgrpo evaluate` says of rows that are to be trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from toolgrpo.errors import ConfigError
from toolgrpo.signal.row_order import RowHistory

__all__ = ["ReportedRows", "read_report", "reported_rows"]


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """What follows for the rows of a data set, by their numbers."""

    histories: Mapping[int, RowHistory]
    left_out: frozenset[int]


def read_report(path: Path) -> dict[str, tuple[int, int]]:
    """Return, by the key of each question, how many of its episodes succeeded and how many there were."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"row_weights: {path} cannot be read: {error.strerror}; give the JSON file that `toolgrpo evaluate` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"row_weights: {path} is no JSON ({error}); give the file that `toolgrpo evaluate` wrote"
        ) from error
    questions = report.get("by_question") if isinstance(report, dict) else None
    try:
        found = {str(one["key"]): (int(one["successes"]), int(one["episodes"])) for one in questions or ()}
    except (TypeError, KeyError, ValueError):
        found = {}
    if not found or not all(0 <= successes <= episodes for successes, episodes in found.values()):
        raise ConfigError(
            f"row_weights: {path} has no results by question (`by_question`); write it anew with this version's "
            f"`toolgrpo evaluate --report`"
        )
    return found


def reported_rows(
    keys: Sequence[str], report: Mapping[str, tuple[int, int]], *, k: int, least: float, most: float, source: Any = ""
) -> ReportedRows:
    """Look every row up; those whose pass@k lies outside of `least` to `most` are left out.

    A row that is not in the report is as one that was not drawn yet.
    """
    found = {row: report[key] for row, key in enumerate(keys) if key in report}
    if not found:
        raise ConfigError(
            f"row_weights: none of the {len(keys)} rows of the training data is in {source}; evaluate the model on these "
            f"rows (`toolgrpo evaluate --eval_dataset_id_or_path` with the training data)"
        )
    fewest = min(episodes for _, episodes in found.values())
    if k > fewest:
        raise ConfigError(f"row_pass_k {k} needs as many episodes of each question, and {source} has {fewest}")
    left_out = frozenset(
        row
        for row, (successes, episodes) in found.items()
        if not least <= 1.0 - comb(episodes - successes, k) / comb(episodes, k) <= most
    )
    if len(left_out) == len(keys):
        raise ConfigError(
            f"row_weights: no row has a pass@{k} from {least:g} to {most:g}; widen row_pass_min and row_pass_max"
        )
    return ReportedRows(
        {row: RowHistory(successes / episodes) for row, (successes, episodes) in found.items()}, left_out
    )
