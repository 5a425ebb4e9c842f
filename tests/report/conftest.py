"""A recorded run of every kind of episode, made without a model: what the report's tests look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Chromium, find_chromium
from tests.support.recorded_run import record_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two groups of four, with held-out rows before and after."""
    return record_run(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """One Chromium for all tests that look at a page; they are skipped where none is installed."""
    if find_chromium() is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium-headless-shell)")
    with Chromium() as chromium:
        yield chromium


@pytest.fixture
def shown(browser: Chromium) -> Callable[[Path, str], Chromium]:
    """Open a page at an address, and return the browser with nothing on its record."""

    def show(page: Path, address: str = "") -> Chromium:
        browser.messages.clear()
        browser.requests.clear()
        browser.look(1280, 900)
        browser.open("about:blank", until="location.href === 'about:blank'")
        browser.open(page.as_uri() + address)
        return browser

    return show
