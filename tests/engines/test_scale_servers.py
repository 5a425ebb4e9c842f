"""Training against a real `vllm serve` on the CPU: whole weights, adapters alone, and two processes on one server."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.needs_cpu_vllm, pytest.mark.timeout(1500)]


def job_of(folder: Path, url: str, **changes: Any) -> dict[str, Any]:
    config = {"use_cpu": True, "vllm_server_urls": [url], "learning_rate": 3e-2, "lr_scheduler_type": "constant"}
    paths = {"out": str(folder / "out"), "model": str(folder / "model")}
    return {**paths, "engine": "vllm_server", "config": {**config, **changes}}


def test_a_run_draws_from_what_it_pushed(
    train_tiny: ModuleType, tiny_qwen3: Any, vllm_server: Any, tmp_path: Path
) -> None:
    tiny_qwen3(1).save_pretrained(tmp_path / "model")  # the server was started with tiny_qwen3(0)
    result = train_tiny.run(train_tiny.Job(**job_of(tmp_path, vllm_server.url)))
    assert result["steps"] == 3 and max(result["turns"]) > 1
    assert max(result["difference"]) < 1e-4
    assert len(list((tmp_path / "out" / "vllm_weights").iterdir())) == 1, "only the last version is kept"


# With a learning rate of 0 the weights stay as they are, so each token must fit them, whatever came in its middle.
AHEAD = {"max_staleness": 1, "learning_rate": 0.0, "max_steps": 4, "rollout_correction": "trl"}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "steps"), [({}, 3), (AHEAD, 4)], ids=["in turn", "while it is given weights"])
def test_two_processes_share_a_server(
    launcher: Any, tiny_qwen3: Any, vllm_server: Any, tmp_path: Path, changes: dict[str, Any], steps: int
) -> None:
    tiny_qwen3(1).save_pretrained(tmp_path / "model")
    done = launcher.run("cpu_ddp", [job_of(tmp_path, vllm_server.url, **changes)], timeout_s=900)
    assert done.returncode == 0, done.stderr[-4000:]
    for process in (0, 1):
        result = json.loads((tmp_path / "out" / f"rank{process}.json").read_text())
        assert result["n_processes"] == 2 and result["steps"] == steps
        assert max(result["difference"]) < 1e-4


@pytest.mark.slow
def test_an_adapter_alone_reaches_the_server(train_tiny: ModuleType, tiny_qwen3: Any, tmp_path: Path) -> None:
    from tests.support.vllm_process import VLLMServerProcess

    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    extra = ["--enable-lora", "--max-lora-rank", "8"]
    with VLLMServerProcess(tmp_path / "model", max_model_len=256, extra_args=extra, ready_timeout_s=900) as server:
        asked = job_of(tmp_path, server.url, vllm_lora_sync="adapter", max_steps=4)
        result = train_tiny.run(train_tiny.Job(**asked, lora=True))
    assert result["steps"] == 4 and max(result["difference"]) < 1e-4
