"""What the recipes need of one GPU, in GiB, as a sum of parts: arithmetic, nothing is loaded or run.

    python recipes/memory.py --tokenizer Qwen/Qwen3-1.7B=FOLDER --tokenizer Qwen/Qwen2.5-0.5B-Instruct=FOLDER

Prompts are rendered with the tokenizer beside each model (from the hub, or from the folder that is given); rows are the
local samples in recipes/data/, so the whole data set may have a somewhat longer prompt. Parts that are no arithmetic are
allowances and stand in ALLOWANCES.
"""

from __future__ import annotations

from toolgrpo.startup import prepare

prepare()

import argparse  # noqa: E402
import tempfile  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen2Config, Qwen3Config  # noqa: E402

from toolgrpo.chat import resolve_format  # noqa: E402
from toolgrpo.commands.arguments import parse_arguments  # noqa: E402
from toolgrpo.commands.parts import LORA_TARGETS  # noqa: E402
from toolgrpo.data import load_tasks  # noqa: E402
from toolgrpo.engines.policy import kv_bytes_per_token  # noqa: E402
from toolgrpo.rollout.demand import Window, measure_window  # noqa: E402
from toolgrpo.tools import load_tools  # noqa: E402

SHAPES: dict[str, PretrainedConfig] = {
    "Qwen/Qwen3-1.7B": Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
}  # fmt: skip
LOCAL = {
    "gsm8k": "gsm8k:recipes/data/gsm8k_30.jsonl",
    "mbpp": "mbpp:recipes/data/mbpp_10.jsonl",
    "aime": "aime:recipes/data/aime_10.jsonl",
}
ALLOWANCES = {"CUDA, for trainer and vLLM": 1.2, "vLLM's activations and graphs": 1.5, "the head's tiles": 0.6}
SEQUENCES = 8  # full-length episodes that vLLM shall hold at once; more wait
GIB = 2**30
HERE = ["--use_cpu", "true", "--bf16", "false"]  # this machine need not have a GPU


@dataclass(frozen=True)
class Need:
    """The parts of one recipe's sum, in GiB."""

    window: Window
    cache_of_one: float  # KV of one full-length episode
    weights: float
    training: float  # gradients, Adam, adapter
    activations: float
    engine: float  # weights and cache of vLLM

    @property
    def total(self) -> float:
        parts = self.weights + self.training + self.activations + self.engine
        return parts + sum(ALLOWANCES.values())


def need(recipe: Path, tokenizers: dict[str, str]) -> Need | None:
    """Return the sum of one recipe; None where its model is not in SHAPES."""
    with tempfile.TemporaryDirectory() as folder:
        script, config, model = parse_arguments(["--config", str(recipe), "--output_dir", folder, *HERE])
    name = str(model.model_name_or_path)
    if name not in SHAPES:
        return None
    shape = SHAPES[name]
    spec = str(script.dataset_id_or_path)
    rows = list(load_tasks(LOCAL.get(spec, spec), system_prompt=script.system_prompt))
    tools = load_tools(script.tools_script)
    try:
        chat = resolve_format(AutoTokenizer.from_pretrained(tokenizers.get(name, name)))
        window = measure_window(
            rows,
            chat,
            tools,
            max_completion_length=config.episode_limits().max_completion_length,
            enable_thinking=config.enable_thinking,
        )
    finally:
        tools.close()
    assert window is not None
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(shape)
    n_weights = sum(parameter.numel() for parameter in whole.parameters())
    stored = 2 if str(model.dtype).endswith("bfloat16") else 4
    n_trained, copy = n_weights, stored
    if model.use_peft:
        n_trained, copy = lora_weights(whole, model.lora_r), 4
    a_token = kv_bytes_per_token(shape, torch.bfloat16)
    assert a_token is not None
    tokens = config.per_device_train_batch_size * window.tokens  # as if every episode were as long as it may be
    kept = tokens * shape.hidden_size * 2 * shape.num_hidden_layers  # what checkpointing keeps of each layer
    one_layer = tokens * (8 * shape.hidden_size + 3 * shape.intermediate_size) * 2
    return Need(
        window=window,
        cache_of_one=a_token * window.tokens / GIB,
        weights=n_weights * stored / GIB,
        training=n_trained * (copy * (1 if model.use_peft else 0) + 4 + 8) / GIB,
        activations=(kept + one_layer) / GIB,
        engine=(n_weights * 2 + a_token * window.tokens * SEQUENCES) / GIB,
    )


def lora_weights(model: Any, rank: int) -> int:
    """Return how many weights an adapter of this rank has on the projections that recipes adapt."""
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in LORA_TARGETS
    ]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="append", default=[], metavar="MODEL=FOLDER")
    tokenizers = dict(given.split("=", 1) for given in parser.parse_args().tokenizer)
    print(
        "| recipe | longest prompt | after it | context | cache of one episode | weights | trained | activations | vLLM | "
        "in all |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for recipe in sorted((Path(__file__).parent / "configs").glob("*.yaml")):
        if recipe.stem.startswith("sft"):
            continue
        found = need(recipe, tokenizers)
        if found is None:
            continue
        window = found.window
        print(
            f"| `{recipe.stem}` | {window.longest_prompt} | {window.max_completion_length} | {window.tokens} | "
            f"{found.cache_of_one:.2f} | {found.weights:.1f} | {found.training:.1f} | {found.activations:.1f} | "
            f"{found.engine:.1f} | {found.total:.1f} |"
        )


if __name__ == "__main__":
    main()
