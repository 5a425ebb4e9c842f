from __future__ import annotations

from typing import Any

import pytest
import torch

from toolgrpo.engines.adapters import adapter_saver
from toolgrpo.engines.build import EngineOptions, build_engine, choose_engine
from toolgrpo.engines.policy import Backend, Policy
from toolgrpo.engines.transformers import ReplicaEngine, TransformersEngine, TransformersOptions
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


ALONE = Backend("NO", 1)


def policy(model: Any, *, backend: Backend = ALONE, process_index: int = 0) -> Policy:
    return Policy(
        get_model=lambda: model,
        weights=model.named_parameters,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=backend,
        process_index=process_index,
    )


def test_an_engine_is_built_for_a_policy_that_no_trainer_has(tiny_qwen3: Any) -> None:
    options = EngineOptions(engine="transformers", transformers=TransformersOptions(max_model_len=100, seed=5))
    built = build_engine(policy(tiny_qwen3(0)), options)
    assert isinstance(built.engine, TransformersEngine) and built.choice.why == "asked for"
    assert built.engine.max_model_len == 100 and built.engine.same_numbers_as_trainer


def test_each_process_draws_with_numbers_of_its_own(tiny_qwen3: Any) -> None:
    options = EngineOptions(engine="transformers", transformers=TransformersOptions(seed=5))
    states = [
        build_engine(policy(tiny_qwen3(0), process_index=i), options).engine.sampling_state()["generator"]  # type: ignore[attr-defined]
        for i in (0, 0, 1)
    ]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_split_parameters_get_a_whole_copy_whose_numbers_are_not_the_trainers(tiny_qwen3: Any) -> None:
    split = Backend("FSDP", 2, fsdp_version=2)
    built = build_engine(policy(tiny_qwen3(0), backend=split), EngineOptions(engine="transformers"))
    assert isinstance(built.engine, ReplicaEngine) and not built.engine.same_numbers_as_trainer


def test_an_adapter_alone_is_only_sent_where_there_is_a_plain_one(tiny_qwen3: Any) -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ConfigError, match="no adapter is trained; add --use_peft"):
        adapter_saver(policy(tiny_qwen3(0)))
    plain = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"]))
    assert policy(plain).base_model is plain.get_base_model()
    assert callable(adapter_saver(policy(plain)))
    with pytest.raises(ConfigError, match="FSDP2 on 2 processes splits them"):
        adapter_saver(policy(plain, backend=Backend("FSDP", 2, fsdp_version=2)))
    odd = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ConfigError, match="use_dora=True"):
        adapter_saver(policy(odd))
