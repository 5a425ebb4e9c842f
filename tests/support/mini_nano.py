"""The recipe of a nano that is built in a second: its tokenizer and form are nano's, and it can do nothing."""

from __future__ import annotations

from toolgrpo.models.nano.recipe import NanoRecipe, Phase

__all__ = ["MINI_NANO"]

MINI_NANO = NanoRecipe(
    hidden_size=64,
    intermediate_size=128,
    layers=1,
    heads=2,
    kv_heads=1,
    phases=(Phase(name="mini", steps=1, calls={1: 1.0}, canonical=1.0),),
    toolsets_per_step=1,
    examples_per_toolset=2,
)
