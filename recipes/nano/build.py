"""Build nano: tokenizer, demonstrations, supervised training, save.

    export OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
    python -m recipes.nano.build                  # writes the weights that the package ships
    python -m recipes.nano.build --out FOLDER     # somewhere else, and says how far it is from the shipped ones
    python -m recipes.nano.build --hybrid --out FOLDER  # a model of Qwen3.5's shape, which is not shipped

With these three variables an AMD EPYC with AVX2 makes the shipped weights bit for bit. Another processor rounds its sums
differently, and what a build becomes depends on that: its weights differ, and its success before training by some points.

First every demonstration is right; the last steps add the bad habits that reinforcement learning is to remove.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from recipes.nano.demonstrations import Habits, demonstrate, draw_training_problem, render, render_tools
from recipes.nano.recipe import HYBRID, NanoRecipe
from recipes.nano.tokenizer import build_tokenizer
from recipes.nano.toolsets import draw_toolset
from recipes.nano.training import Batch, Muon, collate, train, warmup_then_decay
from toolgrpo.models import NANO
from toolgrpo.sft.encoder import Example

__all__ = ["build_nano", "largest_difference"]

_TEXTS_FOR_VOCABULARY = 600


def build_nano(recipe: NanoRecipe, folder: Path, on_step: Callable[[int, float], None] | None = None) -> None:
    """Write the model and its tokenizer into `folder`. The same recipe on the same machine gives the same model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        rng = random.Random(recipe.seed)
        tokenizer = _tokenizer(recipe, rng)
        model: Any = AutoModelForCausalLM.from_config(_config(recipe, tokenizer)).float()
        optimizer = Muon(model.named_parameters(), lr=recipe.learning_rate, adam_lr=recipe.adam_learning_rate)
        train(
            model,
            optimizer,
            _steps(recipe, tokenizer, rng),
            schedule=lambda step: warmup_then_decay(step, recipe.steps, warmup=recipe.warmup_steps, decay=recipe.decay),
            on_step=on_step,
        )
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(recipe: NanoRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config | Qwen3_5TextConfig:
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if not recipe.layer_types:
        return Qwen3Config(**shape)
    return Qwen3_5TextConfig(
        **shape,
        layer_types=list(recipe.layer_types),
        linear_key_head_dim=recipe.head_dim,
        linear_value_head_dim=recipe.head_dim,
        linear_num_key_heads=recipe.heads,
        linear_num_value_heads=recipe.heads,
    )


def _tokenizer(recipe: NanoRecipe, rng: random.Random) -> PreTrainedTokenizerFast:
    """The vocabulary comes from the demonstrations' own text, right ones and spoilt ones."""
    texts = []
    for number in range(_TEXTS_FOR_VOCABULARY):
        tools = draw_toolset(rng, canonical=0.5)
        problem = draw_training_problem(rng, rng.randint(1, 3))
        habits = _habits(recipe) if number % 2 else None
        texts.append(render_tools(tools) + render(demonstrate(problem, tools, rng, habits)))
    return build_tokenizer(texts, recipe.vocab_size)


def _habits(recipe: NanoRecipe) -> Habits:
    return Habits(guess=recipe.guess, stop_early=recipe.stop_early)


class _Encoder:
    """Text to ids, and the mask of assistant turns: from after their header to their end-of-turn token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._header = tokenizer.encode("<|im_start|>assistant\n")
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.pad_id: int = tokenizer.pad_token_id

    def examples(self, texts: Sequence[str]) -> list[Example]:
        return [Example(tuple(ids), self._mask(ids)) for ids in self._tokenizer(list(texts))["input_ids"]]

    def _mask(self, ids: Sequence[int]) -> tuple[int, ...]:
        mask, inside = [], False
        for index, token in enumerate(ids):
            mask.append(int(inside))
            if inside:
                inside = token != self._end
            else:
                inside = list(ids[index + 1 - len(self._header) : index + 1]) == self._header
        return tuple(mask)


def _steps(recipe: NanoRecipe, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[list[Batch]]:
    """The batch of each step: some toolsets, with questions that need the same number of calls under each."""
    encode = _Encoder(tokenizer)
    habits = _habits(recipe)
    for phase in recipe.phases:
        for _ in range(phase.steps):
            texts = []
            for n_calls in rng.choices(list(phase.calls), list(phase.calls.values()), k=recipe.toolsets_per_step):
                tools = draw_toolset(rng, phase.canonical)
                problems = [draw_training_problem(rng, n_calls) for _ in range(recipe.examples_per_toolset)]
                shown = [demonstrate(p, tools, rng, habits if phase.spoilt else None) for p in problems]
                texts += [render_tools(tools) + render(messages) for messages in shown]
            yield [collate(encode.examples(texts), encode.pad_id)]


def largest_difference(one: Path, other: Path) -> float:
    """Return how far the weights of two folders are apart, at most."""
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=NANO, help="the folder to write (default: the shipped weights)")
    parser.add_argument("--hybrid", action="store_true", help="of Qwen3.5's shape; needs --out")
    given = parser.parse_args()
    out: Path = given.out
    if given.hybrid and out.resolve() == NANO.resolve():
        parser.error("--hybrid would write over the shipped weights; give --out FOLDER")
    out.mkdir(parents=True, exist_ok=True)
    recipe = HYBRID if given.hybrid else NanoRecipe()

    def say(step: int, loss: float) -> None:
        if (step + 1) % 20 == 0:
            print(f"step {step + 1} of {recipe.steps}, loss {loss:.3f}", flush=True)

    build_nano(recipe, out, say)
    print(f"wrote {out}")
    if not given.hybrid and out.resolve() != NANO.resolve():
        print(f"largest difference from the shipped weights: {largest_difference(out, NANO):g}")


if __name__ == "__main__":
    main()
