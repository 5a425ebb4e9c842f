"""`toolgrpo report OUTPUT_DIR [OTHER_DIR]`: write a run as one HTML file.

    toolgrpo report outputs/nano                 writes outputs/nano/report.html
    toolgrpo report outputs/a outputs/b          both runs in one page, to compare them
    toolgrpo report outputs/nano --live          serves it on this machine, and follows the run

The page needs no network and no server, and opens in any browser of 2023 or later (docs/how-to/report.md).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from toolgrpo.errors import ToolGRPOError
from toolgrpo.plain_text import plain
from toolgrpo.report.build import MOST_EPISODES, Built, build_report


def run_report(arguments: Sequence[str]) -> int:
    """Write or serve the report."""
    parser = _parser()
    given = parser.parse_args(list(arguments))
    if len(given.folders) > 2:
        parser.error(f"give one or two folders, not {len(given.folders)}")
    if given.most_episodes < 1:
        parser.error(f"--most_episodes must be at least 1, got {given.most_episodes}")
    if given.live:
        from toolgrpo.report.live import serve

        serve(given.folders, port=given.port, say=lambda text: print(plain(text), flush=True))
        return 0
    began = time.monotonic()
    built = build_report(given.folders, given.out, most_episodes=given.most_episodes)
    print(plain(f"report    {described(built)}, made in {time.monotonic() - began:.1f} s"))
    print(plain(f"          {built.url}"))
    return 0


def described(built: Built) -> str:
    """Describe the size of a report."""
    shown = "" if built.n_shown == built.n_episodes else f" (in lists: {built.n_shown} of them, evenly spread)"
    return f"{built.n_episodes} episodes{shown}, {built.n_bytes / 1e6:.1f} MB"


def report_line(folder: Path) -> str:
    """Make the report of a run that has ended; return its address.

    A report that cannot be made is no failure of the run: the line then says why.
    """
    try:
        return build_report([folder]).url
    except ToolGRPOError as error:
        return f"not made: {error}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolgrpo report", description="Show what a run did, as one HTML file that needs no network."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUTPUT_DIR", help="one run, or two to compare")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: OUTPUT_DIR/report.html")
    parser.add_argument(
        "--most_episodes",
        type=int,
        default=MOST_EPISODES,
        metavar="N",
        help="of a longer run show so many, evenly spread over its steps (default: %(default)s)",
    )
    parser.add_argument("--live", action="store_true", help="serve it on this machine only, and follow the run")
    parser.add_argument("--port", type=int, default=0, help="of --live (default: a free one)")
    return parser
