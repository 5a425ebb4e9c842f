"""Which engine is built for a policy, and the weights that it is handed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import save_and_load
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.model_families import tiny_family
from toolgrpo.engines.adapters import adapter_saver, base_weights, own_weights
from toolgrpo.engines.build import ENGINES, EngineOptions, build_engine, choose_engine
from toolgrpo.engines.policy import Backend, Policy
from toolgrpo.engines.transformers import ReplicaEngine, TransformersEngine
from toolgrpo.engines.vllm_options import ServerOptions, served_config, vllm_available, vllm_is_for_cpu
from toolgrpo.errors import ConfigError
from toolgrpo.testing import tiny_trainer
from toolgrpo.trainer.trl.trainer import iter_named_params

URLS = ("http://localhost:8000",)


def asked_for(engine: str, urls: Sequence[str] = (), lora_sync: str = "merge") -> EngineOptions:
    return EngineOptions(engine=engine, vllm_server=ServerOptions(urls=tuple(urls)), lora_sync=lora_sync)


def test_auto_takes_what_is_there_and_what_was_asked_for_is_taken() -> None:
    choice = choose_engine(asked_for("auto"))
    expected = ("vllm_colocate", "vLLM is installed") if vllm_available() else ("transformers", "vLLM is not installed")
    assert (choice.name, choice.why) == expected
    assert choose_engine(asked_for("auto", URLS)).name == "vllm_server"
    with pytest.raises(ConfigError, match="--vllm_server_urls"):
        choose_engine(asked_for("vllm_server"))
    assert choose_engine(asked_for("transformers")).why == "asked for"


ALONE, SPLIT = Backend("NO", 1), Backend("FSDP", 2, fsdp_version=2)


def policy(model: Any, *, backend: Backend = ALONE, device: str = "cpu", **changes: Any) -> Policy:
    fixed: dict[str, Any] = {"get_model": lambda: model, "weights": model.named_parameters, "dtype": torch.float32}
    return Policy(**{**fixed, "device": torch.device(device), "backend": backend, "process_index": 0, **changes})


def test_a_policy_without_a_trainer_gets_an_engine_that_draws_with_numbers_of_its_process(tiny_qwen3: Any) -> None:
    options = EngineOptions(engine="transformers", max_model_len=100, seed=5)
    built = [build_engine(policy(tiny_qwen3(0), process_index=i), options) for i in (0, 0, 1)]
    engines = [one.engine for one in built if isinstance(one.engine, TransformersEngine)]
    assert built[0].choice.why == "asked for"
    assert engines[0].max_model_len == 100 and engines[0].same_numbers_as_trainer
    states = [one.sampling_state()["generator"] for one in engines]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ("targets", "tied", "taken"),
    [("q_proj", True, True), ("lm_head", True, False), ("lm_head", False, True), ("embed_tokens", True, False)],
)
def test_an_adapter_on_weights_that_are_in_common_is_not_for_vllm_or_a_copy(
    targets: str, tied: bool, taken: bool
) -> None:
    """vLLM has one tensor for both, and the adapter changes one of them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    base = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, tie_word_embeddings=tied, **sizes))
    adapted = policy(get_peft_model(base, LoraConfig(target_modules=["q_proj", targets])))
    with nullcontext() if taken else pytest.raises(ConfigError, match="lm_head or the embeddings"):
        assert choose_engine(asked_for("vllm_server", URLS), adapted).name == "vllm_server"
    with nullcontext() if taken else pytest.raises(ConfigError, match="in common"):
        build_engine(adapted, EngineOptions(engine="transformers", own_copy=True, max_model_len=64))


def test_split_parameters_get_a_whole_copy_whose_numbers_are_not_the_trainers(tiny_qwen3: Any) -> None:
    model = tiny_qwen3(0).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # and the angles of positions in fp32: so transformers loads a model
    split = policy(model, backend=SPLIT, dtype=torch.bfloat16)
    engine = build_engine(split, EngineOptions(engine="transformers")).engine
    assert isinstance(engine, ReplicaEngine) and not engine.same_numbers_as_trainer
    engine.load_weights(model.named_parameters())
    ids = torch.arange(400)[None] % 50
    assert torch.equal(engine._replica(ids).logits, model(ids).logits)


