"""What an engine's cache holds: arithmetic on a model's config."""

from __future__ import annotations

from typing import Any

import torch


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int | None:
    """Return the bytes of keys and values that one token takes in all layers.

    None for attention that keeps something else (latent, or no attention in every layer).
    """
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if not layers or not heads or getattr(config, "kv_lora_rank", None) is not None:
        return None
    if any("linear" in kind or "mamba" in kind for kind in getattr(config, "layer_types", None) or ()):
        return None
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    size = head_size(config)
    assert size is not None
    return int(layers * 2 * key_value_heads * size * dtype.itemsize)


def head_size(config: Any) -> int | None:
    """Return the width of an attention head; None for attention that keeps something else (latent)."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads or getattr(config, "kv_lora_rank", None) is not None:
        return None
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)
