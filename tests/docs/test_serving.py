"""The shop's model is served by plain vLLM and called by an OpenAI client, as the page's last section says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from tests.support.page_blocks import page_blocks
from tests.support.ports import free_port
from toolgrpo.engines.vllm_http import ServerControl

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
TRAIN = (
    "sft --model_name_or_path nano --dataset_id_or_path examples.jsonl --tools_script shop_tools.py --max_steps 90 "
    "--output_dir outputs/sft",
    "train --config shop.yaml --max_steps 1 --eval_questions 0 --engine transformers",
)


def test_the_shop_is_served_and_asked(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes" / "shop", tmp_path, dirs_exist_ok=True)
    for command in (["make_shop.py"], *(["-m", "toolgrpo", *words.split()] for words in TRAIN)):
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, timeout=900)
    port = free_port()
    server = subprocess.Popen(
        served_as_the_page_says(port),
        cwd=tmp_path,
        shell=True,
        executable="/bin/bash",
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        ServerControl(f"http://127.0.0.1:{port}").wait_ready(300, may_come=lambda: server.poll() is None)
        asked = subprocess.run(
            [sys.executable, "ask.py", "Order article 819, 3 times."],
            cwd=tmp_path,
            env={**os.environ, "SHOP_URL": f"http://127.0.0.1:{port}/v1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert asked.splitlines()[0] == 'find {"article": 819} -> 83', asked
    assert "<think>" not in asked, "what the model thinks is no part of its answer"


def served_as_the_page_says(port: int) -> str:
    blocks = [block.text for block in page_blocks(ROOT / "docs" / "tutorials" / "half_an_hour.md")]
    (command,) = (text for text in blocks if "vllm.entrypoints.openai.api_server" in text)
    return f"exec env {command.rstrip()} --host 127.0.0.1 --port {port}"
