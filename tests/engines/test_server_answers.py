"""Whole trainings against a server that lies in the middle: what is trained on is the truth, or the run ends in a sentence."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolgrpo.errors import EngineError
from toolgrpo.testing.vllm_stand_in import COMPLETIONS, Body, StandInVLLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
EPISODES_OF_A_STEP = 4
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
    def run(**config: Any) -> dict[str, Any]:
        options = {
            "use_cpu": True,
            "vllm_server_urls": [server.url],
            "engine_timeout": 20.0,
            "max_steps": STEPS,
            **config,
        }
        job = train_tiny.Job(
            out=str(tmp_path / "out"), model=str(tiny_model), engine="vllm_server", made_up=True, config=options
        )
        result: dict[str, Any] = train_tiny.run(job)
        return result

    return run


def changed(**fields: Any) -> Callable[[Any], Any]:
    return lambda honest: {**honest, "choices": [{**honest["choices"][0], **fields}]}


def episodes(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out" / "episodes.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_few_bad_answers_among_good_ones_cost_nothing(
    train: Callable[..., Any], server: StandInVLLM, tmp_path: Path
) -> None:
    """None of them ends the run, and every episode is one that the server told the truth about."""
    bad = [
        Body(b'{"id": "cmpl-1", "choices": [{"token_ids": [5'),
        changed(token_ids=[5, 100_000]),
        changed(logprobs={"token_logprobs": [float("nan")] * 2}),
    ]
    honest, asked = server.what_next, 0

    def what_next(path: str) -> Any:
        nonlocal asked
        asked += path == COMPLETIONS
        return bad.pop() if path == COMPLETIONS and asked % 5 == 0 and bad else honest(path)

    server.what_next = what_next  # type: ignore[method-assign]
    result = train()
    assert not bad and result["steps"] == STEPS and result["n_episodes"] == STEPS * EPISODES_OF_A_STEP
    recorded = episodes(tmp_path)
    assert len(recorded) == STEPS * EPISODES_OF_A_STEP
    assert all(max(episode["ids"]) < 320 for episode in recorded)
    assert all(logprob is None or -200 <= logprob <= 0 for episode in recorded for logprob in episode["logprobs"])


def test_bad_answers_that_go_on_end_the_run_in_a_sentence_that_a_checkpoint_outlives(
    train: Callable[..., Any], server: StandInVLLM, tmp_path: Path
) -> None:
    honest = server.honest

    def until_the_second_push(method: str, target: str, body: Any, request_id: str) -> tuple[int, Any]:
        if target == "/update_weight_version" and body["new_version"].endswith("-2"):
            server.answers[COMPLETIONS] = changed(token_ids=[5, 100_000])
        return honest(method, target, body, request_id)

    server.honest = until_the_second_push  # type: ignore[method-assign]
    with pytest.raises(EngineError) as failure:
        train(save_strategy="steps", save_steps=1)
    said = str(failure.value)
    assert "4 of 4 episodes could not be completed" in said and server.url in said, said
    assert "token_ids[1] is 100000; expected an id from 0 to 319" in said
    assert "Nothing was trained on this batch" in said and "resume from the last checkpoint" in said
    assert len(episodes(tmp_path)) == EPISODES_OF_A_STEP
    server.honest = honest  # type: ignore[method-assign]
    del server.answers[COMPLETIONS]
    result = train(save_strategy="steps", save_steps=1, resume_from_checkpoint="auto")
    assert result["steps"] == STEPS
