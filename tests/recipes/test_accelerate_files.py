"""The launch files: accelerate reads each of them, each says in one line what it is, and the page lists them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_launch_file_can_be_read_and_says_what_it_is(path: Path) -> None:
    first, second = path.read_text().split("\n")[:2]
    assert first.startswith("# ") and first.endswith(".") and not second.startswith("#")
    config = load_config_from_file(str(path))
    assert config.mixed_precision == ("no" if path.stem.startswith("cpu") else "bf16")
    assert config.use_cpu == path.stem.startswith("cpu")
    assert (config.num_processes > 1) == (path.stem not in ("cpu", "single_gpu"))
    if path.stem.startswith("zero"):
        settings = config.deepspeed_config
        assert settings["zero_stage"] == int(path.stem[4])
        assert (settings["offload_optimizer_device"] == "cpu") == path.stem.endswith("offload")
        assert settings.get("zero3_save_16bit_model") == (True if path.stem[4] == "3" else None)
    if path.stem.startswith("fsdp"):
        settings = config.fsdp_config
        assert settings["fsdp_version"] == 2 and not settings["fsdp_cpu_ram_efficient_loading"]
        assert settings["fsdp_offload_params"] == path.stem.endswith("offload")


def test_the_page_on_scaling_lists_every_file() -> None:
    page = (ROOT / "docs" / "how-to" / "scaling.md").read_text()
    assert [path.name for path in FILES if f"`{path.name}`" not in page] == []
