"""A trainer that is real but tiny, on a CPU: a random model, a script in place of what it would say, rows of text.

Importing this is light; torch, transformers and TRL are imported when something is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolgrpo.testing.chat import ByteChat
from toolgrpo.testing.engine import Script, ScriptedEngine

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from toolgrpo.chat.base import ChatFormat
    from toolgrpo.trainer.config import ToolGRPOConfig


_ROWS = tuple({"prompt": f"q{i}", "answer": str(i)} for i in range(8))


def numbered_tokenizer(size: int = 320) -> Any:
    """Build a fast tokenizer of tokens t0, t1 and so on, without text: `ByteChat` makes the ids.

    `ByteChat.end` ends a text, and 258 is padding: TRL only wants to know these two.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])),
        eos_token=f"t{ByteChat.end}",
        pad_token="t258",
    )


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    """Return a random Qwen3 of 0.1M parameters; its vocabulary of 320 holds no meaning."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform, so that a wrong token or weight shows
        bos_token_id=None,
        eos_token_id=316,  # greedy decoding says it often, and only a request may say that it ends a turn
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def tiny_config(folder: Path, **changes: Any) -> ToolGRPOConfig:
    """Return two steps of two groups of four short episodes, with nothing saved and nothing reported but the log."""
    from toolgrpo.trainer.config import ToolGRPOConfig

    return ToolGRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 120,
            "max_steps": 2,
            "report_to": "none",
            "use_cpu": True,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            # The scripted log-probabilities are not the model's: a mask would drop every sequence.
            "vllm_importance_sampling_mode": "token_truncate",
            **changes,
        }
    )


def tiny_trainer(
    folder: Path,
    reward: Callable[..., Any],
    script: Script | None,
    *,
    rows: Sequence[Mapping[str, Any]] = _ROWS,
    chat: ChatFormat | None = None,
    model: Any = None,
    kind: type | None = None,
    parts: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a trainer of a tiny model over these rows, of the class `kind` (`ToolGRPOTrainer`).

    The script speaks for the model; with None the engine is the one that the config or `parts` names. `parts` are
    further arguments of the trainer (`tools`, `observers`, `engine`), `changes` those of `tiny_config`. `model` has a
    vocabulary of 320; `tiny_qwen3()` if there is none.
    """
    from datasets import Dataset

    from toolgrpo.trainer.trainer import ToolGRPOTrainer

    return (kind or ToolGRPOTrainer)(
        model or tiny_qwen3(),
        reward,
        tiny_config(folder, **changes),
        **{
            "train_dataset": Dataset.from_list([dict(row) for row in rows]),
            "processing_class": numbered_tokenizer(),
            "engine": None if script is None else ScriptedEngine(script),
            "chat": chat or ByteChat(),
            **(parts or {}),
        },
    )