def test_an_adapter_alone_is_only_sent_where_there_is_a_plain_one(tiny_qwen3: Any) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"use_dora": True},
        {"lora_bias": True},
        {"init_lora_weights": "pissa_niter_2"},
    ]
    plain, *odd = (get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"], **one)) for one in variants)
    assert policy(plain).base_model is plain.get_base_model()
    assert callable(adapter_saver(policy(plain)))
    refused = {"--use_peft": policy(tiny_qwen3(0))}
    refused |= dict(zip(("use_dora=True", "lora_bias=True", "pissa"), map(policy, odd), strict=True))
    ends = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    refused["embeddings"] = policy(ends)
    for says, asked in {**refused, "FSDP2 on 2 processes": policy(plain, backend=SPLIT)}.items():
        with pytest.raises(ConfigError, match=says):
            adapter_saver(asked)


def test_on_a_gpu_wrong_numbers_are_refused_and_an_adapter_alone_wants_16_bits(tiny_qwen3: Any) -> None:
    odd, asked = policy(tiny_family("nemotron_h"), device="cuda"), EngineOptions(engine="transformers")
    with pytest.raises(ConfigError, match=r"nemotron_h.*GPU"):
        ENGINES["transformers"].build(odd, asked)
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
    assert choose_engine(asked_for("auto", URLS), asked).name == "transformers"
    assert "packed" in choose_engine(asked_for("auto"), asked).why or not vllm_available()
    assert choose_engine(asked_for("transformers"), asked).name == "transformers"
    for other, sync in ((asked, "merge"), (asked, "adapter"), (policy(Packed(4)), "merge")):
        with pytest.raises(ConfigError, match=r"packed.*--engine transformers with --load_in_4bit"):
            choose_engine(asked_for("vllm_server", URLS, sync), other)
    assert choose_engine(asked_for("auto", URLS, "adapter"), policy(Packed(4))).name == "vllm_server"
    with pytest.raises(ConfigError, match=r"FSDP2 on 2 .*packed"):
        build_engine(policy(Packed(), backend=SPLIT), EngineOptions(engine="transformers"))


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
    for plugin, says in ((None, "pip install bitsandbytes vllm-bnb-plugin"), ("there", "in float32: add --bf16 true")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, it=plugin: name if name == "vllm" else it)
        with pytest.raises(ConfigError, match=rf"vllm_colocate .*{says}.*--engine"):
            choose_engine(asked_for("vllm_colocate", lora_sync="adapter"), policy(model))
    asked = policy(model, dtype=torch.bfloat16)
    assert choose_engine(asked_for("auto", lora_sync="adapter"), asked).name == "vllm_colocate"


def test_weights_that_vllm_does_not_take_are_drawn_from_by_the_other_engine() -> None:
    asked = policy(tiny_family("gpt_oss"))
    for engine in ("vllm_server", "vllm_colocate")[: 1 + vllm_available()]:
        with pytest.raises(ConfigError, match=r"gpt_oss.*--vllm_lora_sync"):
            choose_engine(asked_for(engine, URLS), asked)
        assert choose_engine(asked_for(engine, URLS, lora_sync="adapter"), asked).name == engine
    assert choose_engine(asked_for("auto", URLS), asked).name == "transformers"


@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("lfm2", {}, "vLLM on a CPU computes other numbers for lfm2"),
        ("qwen3_5", {}, r"qwen3_5_text: it needs bf16 .*float32\), .*\(here 32\), and torchvision \(missing"),
        ("glm4_moe", {"head_dim": 8}, "heads are 8 wide, and vLLM on a CPU computes 32, 64"),
    ],
)
def test_what_vllm_cannot_compute_on_a_cpu_is_drawn_from_by_the_other_engine(
    family: str, changes: dict[str, int], why: str
) -> None:
    asked = policy(tiny_family(family))
    asked.base_model.config.update(changes)
    with pytest.raises(ConfigError, match=why + ".* Use --engine transformers"):
        choose_engine(asked_for("vllm_colocate"), asked)
    choice = choose_engine(asked_for("auto"), asked)
    assert choice.name == "transformers" and re.search(why.partition(":")[0], choice.why)
    assert choose_engine(asked_for("auto", URLS), asked).name == "vllm_server"


@pytest.mark.needs_cpu_vllm
def test_what_vllm_computes_on_a_cpu_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = policy(tiny_family("qwen3_5"), dtype=torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    asked.base_model.config.linear_key_head_dim = 128
    for computed in (asked, policy(tiny_family("glm4_moe"))):
        assert choose_engine(asked_for("auto"), computed).name == "vllm_colocate"


def test_saving_an_adapter_asks_no_hub(tiny_qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("flag", "value", "says"),
    [
        ("tensor_parallel_size", 2, "serve --tensor-parallel-size 2"),
        ("enable_sleep_mode", True, "training is on the CPU"),
    ],
)
def test_what_colocated_vllm_cannot_do_here(tmp_path: Path, flag: str, value: Any, says: str) -> None:
    asked = {"engine": "vllm_colocate", f"vllm_{flag}": value}
    with pytest.raises(ConfigError, match=says):
        tiny_trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), None, **asked)


# It is handed what `state_dict()` has: parameters and persistent buffers, whatever wraps the model

BUFFERS = {"gemma4": "model.layers.0.layer_scalar", "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias"}


def walked(model: Any) -> dict[str, torch.Tensor]:
    """What a trainer of this model hands over, in one process."""
    one = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
    return dict(iter_named_params(SimpleNamespace(model=model, accelerator=None, backend=ALONE, _dist=one)))


@pytest.mark.parametrize("family", BUFFERS)
@pytest.mark.parametrize("adapter", [None, {}, {"use_dora": True}], ids=["whole model", "LoRA", "DoRA"])
def test_the_trainer_hands_over_what_state_dict_has(family: str, adapter: dict[str, Any] | None) -> None:
    model = tiny_family(family)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert BUFFERS[family] in expected
    if adapter is not None:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"], **adapter))
        under = base_weights(model.get_base_model())
        torch.testing.assert_close(under[BUFFERS[family]], expected[BUFFERS[family]])
    found = walked(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_a_copy_of_the_model_gets_them_too() -> None:
    trained, copy = tiny_family("gemma4"), tiny_family("gemma4", seed=1)
    ReplicaEngine(copy, max_model_len=64).load_weights(own_weights(trained))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, trained(ids).logits)
