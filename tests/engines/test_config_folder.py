"""vLLM finds what it compiled again: one folder for one config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from toolgrpo.engines.config_folder import config_folder


def folder_of(cache: Path, **values: Any) -> Path:
    with config_folder(Qwen3Config(num_hidden_layers=2, **values), cache=cache) as folder:
        assert Qwen3Config.from_pretrained(folder).num_hidden_layers == 2
        return folder


def test_one_config_has_one_folder_wherever_it_was_loaded_from(tmp_path: Path) -> None:
    first = folder_of(tmp_path)
    assert folder_of(tmp_path) == first
    elsewhere = Qwen3Config(num_hidden_layers=2)
    elsewhere._name_or_path = "/somewhere/else"
    with config_folder(elsewhere, cache=tmp_path) as folder:
        assert folder == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name], "nothing half made is left"


def test_another_config_has_another(tmp_path: Path) -> None:
    assert folder_of(tmp_path) != folder_of(tmp_path, hidden_size=64)


def test_weights_get_a_folder_that_is_gone_afterwards(tmp_path: Path) -> None:
    config = Qwen3Config(num_hidden_layers=2)
    with config_folder(config, {"a": torch.zeros(2, 2).T}, cache=tmp_path) as folder:
        assert (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    assert not folder.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with config_folder(Qwen3Config(num_hidden_layers=2), cache=tmp_path / "cache") as folder:
        assert (folder / "config.json").is_file()
    assert not folder.exists()


def test_a_file_in_the_way_of_the_cache_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with config_folder(Qwen3Config(num_hidden_layers=2), cache=tmp_path / "file") as folder:
        assert (folder / "config.json").is_file()
    assert not folder.exists()
