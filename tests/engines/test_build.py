from __future__ import annotations

import pytest

from toolgrpo.engines.build import choose_engine
from toolgrpo.engines.vllm_seam import vllm_available
from toolgrpo.errors import ConfigError


def test_auto_takes_what_is_there_and_says_why() -> None:
    choice = choose_engine("auto", server_urls=None)
    expected = ("vllm_colocate", "vLLM is installed") if vllm_available() else ("transformers", "vLLM is not installed")
    assert (choice.name, choice.why) == expected


def test_auto_takes_the_servers_it_is_given() -> None:
    assert choose_engine("auto", server_urls=["http://localhost:8000"]).name == "vllm_server"


def test_servers_without_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match="--vllm_server_urls"):
        choose_engine("vllm_server", server_urls=None)


def test_what_was_asked_for_is_taken() -> None:
    assert choose_engine("transformers", server_urls=None).why == "asked for"
