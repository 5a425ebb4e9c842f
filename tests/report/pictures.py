"""Take the pictures of the docs from two runs: `python tests/report/pictures.py outputs/nano docs/images`.

The first run is the one given; the second is made here, with everything in it that can go wrong. Each page is taken at the
size of a desk and of a phone, in light and in dark; the docs show some of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.chromium import Chromium
from toolgrpo.report.build import build_report

sys.path.insert(0, str(Path(__file__).parents[2]))

SIZES = {"desk": (1280, 900), "phone": (390, 844)}
VIEWS = ("overview", "groups", "find", "compare", "reinforced", "timeline", "findings")


def take(run: Path, name: str, to: Path) -> None:
    page = build_report([run]).path
    with Chromium() as browser:
        for size, (width, height) in SIZES.items():
            for dark in (False, True):
                browser.look(width, height, dark=dark)
                for view in VIEWS:
                    browser.open("about:blank", until="location.href === 'about:blank'")
                    browser.open(f"{page.as_uri()}#/{view}")
                    browser.picture(to / f"{name}_{view}_{size}_{'dark' if dark else 'light'}.png")


def take_for_docs(run: Path, to: Path) -> None:
    """Take the three pictures that README and docs/report.md show: of a live group, and of its worst episode."""
    page = build_report([run]).path
    with Chromium() as browser:

        def show(address: str, width: int, height: int) -> None:
            browser.look(width, height)
            browser.open("about:blank", until="location.href === 'about:blank'")
            browser.open(page.as_uri() + address)

        show("#/overview", 1280, 1010)
        browser.picture(to / "report_overview.png")
        show("#/groups?step=20&kind=live", 1280, 900)
        show(str(browser.run("document.querySelector('main a.question').getAttribute('href')")), 1280, 900)
        browser.picture(to / "report_group.png")
        episodes = "[...document.querySelectorAll('main a[href*=\"#/episode/\"]')]"
        show(str(browser.run(f"{episodes}.at(-1).getAttribute('href')")) + "?view=tokens", 1100, 760)
        browser.picture(to / "report_tokens.png")


if __name__ == "__main__":
    from tests.report.failing_run import run_with_every_error

    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    take_for_docs(Path(sys.argv[1]), target)
    take(Path(sys.argv[1]), "run", target)
    with tempfile.TemporaryDirectory() as folder:
        take(run_with_every_error(Path(folder)), "errors", target)
