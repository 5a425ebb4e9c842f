from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.data.row_keys import row_key
from toolgrpo.errors import ConfigError
from toolgrpo.signal.row_order import RowHistory
from toolgrpo.signal.row_report import read_report, reported_rows

REPORT = {"a": (0, 4), "b": (2, 4), "c": (4, 4)}


def test_a_prompt_has_one_key_in_whatever_table_it_stands() -> None:
    message = {"role": "user", "content": "2 + 2?"}
    assert row_key([message]) == row_key([{"content": "2 + 2?", "role": "user", "tool_calls": None}])
    assert len({row_key([message]), row_key("2 + 2?"), row_key([{**message, "content": "2 + 3?"}])}) == 3


def test_rows_begin_in_the_pool_that_the_report_gives_them() -> None:
    rows = reported_rows(["c", "x", "a", "b"], REPORT, k=1, least=0.0, most=1.0)
    assert rows.histories == {0: RowHistory(1.0), 2: RowHistory(0.0), 3: RowHistory(0.5)} and not rows.left_out


def test_rows_are_left_out_by_their_pass_at_k() -> None:
    keys = ["a", "b", "c", "x"]
    assert reported_rows(keys, REPORT, k=1, least=0.1, most=0.9).left_out == {0, 2}, "what is not reported stays"
    assert reported_rows(keys, REPORT, k=4, least=0.1, most=1.0).left_out == {0}
    assert reported_rows(keys, REPORT, k=2, least=0.9, most=1.0).left_out == {0, 1}, "pass@2 of 2 in 4 is 5/6"


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (["x", "y"], {}, r"none of the 2 rows .* is in report\.json; evaluate the model on these"),
        (["a"], {"k": 5}, r"row_pass_k 5 needs as many episodes of each question, and report\.json has 4"),
        (["a", "c"], {"least": 0.2, "most": 0.8}, r"no row has a pass@1 from 0\.2 to 0\.8"),
    ],
)
def test_a_report_that_fits_no_row_is_one_sentence(keys: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reported_rows(keys, REPORT, **{"k": 1, "least": 0.0, "most": 1.0, **options}, source="report.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[]", "no results by question"),
        ('{"by_question": []}', "no results by question"),
        ('{"by_question": [{"key": "a"}]}', "no results by question"),
        ('{"by_question": [{"key": "a", "successes": 5, "episodes": 4}]}', "no results by question"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"row_weights: .*{message}"):
        read_report(path)


def test_a_report_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"by_question": [{"key": "a", "successes": 1, "episodes": 4}]}))
    assert read_report(path) == {"a": (1, 4)}
