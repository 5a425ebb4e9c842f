"""A tokenizer without text, for trainers in tests: `ByteChat` makes the ids,
and TRL only wants to know two of them.
"""

from __future__ import annotations

from typing import Any

from toolgrpo.testing.chat import ByteChat


def numbered_tokenizer(size: int = 320) -> Any:
    """Build a fast tokenizer of tokens t0, t1 and so on.

    `ByteChat.end` ends a text, and 258 is padding.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])),
        eos_token=f"t{ByteChat.end}",
        pad_token="t258",
    )
