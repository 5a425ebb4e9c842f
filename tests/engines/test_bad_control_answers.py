"""Control calls that a server answers as none in good health does: asked again, then one sentence.

One line an answer, as in `test_bad_answers.py`, for each path that starting and pushing weights use.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import server_engine as support
from tests.support.sampling import sample_in_turn
from toolgrpo.engines import vllm_http, vllm_server
from toolgrpo.engines.server_weights import DiskWeights, LoraWeights
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError
from toolgrpo.testing.vllm_stand_in import DROP, Body, StandInVLLM

engine_of = partial(support.engine_of, timeout_s=20.0)
Words = tuple[str, ...]
Bad = tuple[str, Any, Words]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(vllm_http, "_FIRST_PAUSE_S", 0.001)


def text(content: str) -> Body:
    return Body(content.encode())


ANYWHERE: list[Bad] = [
    ("HTML with status 200", text("<html>Sign in</html>"), ("<html>Sign in",)),
    ("null", text("null"), ("its body is None", "an object")),
    ("a bad gzip", Body(b"no gzip", headers={"content-encoding": "gzip"}), ("content-encoding",)),
    ("a redirect", Body(status=307, headers={"location": "http://192.0.2.1/"}), ("307, a redirect",)),
    ("a closed connection", DROP, ("ServerDisconnectedError", "before the whole answer arrived")),
    ("an error 500", Body(b"out of memory", 500), ("HTTP 500: 'out of memory'",)),
]
MODELS = [
    ("no data", lambda honest: {}, ("data is missing", "a list")),
    ("a null card", lambda honest: {"data": [None]}, ("data[0] is None", "an object")),
    ("no name", lambda honest: {"data": [{"max_model_len": 64}]}, ("data[0].id is missing",)),
    ("a window of text", lambda honest: {"data": [{"id": "base", "max_model_len": "64"}]}, ("max_model_len is '64'",)),
    ("a negative window", lambda honest: {"data": [{"id": "base", "max_model_len": -1}]}, ("max_model_len is -1",)),
]
INFO = [
    ("no configuration", lambda honest: {}, ("vllm_config is missing", "an object")),
    ("a text", lambda honest: {"vllm_config": "VllmConfig()"}, ("vllm_config is 'VllmConfig()'",)),
    (
        "another place",  # where a search through the whole tree would find it
        lambda honest: {"vllm_config": {**honest["vllm_config"], "model_config": {"old": {"logprobs_mode": "raw"}}}},
        ("vllm_config.model_config.logprobs_mode is missing",),
    ),
    (
        "another kind",
        lambda honest: {"vllm_config": {**honest["vllm_config"], "parallel_config": {"worker_cls": 7}}},
        ("vllm_config.parallel_config.worker_cls is 7", "a text"),
    ),
]
CONTROL: dict[str, list[Bad]] = {
    "/v1/models": [*ANYWHERE, *MODELS],
    "/server_info": INFO,
    "/version": [("a number", lambda honest: {"version": 31}, ("version is 31",))],
    "/collective_rpc": [
        *ANYWHERE,
        ("no results", lambda honest: {}, ("results is missing",)),
        ("results of nobody", lambda honest: {"results": []}, ("results is []",)),
        ("an error among them", lambda honest: {"results": [None, "no such file"]}, ("results[1] is 'no such file'",)),
    ],
    "/reset_prefix_cache": [("a word", lambda honest: {"success": "false"}, ("success is 'false'", "true or false"))],
    "/update_weight_version": [
        ("no success", lambda honest: {**honest, "success": False}, ("success is False",)),
        ("another version", lambda honest: {**honest, "new_version": "older"}, ("new_version is 'older'",)),
    ],
    "/pause": [("another status", lambda honest: {"status": "resumed"}, ("status is 'resumed'", "'paused'"))],
    "/resume": [("no status", lambda honest: {"error": "busy"}, ("status is missing",))],
}
CASES = [pytest.param(path, *rest, id=f"{path[1:]} {name}") for path, table in CONTROL.items() for name, *rest in table]


@pytest.mark.parametrize(("path", "bad", "words"), CASES)
def test_a_bad_answer_is_asked_again_and_then_said(
    server: StandInVLLM, tmp_path: Path, path: str, bad: Any, words: Words
) -> None:
    def start_and_push() -> None:
        engine_of(server, weights=DiskWeights(tmp_path, run_id="run")).load_weights(iter(()))

    server.next_answers[path] = [bad, bad]
    start_and_push()  # asked again, the server tells the truth
    assert server.weight_version == "run-1"
    server.weight_version = "default"
    for folder in tmp_path.iterdir():
        folder.rmdir()
    server.answers[path] = bad
    with pytest.raises(EngineError) as failure:
        start_and_push()
    said = str(failure.value)
    assert server.url in said and path in said and all(word in said for word in words), said
    assert "\x1b" not in said and len(said) < 900


def test_a_server_that_cannot_say_which_weights_it_holds_is_not_drawn_from(server: StandInVLLM, tmp_path: Path) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path), timeout_s=1.0)
    engine.load_weights(iter(()))
    server.answers["/weight_info"] = lambda honest: {"weight_version": None}
    with pytest.raises(FinalEngineError, match=rf"{server.url}.*/weight_info.*weight_version is None.*a text"):
        sample_in_turn(engine, support.ask())


def test_an_adapter_that_the_server_does_not_list_then_was_not_loaded(server: StandInVLLM, tmp_path: Path) -> None:
    server.answers["/v1/load_lora_adapter"] = Body(b"Success: LoRA adapter added.")
    server.answers["/v1/models"] = lambda honest: {"data": honest["data"][:1]}
    engine = engine_of(server, weights=LoraWeights(tmp_path, lambda folder: folder.mkdir(), run_id="run"))
    with pytest.raises(EngineError, match=rf"{server.url}.*run-1"):
        engine.load_weights(iter(()))


def test_a_refusal_of_a_control_call_is_final(server: StandInVLLM, tmp_path: Path) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path))
    server.answers["/collective_rpc"] = Body(b"no such method", 400)
    with pytest.raises(EngineError, match=r"refused /collective_rpc with 400: 'no such method'"):
        engine.load_weights(iter(()))
    assert [path for path, _ in server.posted].count("/collective_rpc") == 1


def test_what_is_no_address_and_one_server_given_twice_are_refused_at_once(server: StandInVLLM) -> None:
    with pytest.raises(ConfigError, match="at least one URL"):
        engine_of()
    for url in ("localhost:8000", "ftp://localhost", "http://", "http://a b", "http://[", "http://host:port"):
        with pytest.raises(ConfigError, match="is not an address of a vLLM server"):
            engine_of(url)
    with pytest.raises(ConfigError, match=rf"{server.url}"):
        engine_of(server.url, server.url + "/v1/")
