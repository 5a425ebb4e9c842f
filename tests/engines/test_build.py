from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.model_families import tiny_family
from toolgrpo.engines.adapters import adapter_saver
from toolgrpo.engines.build import ENGINES, EngineOptions, build_engine, choose_engine
from toolgrpo.engines.policy import Backend, Policy
from toolgrpo.engines.transformers import ReplicaEngine, TransformersEngine
from toolgrpo.engines.vllm_options import ServerOptions, served_config, vllm_available, vllm_is_for_cpu
from toolgrpo.errors import ConfigError
from toolgrpo.testing import tiny_trainer


def asked_for(engine: str, urls: Sequence[str] = (), lora_sync: str = "merge") -> EngineOptions:
    return EngineOptions(engine=engine, vllm_server=ServerOptions(urls=tuple(urls)), lora_sync=lora_sync)


def test_auto_takes_what_is_there_and_what_was_asked_for_is_taken() -> None:
    choice = choose_engine(asked_for("auto"))
    expected = ("vllm_colocate", "vLLM is installed") if vllm_available() else ("transformers", "vLLM is not installed")
    assert (choice.name, choice.why) == expected
    assert choose_engine(asked_for("auto", ["http://localhost:8000"])).name == "vllm_server"
    with pytest.raises(ConfigError, match="--vllm_server_urls"):
        choose_engine(asked_for("vllm_server"))
    assert choose_engine(asked_for("transformers")).why == "asked for"


ALONE = Backend("NO", 1)


def policy(model: Any, *, backend: Backend = ALONE, process_index: int = 0, device: str = "cpu") -> Policy:
    return Policy(
        get_model=lambda: model,
        weights=model.named_parameters,
        dtype=torch.float32,
        device=torch.device(device),
        backend=backend,
        process_index=process_index,
    )


def test_an_engine_is_built_for_a_policy_that_no_trainer_has(tiny_qwen3: Any) -> None:
    options = EngineOptions(engine="transformers", max_model_len=100, seed=5)
    built = build_engine(policy(tiny_qwen3(0)), options)
    assert isinstance(built.engine, TransformersEngine) and built.choice.why == "asked for"
    assert built.engine.max_model_len == 100 and built.engine.same_numbers_as_trainer


