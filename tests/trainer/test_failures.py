"""When one process fails, the others name it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.trainer.stopping import report_first_failure


def process(index: int) -> SimpleNamespace:
    """What the block asks of accelerate, in one of several processes."""
    here = {"process_index": index, "is_main_process": index == 0}
    return SimpleNamespace(num_processes=3, wait_for_everyone=lambda: None, **here)


@pytest.mark.parametrize("lost", ["gloo: timed out", "NCCL error", "Connection closed by peer"])
def test_a_process_that_lost_its_peer_names_the_one_that_failed(tmp_path: Path, lost: str) -> None:
    with (
        pytest.raises(PeerError, match=r"process 1 .*ValueError: a broken tool"),
        report_first_failure(tmp_path, process(0)),
    ):
        with pytest.raises(ValueError, match="a broken tool"), report_first_failure(tmp_path, process(1)):
            raise ValueError("a broken tool")
        raise RuntimeError(lost)


def test_an_error_of_ones_own_stays_what_it_is_and_the_first_note_stays(tmp_path: Path) -> None:
    for index, error in ((1, ConfigError("the first")), (2, ValueError("the second"))):
        with pytest.raises(type(error)), report_first_failure(tmp_path, process(index)):
            raise error
    assert json.loads((tmp_path / "failure.json").read_text()) == {"process": 1, "error": "ConfigError: the first"}


def test_a_note_of_the_run_before_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text(json.dumps({"process": 1, "error": "of yesterday"}))
    with report_first_failure(tmp_path, process(0)):
        assert not (tmp_path / "failure.json").exists()
