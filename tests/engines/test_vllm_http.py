"""Requests to a vLLM server, as plain data."""

from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.vllm_http import completion_payload

REQUEST = SampleRequest(
    ids=(1, 2, 3), max_tokens=5, stop_ids=(9,), options=SamplingOptions(temperature=0.7, top_k=20, min_p=0.1), seed=4
)


def test_nothing_is_left_to_the_servers_defaults() -> None:
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