@pytest.mark.parametrize(
    ("targets", "tied", "taken"),
    [("q_proj", True, True), ("lm_head", True, False), ("lm_head", False, True), ("embed_tokens", True, False)],
)
def test_an_adapter_on_weights_that_a_model_has_in_common_is_not_for_vllm(
    targets: str, tied: bool, taken: bool
) -> None:
    """vLLM has one tensor for both, and the adapter changes one of them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    base = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, tie_word_embeddings=tied, **sizes))
    adapted = policy(get_peft_model(base, LoraConfig(target_modules=["q_proj", targets])))
    if taken:
        assert choose_engine(asked_for("vllm_server", ["http://localhost:8000"]), adapted).name == "vllm_server"
    else:
        with pytest.raises(ConfigError, match="lm_head or the embeddings"):
            choose_engine(asked_for("vllm_server", ["http://localhost:8000"]), adapted)


def test_each_process_draws_with_numbers_of_its_own(tiny_qwen3: Any) -> None:
    options = EngineOptions(engine="transformers", seed=5)
    states = [
        build_engine(policy(tiny_qwen3(0), process_index=i), options).engine.sampling_state()["generator"]  # type: ignore[attr-defined]
        for i in (0, 0, 1)
    ]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_split_parameters_get_a_whole_copy_whose_numbers_are_not_the_trainers(tiny_qwen3: Any) -> None:
    model = tiny_qwen3(0).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # and the angles of positions in fp32: so transformers loads a model
    split = replace(policy(model, backend=Backend("FSDP", 2, fsdp_version=2)), dtype=torch.bfloat16)
    engine = build_engine(split, EngineOptions(engine="transformers")).engine
    assert isinstance(engine, ReplicaEngine) and not engine.same_numbers_as_trainer
    engine.load_weights(model.named_parameters())
    ids = torch.arange(400)[None] % 50
    assert torch.equal(engine._replica(ids).logits, model(ids).logits)


def test_an_adapter_alone_is_only_sent_where_there_is_a_plain_one(tiny_qwen3: Any) -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ConfigError, match="--use_peft"):
        adapter_saver(policy(tiny_qwen3(0)))
    plain = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"]))
    assert policy(plain).base_model is plain.get_base_model()
    assert callable(adapter_saver(policy(plain)))
    with pytest.raises(ConfigError, match="FSDP2 on 2 processes splits them"):
        adapter_saver(policy(plain, backend=Backend("FSDP", 2, fsdp_version=2)))
    odd = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ConfigError, match="use_dora=True"):
        adapter_saver(policy(odd))


def test_what_was_wrong_on_a_gpu_is_refused_there() -> None:
    odd, asked = policy(tiny_family("nemotron_h"), device="cuda"), EngineOptions(engine="transformers")
    with pytest.raises(ConfigError, match=r"nemotron_h.*GPU"):
        ENGINES["transformers"].build(odd, asked)


def test_an_adapter_alone_wants_16_bits_on_a_gpu(tiny_qwen3: Any) -> None:
    wanted = EngineOptions(engine="vllm_colocate", lora_sync="adapter")
    with pytest.raises(ConfigError, match=r"float32.*--dtype bfloat16"):
        ENGINES["vllm_colocate"].build(policy(tiny_qwen3(0), device="cuda"), wanted)


class Packed(torch.nn.Module):
    """A model as bitsandbytes leaves it, as far as anybody asks."""

    is_quantized = True

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        self.is_loaded_in_4bit = bits == 4
        self.config = Qwen3Config(quantization_config={"load_in_4bit": bits == 4})


def test_packed_weights_are_for_one_engine_and_the_others_say_so() -> None:
    asked = policy(Packed())
    urls = ["http://localhost:8000"]
    assert choose_engine(asked_for("auto", urls), asked).name == "transformers"
    assert "packed" in choose_engine(asked_for("auto"), asked).why or not vllm_available()
    assert choose_engine(asked_for("transformers"), asked).name == "transformers"
    for other, sync in ((asked, "merge"), (asked, "adapter"), (policy(Packed(4)), "merge")):
        with pytest.raises(ConfigError, match=r"packed.*--engine transformers with --load_in_4bit"):
            choose_engine(asked_for("vllm_server", urls, sync), other)
    assert choose_engine(asked_for("auto", urls, "adapter"), policy(Packed(4))).name == "vllm_server"
    split = policy(Packed(), backend=Backend("FSDP", 2, fsdp_version=2))
    with pytest.raises(ConfigError, match=r"FSDP2 on 2 .*packed"):
        build_engine(split, EngineOptions(engine="transformers"))


@pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")
def test_a_vllm_for_other_devices_than_the_trainers_is_not_taken(tiny_qwen3: Any) -> None:
    other = policy(tiny_qwen3(0), device="cuda" if vllm_is_for_cpu() else "cpu")
    choice = choose_engine(asked_for("auto"), other)
    assert choice.name == "transformers" and "this build of vLLM runs on" in choice.why
    with pytest.raises(ConfigError, match="--engine"):
        choose_engine(asked_for("vllm_colocate"), other)
    with pytest.raises(ConfigError, match="packed"):
        choose_engine(asked_for("vllm_colocate"), policy(Packed()))


@pytest.mark.needs_cpu_vllm
def test_vllm_needs_a_plugin_and_bf16_for_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Packed(4)
    assert "quantization_config" in served_config(model, packed=True).to_dict()
    for there, says in (("vllm", "pip install bitsandbytes vllm-bnb-plugin"), ("", "in float32: add --bf16 true")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, there=there: None if there and there != name else name
        )
        with pytest.raises(ConfigError, match=rf"vllm_colocate .*{says}.*--engine"):
            choose_engine(asked_for("vllm_colocate", lora_sync="adapter"), policy(model))
    asked = replace(policy(model), dtype=torch.bfloat16)
    assert choose_engine(asked_for("auto", lora_sync="adapter"), asked).name == "vllm_colocate"


@pytest.mark.needs_cpu_vllm
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_left_to_the_other_engine(tiny_qwen3: Any) -> None:
    model = tiny_qwen3(0)
    assert choose_engine(asked_for("auto"), policy(model)).name == "vllm_colocate"
    model.config.head_dim = 8
    choice = choose_engine(asked_for("auto"), policy(model))
    assert choice.name == "transformers" and "heads are 8 wide, and vLLM on a CPU computes 32, 64" in choice.why
    with pytest.raises(ConfigError, match=r"cannot run here: the model's attention heads are 8 wide"):
        choose_engine(asked_for("vllm_colocate"), policy(model))


def test_weights_that_vllm_does_not_take_are_drawn_from_by_the_other_engine() -> None:
    asked, urls = policy(tiny_family("gpt_oss")), ["http://localhost:8000"]
    for engine in ("vllm_server", "vllm_colocate")[: 1 + vllm_available()]:
        with pytest.raises(ConfigError, match=r"gpt_oss.*--vllm_lora_sync"):
            choose_engine(asked_for(engine, urls), asked)
        assert choose_engine(asked_for(engine, urls, lora_sync="adapter"), asked).name == engine
    assert choose_engine(asked_for("auto", urls), asked).name == "transformers"


@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("lfm2", "vLLM on a CPU computes other numbers for lfm2 than it was trained with"),
        ("qwen3_5", r"from this qwen3_5_text: it needs bf16 .*float32\), .*\(here 32\), and torchvision \(missing"),
    ],
)
def test_what_vllm_computes_wrongly_on_a_cpu_is_drawn_from_by_the_other_engine(family: str, why: str) -> None:
    asked = policy(tiny_family(family))
    with pytest.raises(ConfigError, match=why + ".* Use --engine transformers"):
        choose_engine(asked_for("vllm_colocate"), asked)
    assert choose_engine(asked_for("auto"), asked).name == "transformers"
    assert choose_engine(asked_for("auto", ["http://gpu:8000"]), asked).name == "vllm_server"


@pytest.mark.needs_cpu_vllm
def test_a_recurrent_model_that_vllm_computes_on_a_cpu_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(policy(tiny_family("qwen3_5")), dtype=torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    asked.base_model.config.linear_key_head_dim = 128
    assert choose_engine(asked_for("auto"), asked).name == "vllm_colocate"


def test_an_adapter_is_saved_without_asking_a_hub(
    tiny_qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.utils import save_and_load

    def asked(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"the hub was asked for {arguments}")

    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", asked)
    plain = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"]))
    plain.peft_config["default"].base_model_name_or_path = "owner/name"
    with pytest.raises(AssertionError, match="the hub was asked for"):
        plain.save_pretrained(str(tmp_path))  # what PEFT does by itself
    adapter_saver(policy(plain))(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"vllm_tensor_parallel_size": 2}, r"one copy per process.*vllm serve --tensor-parallel-size 2"),
        ({"vllm_enable_sleep_mode": True}, "training is on the CPU; leave it out"),
    ],
)
def test_what_colocated_vllm_cannot_do_here(tmp_path: Path, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), None, engine="vllm_colocate", **asked)
