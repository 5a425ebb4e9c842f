"""Answers that a server in good health never gives, over real HTTP: none of them is trained on, and each is named.

One line an answer: what the server says to a completion (a change of the honest body, or bytes), and what the sentence
must hold besides the server's address. The request asks for at most 8 tokens after (1, 2, 3) and stops at 9; the honest
answer is (5, 9). Then the same of the control calls that starting and pushing weights use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import server_engine as support
from tests.support.sampling import sample_in_turn
from tests.support.server_engine import VOCABULARY
from toolgrpo.engines import vllm_http, vllm_server
from toolgrpo.engines.base import Sample
from toolgrpo.engines.server_weights import DiskWeights, LoraWeights
from toolgrpo.engines.vllm_server import VLLMServerEngine
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError
from toolgrpo.testing.vllm_stand_in import COMPLETIONS, DROP, Body, StandInVLLM, Wire

patient = partial(support.engine_of, timeout_s=20.0)
engine_of = partial(patient, retries=1)
Words = tuple[str, ...]
Bad = tuple[str, Any, Words]


def ask(engine: VLLMServerEngine, times: int = 1) -> list[Sample]:
    return sample_in_turn(engine, *[support.ask()] * times)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vllm_server, vllm_http):
        monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)


def changed(**fields: Any) -> Callable[[Any], Any]:
    """The honest body with these fields, or without those that are `...`."""
    return lambda honest: _with(honest, fields)


def choice(**fields: Any) -> Callable[[Any], Any]:
    return lambda honest: {**honest, "choices": [_with(honest["choices"][0], fields)]}


def drawn(ids: Any, logprobs: Any = None, reason: str = "stop") -> Callable[[Any], Any]:
    """Other tokens, each with a log-probability unless they are given too."""
    numbers = [-0.5] * len(ids) if logprobs is None else logprobs
    return choice(token_ids=ids, logprobs={"token_logprobs": numbers}, finish_reason=reason)


def logprobs(*numbers: Any) -> Callable[[Any], Any]:
    return drawn([5, 9], list(numbers))


def _with(honest: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**honest, **fields}.items() if value is not ...}


def raw(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", body])


def text(content: str, **headers: str) -> Body:
    return Body(content.encode(), headers={name.replace("_", "-"): value for name, value in headers.items()})


HONEST = json.dumps({"id": "cmpl-1", "model": "base", "choices": []}).encode()

# What a body may be that is no completion.
BODIES: list[Bad] = [
    ("HTML with status 200", text("<html>Sign in</html>", content_type="text/html"), ("<html>Sign in", "JSON (")),
    ("no content", Body(status=204, headers={"content-length": "0"}), ("its body is ''",)),
    ("deep lists", text("[" * 10_000), ("'[[[", "nested too deeply")),
    ("a number of 5,000 digits", text("1" * 5000), ("'111", "JSON (")),
    ("broken UTF-8", Body(b'{"id": "\xff\xfe"}'), ("its body is", "JSON (")),
    ("escape sequences", text("\x1b]0;title\x07\x1b[2J"), (r"\x1b]0;title", "JSON (")),
    ("a list", text("[]"), ("its body is []", "an object")),
    ("an unknown encoding", Body(HONEST, headers={"content-encoding": "rot13"}), ("content-encoding is 'rot13'",)),
    ("a body without end", text('{"a": "' + "x" * 2_000_000 + '"}'), ("its body is longer than", "bytes")),
    ("an error with status 200", text('{"error": {"message": "out of memory"}}'), ("id is missing", "a text")),
    ("a redirect", Body(status=307, headers={"location": "http://192.0.2.1/"}), ("307", "'http://192.0.2.1/'")),
]

# What a completion may lack or have.
COMPLETION: list[Bad] = [
    ("another request's answer", changed(id="cmpl-other"), ("id is 'cmpl-other'", "this request")),
    ("another model's answer", changed(model="gpt-oss"), ("model is 'gpt-oss'", "'base'")),
    ("no choices", changed(choices=...), ("choices is missing", "a list")),
    ("empty choices", changed(choices=[]), ("choices is a list of 0", "one choice")),
    ("two choices", lambda honest: {**honest, "choices": honest["choices"] * 2}, ("choices is a list of 2",)),
    ("a nested choice", lambda honest: {**honest, "choices": [honest["choices"]]}, ("choices[0] is [{", "an object")),
    ("another prompt", choice(prompt_token_ids=[1, 2, 4]), ("prompt_token_ids is [1, 2, 4]", "[1, 2, 3], those sent")),
    ("no finish_reason", choice(finish_reason=...), ("choices[0].finish_reason is missing",)),
    ("an aborted request", choice(finish_reason="abort"), ("choices[0].finish_reason is 'abort'",)),
]

# What the tokens may be.
TOKENS: list[Bad] = [
    ("no token ids", choice(token_ids=...), ("choices[0].token_ids is missing", "vLLM 0.31")),
    ("an empty stop", drawn([]), ("token_ids is []", "at least one token")),
    ("an id beyond the vocabulary", drawn([5, VOCABULARY, 9]), ("token_ids[1] is 320", "from 0 to 319")),
    ("an id of 400 digits", drawn([10**400, 9]), ("token_ids[0] is 1000", "...", "from 0 to 319")),
    ("a negative id", drawn([5, -1, 9]), ("token_ids[1] is -1",)),
    ("an id as a whole float", drawn([5.0, 9]), ("token_ids[0] is 5.0",)),
    ("true for an id", drawn([True, 9]), ("token_ids[0] is True",)),
    ("more tokens than asked for", drawn([5] * 9, reason="length"), ("token_ids is 9 tokens", "at most the 8")),
    ("fewer tokens than asked for", drawn([5] * 7, reason="length"), ("token_ids is 7 tokens", "the 8 asked for")),
    ("a stop token in the middle", drawn([5, 9, 5, 9]), ("token_ids[1] is 9", "no stop token before the end")),
    ("a stop token in a length", drawn([5] * 7 + [9], reason="length"), ("token_ids[7] is 9", "ended by length")),
    ("a stop at another token", drawn([5, 8]), ("the last of token_ids is 8", "--generation-config vllm")),
]

# What their log-probabilities may be.
LOGPROBS: list[Bad] = [
    ("no logprobs", choice(logprobs=...), ("choices[0].logprobs is missing", "vLLM 0.31")),
    ("no token_logprobs", choice(logprobs={}), ("choices[0].logprobs.token_logprobs is missing",)),
    ("fewer logprobs than ids", logprobs(-0.5), ("token_logprobs is 1 numbers", "2, one for each")),
    ("more logprobs than ids", logprobs(-0.5, -0.5, -0.5), ("token_logprobs is 3 numbers", "2, one for each")),
    ("NaN", logprobs(-0.5, float("nan")), ("token_logprobs[1] is nan", "from -200 to 0")),
    ("a positive one that a sum hides", logprobs(5.0, -50.0), ("token_logprobs[0] is 5.0",)),
    ("probabilities", logprobs(0.6, 0.25), ("token_logprobs[0] is 0.6",)),
    ("vLLM's minus infinity", logprobs(-9999.0, -0.5), ("token_logprobs[0] is -9999.0", "from -200 to 0")),
    ("a null one", logprobs(None, -0.5), ("token_logprobs[0] is None",)),
    ("true", logprobs(-0.5, True), ("token_logprobs[1] is True",)),
    ("an integer of 400 digits", logprobs(-(10**400), -0.5), ("token_logprobs[0] is -1000",)),
]

# What may come over the wire instead of an answer: tried again until the time is over, as a lost connection is.
LONG = b"content-length: 400"
CHUNKED = b"transfer-encoding: chunked"
WIRES: list[Bad] = [
    ("a closed connection", DROP, ("ServerDisconnectedError", "before the whole answer arrived")),
    ("no HTTP", Wire([b"SSH-2.0-OpenSSH_9.6\r\n"]), ("Bad status line", "SSH-2.0")),
    ("half of the headers", Wire([b"HTTP/1.1 200 OK\r\ncontent-ty"]), ("before the whole answer arrived",)),
    ("a body shorter than its length", Wire([raw(b"{}", LONG)]), ("received 2 of 400 bytes",)),
    ("two lengths", Wire([raw(b"{}", LONG, b"content-length: 2")]), ("Duplicate Content-Length",)),
    ("a chunk's length that is none", Wire([raw(b"zz\r\n{}\r\n", CHUNKED)]), ("Invalid character in chunk size",)),
    ("headers without end", Wire([raw(b"", *(b"x-%d: 1" % n for n in range(20_000)))]), ("Too many headers",)),
    ("an error 500", Body(b"out of memory", 500), ("HTTP 500: 'out of memory'",)),
    ("too many requests", Body(b"later", 429), ("HTTP 429: 'later'",)),
    ("an error with escape sequences", Body(b"\x1b[2J", 503), (r"HTTP 503: '\x1b[2J'",)),
]

# Its own time would be over before the answer is: headers, chunks or bytes that drip.
DRIPS: list[Bad] = [
    ("headers that drip", Wire([b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n"] * 1000], 0.05), ("silent for",)),
    ("chunks without end", Wire([raw(b"", CHUNKED), *[b"1\r\n \r\n"] * 1000], 0.05), ("silent for",)),
]


def cases(table: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("bad", "words"), [pytest.param(*rest, id=name) for name, *rest in table])


@cases([*BODIES, *COMPLETION, *TOKENS, *LOGPROBS])
def test_what_cannot_be_believed_is_named_and_never_trained_on(server: StandInVLLM, bad: Any, words: Words) -> None:
    engine = engine_of(server)
    server.next_answers[COMPLETIONS] = [bad]
    (sample,) = ask(engine)  # asked again, the server tells the truth
    assert sample.ids == (5, 9) and len(server.asked) == 2
    server.answers[COMPLETIONS] = bad
    with pytest.raises(FinalEngineError) as failure:
        ask(engine)
    said = str(failure.value)
    assert said.startswith(f"the vLLM server at {server.url} gave an answer that cannot be used (2 in all): ")
    assert all(word in said for word in words), said
    assert "a request of 3 tokens for at most 8 more" in said and "\x1b" not in said and len(said) < 900
    assert len(server.asked) == 4


@cases(WIRES)
def test_what_is_no_answer_is_asked_for_until_the_time_is_over(server: StandInVLLM, bad: Any, words: Words) -> None:
    server.next_answers[COMPLETIONS] = [bad, bad, bad]
    (sample,) = ask(engine_of(server))
    assert sample.ids == (5, 9) and len(server.asked) == 4 and server.asked[0] == server.asked[3]
    server.answers[COMPLETIONS] = bad
    with pytest.raises(FinalEngineError) as failure:
        ask(engine_of(server, timeout_s=0.3))
    said = str(failure.value)
    assert said.startswith(f"the vLLM server at {server.url} gave no answer within 0.3 s (--engine_timeout): ")
    assert all(word in said for word in words) and "\x1b" not in said, said
    assert len(server.asked) < 20, "each pause is twice as long as the one before"


@cases(DRIPS)
def test_what_drips_ends_at_the_deadline_of_the_whole(server: StandInVLLM, bad: Any, words: Words) -> None:
    server.answers[COMPLETIONS] = bad
    with pytest.raises(FinalEngineError) as failure:
        ask(engine_of(server, timeout_s=0.3))
    said = str(failure.value)
    assert f"{server.url} gave no answer within 0.3 s" in said and all(word in said for word in words), said


def test_bytes_behind_an_answer_are_not_taken_for_the_next_one(server: StandInVLLM) -> None:
    """A body longer than its length leaves bytes on the connection: here a whole answer, as another request's would be."""

    def answer(honest: Any) -> bytes:
        content = json.dumps(honest).encode()
        return raw(content, b"content-length: %d" % len(content))

    engine = engine_of(server, retries=5)
    seen: list[Any] = []

    def noted(honest: Any) -> Any:
        seen.append(honest)
        return honest

    server.next_answers[COMPLETIONS] = [noted]
    ask(engine)
    forged = {**seen[0], "choices": [{**seen[0]["choices"][0], "token_ids": [7, 9]}]}
    server.next_answers[COMPLETIONS] = [Wire([answer(seen[0]) + answer(forged)], keep=True)] * 2
    assert [sample.ids for sample in ask(engine, times=3)] == [(5, 9)] * 3


