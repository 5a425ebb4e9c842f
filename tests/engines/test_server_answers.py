"""A whole training against a server that lies in the middle: the run ends in a sentence, and a checkpoint outlives it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolgrpo.errors import EngineError
from toolgrpo.testing.vllm_stand_in import COMPLETIONS, StandInVLLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
STEPS = 3


def drawn(body: Mapping[str, Any]) -> list[int]:
    """A turn of up to 8 tokens that depends on what was said so far."""
    seed = zlib.crc32(repr(body["prompt"]).encode())
    tokens = [(seed >> n) % 250 + 1 for n in range(seed % 7 + 1)]
    return [*tokens, body["stop_token_ids"][0]][: body["max_tokens"]]


@pytest.fixture
def server() -> Iterator[StandInVLLM]:
    with StandInVLLM(draw=drawn, max_model_len=512) as running:
        yield running


@pytest.fixture
def train(train_tiny: ModuleType, tiny_model: Path, tmp_path: Path, server: StandInVLLM) -> Callable[..., Any]:
    def run(**config: Any) -> Any:
        options = {
            "use_cpu": True,
            "vllm_server_urls": [server.url],
            "engine_timeout": 20.0,
            "max_steps": STEPS,
            **config,
        }
        paths = {"out": str(tmp_path / "out"), "model": str(tiny_model)}
        return train_tiny.run(train_tiny.Job(**paths, engine="vllm_server", made_up=True, config=options))

    return run


def test_a_checkpoint_outlives_bad_answers_that_go_on(
    train: Callable[..., Any], server: StandInVLLM, tmp_path: Path
) -> None:
    honest = server.honest

    def until_the_second_push(method: str, target: str, body: Any, request_id: str) -> tuple[int, Any]:
        if target == "/update_weight_version" and body["new_version"].endswith("-2"):
            server.answers[COMPLETIONS] = lambda said: {
                **said,
                "choices": [{**said["choices"][0], "token_ids": [5, 100_000]}],
            }
        return honest(method, target, body, request_id)

    server.honest = until_the_second_push  # type: ignore[method-assign]
    with pytest.raises(EngineError) as failure:
        train(save_strategy="steps", save_steps=1)
    said = str(failure.value)
    assert "4 of 4 episodes" in said and server.url in said and "token_ids[1] is 100000" in said, said
    assert "Nothing was trained on this batch" in said and "resume from the last checkpoint" in said
    assert len((tmp_path / "out" / "episodes.jsonl").read_text().splitlines()) == 4
    server.honest = honest  # type: ignore[method-assign]
    del server.answers[COMPLETIONS]
    result = train(save_strategy="steps", save_steps=1, resume_from_checkpoint="auto")
    assert result["steps"] == STEPS
