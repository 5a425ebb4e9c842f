"""Take the three pictures that README and docs/how-to/report.md show: `python tests/report/pictures.py outputs/nano docs/images`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.chromium import Chromium
from toolgrpo.report.build import build_report

sys.path.insert(0, str(Path(__file__).parents[2]))


def take_for_docs(run: Path, to: Path) -> None:
    """Take the run, a live group of it, and the worst episode of that."""
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
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    take_for_docs(Path(sys.argv[1]), target)
