"""Supervised training of a chat model on conversations, from arguments to a saved model:
what `recipes/sft.py` does.

Not covered: several processes, LoRA, resuming. It is meant to teach a model the form of tool calls
before reinforcement learning; for large supervised runs use TRL's SFTTrainer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolgrpo.errors import ConfigError, DataError, ModelError
from toolgrpo.folder_claim import claim_folder
from toolgrpo.models.nano import NanoRecipe
from toolgrpo.named_models import folder_of
from toolgrpo.sft.batches import Batch, Example, collate
from toolgrpo.sft.encoder import ConversationEncoder, read_conversations
from toolgrpo.sft.loop import train, warmup_then_decay
from toolgrpo.sft.training_bar import StepProgress
from toolgrpo.storage import storage_errors

__all__ = ["SFTArguments", "SFTResult", "learning_rate_for", "run_sft"]


@dataclass
class SFTArguments:
    """What is taught, to whom, and how."""

    model_name_or_path: str = field(metadata={"help": "A chat model: a folder, a hub id, or `nano`."})
    dataset_id_or_path: str = field(
        metadata={"help": "A .jsonl file of conversations; `nano`: nano's demonstrations, from scratch."}
    )
    output_dir: str = field(metadata={"help": "Where the trained model is written."})
    tools_script: str | None = field(
        default=None, metadata={"help": "Tools that rows without a column `tools` are rendered with."}
    )
    max_steps: int = field(default=0, metadata={"help": "Optimizer steps; 0: one pass over the conversations."})
    batch_size: int = field(default=16, metadata={"help": "Conversations per optimizer step."})
    micro_batch_size: int = field(default=8, metadata={"help": "Conversations whose activations are held at once."})
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Peak learning rate of AdamW; default: by the model's size, 3e-3 for nano to 2e-5 from 1B on."
        },
    )
    warmup_steps: int = field(default=10, metadata={"help": "Steps over which the learning rate rises."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's weight decay."})
    max_length: int | None = field(
        default=None, metadata={"help": "Longer conversations are an error; default: the model's context window."}
    )
    seed: int = field(default=42, metadata={"help": "Decides the order of the conversations."})

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_steps < 0:
            raise ConfigError(f"max_steps must be at least 0 (one pass over the data), got {self.max_steps}")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class SFTResult:
    """The losses of all steps, and where the model is."""

    losses: tuple[float, ...]
    folder: Path


def run_sft(arguments: SFTArguments, console: Console) -> SFTResult:
    """Load, train, save. Meanwhile no other run may write into the output folder."""
    claim = claim_folder(Path(arguments.output_dir))
    if claim.warning is not None:
        console.print(claim.warning, markup=False)
    try:
        return _run(arguments, console)
    finally:
        claim.release()


def _run(arguments: SFTArguments, console: Console) -> SFTResult:
    if arguments.dataset_id_or_path == "nano":
        return _build_nano(arguments, console)
    tokenizer, model = _load(str(folder_of(arguments.model_name_or_path)))
    examples = _examples(arguments, tokenizer, arguments.max_length or model.config.max_position_embeddings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    rate = arguments.learning_rate or learning_rate_for(sum(p.numel() for p in model.parameters()))
    steps = arguments.max_steps or -(-len(examples) // arguments.batch_size)
    n_tokens = sum(sum(example.mask) for example in examples)
    console.print(
        f"{len(examples)} conversations, {n_tokens} tokens to learn, {steps} steps on {device}, learning rate {rate:.2g}",
        highlight=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=arguments.weight_decay, betas=(0.9, 0.98))
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    losses: list[float] = []
    with StepProgress(console, "sft", steps) as progress:

        def on_step(step: int, loss: float) -> None:
            losses.append(loss)
            progress.step(step, loss)

        train(
            model,
            optimizer,
            _steps(examples, arguments, steps, pad_id, device),
            schedule=lambda step: warmup_then_decay(step, steps, warmup=arguments.warmup_steps, decay=0.5),
            on_step=on_step,
        )
    folder = Path(arguments.output_dir)
    with storage_errors("the trained model", folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; the model is in {folder}", highlight=False)
    return SFTResult(tuple(losses), folder)


def learning_rate_for(n_parameters: int) -> float:
    """Return a peak learning rate at which a model of this size learns a new form in some hundred steps."""
    return min(3e-3, max(2e-5, 2e-5 * (1e9 / n_parameters) ** 0.7))


def _build_nano(arguments: SFTArguments, console: Console) -> SFTResult:
    """Build nano itself, from nothing but its demonstrations."""
    if arguments.model_name_or_path != "nano":
        raise ConfigError(
            f"the data set `nano` teaches the model `nano` from scratch; got --model_name_or_path "
            f"{arguments.model_name_or_path}. Give a .jsonl file of conversations to teach another model."
        )
    from toolgrpo.models.nano.build import build_nano

    recipe = NanoRecipe()
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    losses: list[float] = []
    with StepProgress(console, "nano", recipe.steps) as progress:

        def on_step(step: int, loss: float) -> None:
            losses.append(loss)
            progress.step(step, loss)

        build_nano(recipe, folder, on_step)
    return SFTResult(tuple(losses), folder)


def _load(path: str) -> tuple[Any, Any]:
    try:
        return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model_name_or_path {path}: no model can be loaded from there: {error}") from error


def _examples(arguments: SFTArguments, tokenizer: Any, max_length: int) -> list[Example]:
    schemas = None
    if arguments.tools_script is not None:
        from toolgrpo.tools import load_tools

        toolbox = load_tools(arguments.tools_script)
        schemas = toolbox.schemas
        toolbox.close()
    encode = ConversationEncoder(tokenizer)
    examples = []
    for index, row in enumerate(read_conversations(arguments.dataset_id_or_path)):
        example = encode(row["messages"], row["tools"] or schemas)
        if len(example.ids) > max_length:
            raise DataError(
                f"{arguments.dataset_id_or_path}: conversation {index + 1} has {len(example.ids)} tokens, but max_length "
                f"is {max_length}; shorten it, or raise --max_length if the model can take more"
            )
        examples.append(example)
    return examples


def _steps(
    examples: Sequence[Example], arguments: SFTArguments, steps: int, pad_id: int, device: str
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of `steps` optimizer steps, in as many shuffled passes as that takes.

    Conversations of similar length share a batch.
    """
    rng = random.Random(arguments.seed)
    queue: list[Example] = []
    for _ in range(steps):
        while len(queue) < min(arguments.batch_size, len(examples)):
            queue += rng.sample(list(examples), len(examples))
        chosen, queue = queue[: arguments.batch_size], queue[arguments.batch_size :]
        chosen.sort(key=lambda example: len(example.ids))
        size = arguments.micro_batch_size
        yield [collate(chosen[start : start + size], pad_id).to(device) for start in range(0, len(chosen), size)]