def test_logprobs_may_be_whole_numbers_and_rounded(server: StandInVLLM) -> None:
    server.answers[COMPLETIONS] = logprobs(0, 1e-7)
    (sample,) = ask(engine_of(server))
    assert sample.logprobs == (0.0, 1e-7) and all(type(number) is float for number in sample.logprobs)


# Control calls

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
        patient(server, weights=DiskWeights(tmp_path, run_id="run")).load_weights(iter(()))

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
    engine = patient(server, weights=DiskWeights(tmp_path), timeout_s=1.0)
    engine.load_weights(iter(()))
    server.answers["/weight_info"] = lambda honest: {"weight_version": None}
    with pytest.raises(FinalEngineError, match=rf"{server.url}.*/weight_info.*weight_version is None.*a text"):
        ask(engine)


def test_an_adapter_that_the_server_does_not_list_then_was_not_loaded(server: StandInVLLM, tmp_path: Path) -> None:
    server.answers["/v1/load_lora_adapter"] = Body(b"Success: LoRA adapter added.")
    server.answers["/v1/models"] = lambda honest: {"data": honest["data"][:1]}
    engine = patient(server, weights=LoraWeights(tmp_path, lambda folder: folder.mkdir(), run_id="run"))
    with pytest.raises(EngineError, match=rf"{server.url}.*run-1"):
        engine.load_weights(iter(()))


def test_a_refusal_of_a_control_call_is_final(server: StandInVLLM, tmp_path: Path) -> None:
    engine = patient(server, weights=DiskWeights(tmp_path))
    server.answers["/collective_rpc"] = Body(b"no such method", 400)
    with pytest.raises(EngineError, match=r"refused /collective_rpc with 400: 'no such method'"):
        engine.load_weights(iter(()))
    assert [path for path, _ in server.posted].count("/collective_rpc") == 1


def test_what_is_no_address_and_one_server_given_twice_are_refused_at_once(server: StandInVLLM) -> None:
    with pytest.raises(ConfigError, match="at least one URL"):
        patient()
    for url in ("localhost:8000", "ftp://localhost", "http://", "http://a b", "http://[", "http://host:port"):
        with pytest.raises(ConfigError, match="is not an address of a vLLM server"):
            patient(url)
    with pytest.raises(ConfigError, match=rf"{server.url}"):
        patient(server.url, server.url + "/v1/")
