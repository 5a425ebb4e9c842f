"""The picture of docs/credit.md is what its script makes of the code of today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_picture_shows_todays_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("credit_picture", ROOT / "benchmarks" / "credit_picture.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "credit_picture", script)  # its dataclass looks itself up there
    spec.loader.exec_module(script)
    drawn = script.PICTURE.read_text(encoding="utf-8")
    assert drawn == script.svg(), "run python benchmarks/credit_picture.py"
