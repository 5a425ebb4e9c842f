"""A dry run of the release script builds both archives, with the pages in the wheel, and changes nothing here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import toolgrpo

ROOT = Path(__file__).parents[2]


def release(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "release"), *words, "--dry-run"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_dry_run_builds_and_changes_nothing() -> None:
    version = toolgrpo.__version__
    before = (ROOT / "CHANGELOG.md").read_text()
    done = release(version)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^built toolgrpo-{version}-py3-none-any\.whl ", done.stdout, re.MULTILINE)
    assert re.search(rf"^built confined_python-{version}-py3-none-any\.whl ", done.stdout, re.MULTILINE)
    assert f"built toolgrpo-{version}.tar.gz" in done.stdout and f"would commit this, tag v{version}" in done.stdout
    assert re.search(rf"^\+## {version} \(\d{{4}}-\d\d-\d\d\)$", done.stdout, re.MULTILINE)
    assert before == (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("version", "reason"), [("1.0", "give three numbers"), ("987.0.0", "no section '## 987.0.0 (unreleased)'")]
)
def test_what_cannot_be_released_is_refused(version: str, reason: str) -> None:
    done = release(version)
    assert done.returncode == 1 and reason in done.stderr
