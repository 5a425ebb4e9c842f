"""Requests to and answers from a vLLM server, as plain data."""

import pytest

from toolgrpo.engines.base import FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.vllm_http import completion_payload, parse_completion
from toolgrpo.errors import ConfigError, EngineError

REQUEST = SampleRequest(
    ids=(1, 2, 3), max_tokens=5, stop_ids=(9,), options=SamplingOptions(temperature=0.7, top_k=20, min_p=0.1), seed=4
)


def answer(**choice):
    return {
        "choices": [
            {"token_ids": [5, 9], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop", **choice}
        ]
    }


def test_nothing_is_left_to_the_servers_defaults():
    assert completion_payload(REQUEST, "m") == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "seed": 4,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
    }


def test_an_answer_becomes_a_sample():
    assert parse_completion(answer(), REQUEST) == Sample((5, 9), (-0.5, -0.25), FinishReason.STOP)
    cut = parse_completion(answer(finish_reason="length"), REQUEST)
    assert cut.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        ({"token_ids": None}, ConfigError, "vLLM 0.31"),
        ({"logprobs": None}, ConfigError, "vLLM 0.31"),
        ({"finish_reason": "abort"}, EngineError, "'abort'"),
        ({"token_ids": [5, 8]}, ConfigError, "--generation-config vllm"),  # 8 is no stop token of ours
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(choice, error, says):
    with pytest.raises(error, match=says):
        parse_completion(answer(**choice), REQUEST)
