"""How long a server is waited for, who is told, and when a run ends; with short times."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import during_a_rollout
from tests.support.server_engine import ask, engine_of
from toolgrpo.engines import vllm_server
from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.build import choose_engine
from toolgrpo.engines.server_link import Silence
from toolgrpo.engines.server_weights import DiskWeights
from toolgrpo.engines.vllm_server import VLLMServerEngine
from toolgrpo.errors import EngineError, FinalEngineError
from toolgrpo.observe.console import show_warnings
from toolgrpo.testing.vllm_stand_in import COMPLETIONS, HANG, Body, StandInVLLM
from toolgrpo.trainer.config import ToolGRPOConfig


def sample_together(engine: VLLMServerEngine, *requests: SampleRequest) -> list[Sample | BaseException]:
    async def work() -> list[Sample | BaseException]:
        return await asyncio.gather(*map(engine.sample, requests), return_exceptions=True)

    return during_a_rollout(engine, work)


def ids_of(sample: Sample | BaseException) -> tuple[int, ...]:
    assert isinstance(sample, Sample), sample
    return sample.ids


# Time


def test_a_server_that_hangs_is_said_and_ends_the_run_once(
    server: StandInVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers[COMPLETIONS] = HANG
    started = time.monotonic()
    failures = sample_together(engine_of(server, timeout_s=1.0, say_every_s=0.2), *(ask(n) for n in range(8)))
    assert {type(failure) for failure in failures} == {FinalEngineError}
    assert "gave no answer within 1 s (--engine_timeout): silent for 1 s" in str(failures[0])
    assert time.monotonic() - started < 20
    lines = [record.getMessage() for record in caplog.records if "has not answered" in record.getMessage()]
    assert 1 <= len(lines) <= 5  # for the server, not for each of the eight requests
    assert lines[0].startswith(f"the vLLM server at {server.url} has not answered for ")
    assert lines[0].endswith("a request is given 1 s")


def test_servers_that_all_hang_end_the_run_after_two_of_them(server: StandInVLLM) -> None:
    with StandInVLLM() as second, StandInVLLM() as third:
        for one in (server, second, third):
            one.answers[COMPLETIONS] = HANG
        (failure,) = sample_together(engine_of(server, second, third, timeout_s=1.0), ask())
        assert "gave no answer within 2 s" in str(failure)
        # A second is for each of two; on a busy machine one may not have come as far as to note that it was asked.
        assert sum(len(one.asked) for one in (server, second, third)) <= 2


def test_a_request_that_is_given_up_takes_the_others_along_and_those_to_come(server: StandInVLLM) -> None:
    """Or each wave of episodes would wait as long as the one before."""
    engine = engine_of(server, timeout_s=60.0, retries=0)

    async def work() -> list[Sample | BaseException]:
        ended: list[Sample | BaseException] = []
        hanging = asyncio.create_task(engine.sample(ask(1)))
        while not server.asked:
            await asyncio.sleep(0.01)
        server.next_answers[COMPLETIONS] = [Body(b"<html>", 200)]
        async with asyncio.timeout(30):
            ended += await asyncio.gather(engine.sample(ask(2)), hanging, return_exceptions=True)
            ended += await asyncio.gather(engine.sample(ask(3)), return_exceptions=True)
        return ended

    server.next_answers[COMPLETIONS] = [HANG]
    ended = during_a_rollout(engine, work)
    assert {type(error) for error in ended} == {FinalEngineError} and len(ended) == 3
    assert {str(error) for error in ended} == {str(ended[0])} and "<html>" in str(ended[0])
    assert len(server.asked) == 2  # the third was not sent
    assert ids_of(sample_together(engine, ask())[0]) == (5, 9), "the next rollout begins anew"


def test_a_control_call_that_hangs_is_said(
    server: StandInVLLM, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path), timeout_s=2.0, say_every_s=0.2)
    server.answers["/collective_rpc"] = HANG
    with pytest.raises(EngineError, match=rf"{server.url}.*/collective_rpc.*2"):
        engine.load_weights(iter(()))
    line = rf"the vLLM server at {server.url} has not answered /collective_rpc for \d s; it is given 2 s"
    assert re.search(line, caplog.text)


def test_a_hanging_question_for_the_weights_keeps_neither_request_nor_program(
    server: StandInVLLM, tmp_path: Path
) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path), timeout_s=30.0)
    engine.load_weights(iter(()))
    server.answers["/weight_info"] = HANG

    async def work() -> float:
        asking = asyncio.create_task(engine.sample(ask()))
        while "/weight_info" not in server.paths_asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return time.monotonic() - started

    assert during_a_rollout(engine, work) < 15, "the question itself has 30 s"


def test_a_restarted_server_is_found_out_also_where_the_question_for_its_weights_failed(
    server: StandInVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_FIRST_PAUSE_S", 0.001)
    engine = engine_of(server, weights=DiskWeights(tmp_path), timeout_s=20.0)
    engine.load_weights(iter(()))
    pushed, server.weight_version = server.weight_version, "default"  # it was restarted
    server.next_answers["/weight_info"] = [Body(b"no", 400)]  # which is not asked again by the call itself
    (sample,) = sample_together(engine, ask())
    assert ids_of(sample) == (5, 9)
    assert server.weight_version == pushed  # it was found out, and the weights given back
    assert len(server.asked) == 3  # neither the first nor the second answer counted
    assert len(sample_together(engine, ask(), ask(), ask())) == 3 and len(server.asked) == 6, "given back once"


# What is said


def test_a_silence_is_said_once_for_each_span_and_ends_with_any_answer() -> None:
    silence = Silence("http://a", 900.0)
    silence.asked(10.0)
    silence.asked(50.0)
    assert silence.due(69.9, 60.0) is None
    assert silence.due(70.0, 60.0) == "the vLLM server at http://a has not answered for 60 s; a request is given 900 s"
    assert silence.due(71.0, 60.0) is None
    silence.failed("ConnectError: refused")
    line = "the vLLM server at http://a has not answered for 190 s (ConnectError: refused); a request is given 900 s"
    assert silence.due(200.0, 60.0) == line
    assert silence.due(240.0, 60.0) is None and silence.due(250.0, 60.0) is not None
    silence.answered(260.0, still_open=1)
    assert silence.due(319.0, 60.0) is None and silence.due(320.0, 60.0) is not None
    silence.answered(330.0, still_open=0)
    assert silence.due(9999.0, 60.0) is None
    silence.asked(1000.0)
    silence.left(still_open=0)
    assert silence.due(9999.0, 60.0) is None


def test_engine_warnings_reach_the_terminal_once() -> None:
    first, second = list[str](), list[str]()
    logger = logging.getLogger("toolgrpo.engines.vllm_server")
    show_warnings(first.append)
    show_warnings(second.append)
    logger.warning("the vLLM server at %s is silent", "http://a")
    logger.info("not a warning")
    assert (first, second) == ([], ["the vLLM server at http://a is silent"])

    def closed(text: str) -> None:
        raise OSError("the terminal is gone")

    show_warnings(closed)
    logging.raiseExceptions, before = False, logging.raiseExceptions
    try:
        logger.warning("a line that cannot be shown ends no run")
    finally:
        logging.raiseExceptions = before
        show_warnings(lambda text: None)


# Settings


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ({}, []),
        ({"vllm_server_urls": ["http://a", "http://b"]}, ["http://a", "http://b"]),
        ({"vllm_server_base_url": "http://a:1"}, ["http://a:1"]),
        ({"vllm_server_host": "10.0.0.3"}, ["http://10.0.0.3:8000"]),
        ({"vllm_server_port": 9000}, ["http://0.0.0.0:9000"]),
        ({"use_vllm": True, "vllm_mode": "server"}, ["http://0.0.0.0:8000"]),
        ({"use_vllm": True, "vllm_mode": "colocate"}, []),
    ],
    ids=repr,
)
def test_servers_are_named_our_way_or_trls(given: dict[str, Any], urls: list[str], tmp_path: Path) -> None:
    for engine in ("auto", "vllm_server"):
        config = ToolGRPOConfig(str(tmp_path), engine=engine, report_to="none", use_cpu=True, **given)
        assert config.server_urls() == urls
        if urls:
            assert choose_engine(config.engine_options()).name == "vllm_server"
