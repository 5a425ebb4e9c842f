"""nano comes with the package: it loads as it is, and its vocabulary and template are those of its recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.nano.build import build_nano
from recipes.nano.recipe import HYBRID, MINI, NanoRecipe
from toolgrpo.errors import ModelError
from toolgrpo.models import NANO, check_weights, folder_of


def test_it_is_a_chat_model_of_its_recipes_shape() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(NANO), AutoTokenizer.from_pretrained(NANO)
    recipe = NanoRecipe()
    assert folder_of("nano") == str(NANO)
    assert model.dtype == torch.float32 and model.config.vocab_size == len(tokenizer)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (recipe.hidden_size, recipe.layers)
    assert tokenizer.chat_template and tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_its_recipe_makes_its_tokenizer_and_the_same_weights_every_time(mini_nano: Path, tmp_path: Path) -> None:
    build_nano(MINI, tmp_path)
    one, two = (load_file(folder / "model.safetensors") for folder in (mini_nano, tmp_path))
    assert all(torch.equal(one[key], two[key]) for key in one)
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / file).read_text() == (NANO / file).read_text(), file


def test_the_same_lessons_make_a_model_of_qwen3_5s_shape(tmp_path: Path) -> None:
    layers = ("linear_attention", "full_attention")
    build_nano(replace(MINI, layers=len(layers), layer_types=layers), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.model_type, tuple(model.config.layer_types)) == ("qwen3_5_text", layers)
    assert (tmp_path / "tokenizer.json").read_text() == (NANO / "tokenizer.json").read_text()
    assert set(HYBRID.layer_types) == set(layers)
    assert [replace(phase, steps=0) for phase in HYBRID.phases] == [
        replace(phase, steps=0) for phase in NanoRecipe().phases
    ]


def test_weights_that_are_cut_short_are_named(tmp_path: Path) -> None:
    whole = (NANO / "model.safetensors").read_bytes()
    for n_bytes in (4, len(whole) // 2):
        (tmp_path / "model.safetensors").write_bytes(whole[:n_bytes])
        with pytest.raises(ModelError, match=rf"{tmp_path}/model.safetensors"):
            check_weights(tmp_path)
    check_weights(NANO)
