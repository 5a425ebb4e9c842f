"""The report of a run in which everything goes wrong: each cause is named, and the page holds at every size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Chromium
from toolgrpo.calls import ToolErrorKind
from toolgrpo.report.build import build_report
from toolgrpo.trajectory import StopReason

pytestmark = pytest.mark.e2e

VIEWS = ("overview", "groups", "find", "compare", "reinforced", "timeline", "findings")
CAUSES = tuple(kind for kind in ToolErrorKind if kind != ToolErrorKind.DROPPED)
ENDS = tuple(
    reason
    for reason in StopReason
    # the engine's own failure ends the run; the others want a full window, or a flag
    if reason not in (StopReason.ENGINE_FAILURE, StopReason.CONTEXT_FULL, StopReason.MAX_USER_TURNS)
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("failing_run", Path(__file__).parent / "failing_run.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return build_report([module.run_with_every_error(tmp_path_factory.mktemp("failing"), steps=1)]).path


def found(browser: Chromium, page: Path, asked: str) -> int:
    """Return how many of the episodes a filter leaves."""
    browser.open("about:blank", until="location.href === 'about:blank'")
    browser.open(f"{page.as_uri()}#/find?{asked}")
    count = str(browser.run("document.querySelector('p.count').innerText"))
    assert "of 20" in count
    return int(count.split()[0])


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_finds_its_episodes(
    page: Path, shown: Callable[[Path, str], Chromium], cause: ToolErrorKind
) -> None:
    assert 0 < found(shown(page, ""), page, f"cause={cause}") < 4


@pytest.mark.parametrize("end", ENDS)
def test_each_end_finds_its_episodes(page: Path, shown: Callable[[Path, str], Chromium], end: StopReason) -> None:
    assert 0 < found(shown(page, ""), page, f"stop={end}") < 20


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_view_is_wider_than_its_screen(
    page: Path, shown: Callable[[Path, str], Chromium], width: int, dark: bool
) -> None:
    browser = shown(page, "")
    browser.look(width, 844, dark=dark)
    for view in (*VIEWS, "episode/0", "episode/4", "group/0"):
        browser.open("about:blank", until="location.href === 'about:blank'")
        browser.open(f"{page.as_uri()}#/{view}")
        assert browser.run("document.documentElement.scrollWidth") <= width, view
    assert browser.messages == []


def test_a_turn_that_the_deadline_cut_was_being_decoded(page: Path, shown: Callable[[Path, str], Chromium]) -> None:
    browser = shown(page, "")
    browser.open("about:blank", until="location.href === 'about:blank'")
    browser.open(f"{page.as_uri()}#/timeline")
    text = str(browser.run("document.querySelector('main').innerText"))
    assert "It waited most for decoding" in text
