"""Names and weights that an engine is handed, with and without a LoRA adapter;
what is sent when only the adapter is (`vllm_lora_sync: adapter`), and when it may be.

A model's persistent buffers go with its parameters, as in `state_dict()`: Gemma 4 scales its layers
by one, GLM-4-MoE and DeepSeek-V3 choose experts by one. An engine without them is another model.

`merge` sends the whole model, with the adapter added into it, after every step. `adapter` sends a
few megabytes; vLLM adds the adapter's product to the base model's at every token, so the engine is
a little slower and its sums are rounded in another order.

Merging here leaves the base model as it is. (Adding the adapter into it and subtracting it again,
as PEFT's own merge and unmerge do, moves the base weights by rounding errors at every step; in bf16
that adds up.)

Not covered: adapters with trained biases, whole trained modules or DoRA, which vLLM does not serve:
refused with a sentence. Rows of single tokens (`trainable_token_indices`) are merged, and refused alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer

from toolgrpo.engines.policy import Policy
from toolgrpo.errors import ConfigError
from toolgrpo.models.adapter_step import JoinedLinear

_WRAPPERS = re.compile(
    r"^base_model\.model\.|\.token_adapter|\.base_layer|modules_to_save\.[^.]+\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\."
)
_PLAIN = {
    **{"peft_type": "LORA", "bias": "none", "modules_to_save": None, "use_dora": False},
    **{"trainable_token_indices": None, "lora_bias": False, "use_qalora": False, "alora_invocation_tokens": None},
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # inits of PEFT begin so


def adapter_config(model: Any) -> Any:
    """Return the PEFT config of the adapter that is trained."""
    return model.peft_config[model.active_adapter]


def adapter_saver(policy: Policy) -> Callable[[Path], Any]:
    """Return what writes the adapter into a folder, in PEFT's format.

    Raises `ConfigError` where it cannot be sent alone.
    """
    model = policy.model
    if not hasattr(model, "peft_config"):
        raise ConfigError("vllm_lora_sync is adapter, but no adapter is trained; add --use_peft, or set it to merge")
    if policy.backend.splits_parameters:
        raise ConfigError(
            f"vllm_lora_sync adapter needs whole parameters in every process, and {policy.backend} splits them; set it "
            f"to merge, or use DDP or ZeRO-2"
        )
    config = adapter_config(model)
    for name, plain in _PLAIN.items():
        value = getattr(config, name, plain) or plain
        if value != plain:
            raise ConfigError(
                f"vLLM serves plain LoRA adapters only, and this one has {name}={value!r}; set vllm_lora_sync to merge"
            )
    base = policy.base_model
    if any(isinstance(one, LoraLayer) for one in (base.get_input_embeddings(), base.get_output_embeddings())):
        raise ConfigError(
            "vllm_lora_sync adapter sends no adapter of embeddings or of the output head, which vLLM serves for few models; "
            "leave them out of --lora_target_modules, or set vllm_lora_sync to merge"
        )
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE):
        raise ConfigError(
            f"init_lora_weights={init!r} changes the base model too, and vllm_lora_sync adapter sends the adapter "
            f"alone; set vllm_lora_sync to merge"
        )
    # PEFT would ask the hub whether the vocabulary has grown; plain LoRA never holds embeddings.
    return lambda folder: model.save_pretrained(str(folder), save_embedding_layers=False)


def own_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, tied ones once, and persistent buffers."""
    for name, parameter in model.named_parameters():
        yield name, parameter.data
    yield from persistent_buffers(model)


def persistent_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what `state_dict()` has beside parameters, under the names it has without any wrapper.

    They are whole in each process: neither DeepSpeed nor FSDP splits them.
    """
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set and "original_module" not in name:
                yield _WRAPPERS.sub("", name), buffer


def base_weights(base: Any) -> dict[str, torch.Tensor]:
    """Return the weights under the adapter by their checkpoint names, tied ones once; packed ones with their scales."""
    if getattr(base, "is_loaded_in_4bit", False):
        tied = {name for name, _ in base.named_parameters(remove_duplicate=False)} - {*dict(base.named_parameters())}
        whole = base.state_dict().items()
        return {_WRAPPERS.sub("", name): one for name, one in whole if ".lora_" not in name and name not in tied}
    return {_WRAPPERS.sub("", name): weight for name, weight in own_weights(base) if ".lora_" not in name}


def merges_exactly(model: Any) -> bool:
    """Return whether `merged_parameters` can be used: plain LoRA over plain weights."""
    if not hasattr(model, "peft_config"):
        return False
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    plain = all(
        type(layer) in (Linear, JoinedLinear, Embedding)
        and not (any(layer.use_dora.values()) or any(layer.lora_bias.values()) or layer.lora_variant)
        for layer in layers
    )
    return plain and bool(layers)


@torch.no_grad()
def merged_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of base model and adapter together, under the base model's names."""
    kinds = (LoraLayer, TrainableTokensLayer)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    for name, parameter in model.named_parameters():
        if model.prefix in name or "original_module" in name or "trainable_tokens_delta" in name:
            continue
        kept = re.search(r"modules_to_save\.([^.]+)\.", name)
        if kept is not None and kept[1] not in model.active_adapters:  # TRL's `ref`, say
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        weight = parameter.data
        if isinstance(layer, TrainableTokensLayer):
            weight = layer.get_merged_weights(layer.active_adapters)
        elif layer is not None:
            for adapter in layer.active_adapters:
                if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                    weight = (weight + layer.get_delta_weight(adapter)).to(weight.dtype)
        yield _WRAPPERS.sub("", name), weight
    yield from persistent_buffers(model)
