"""nano's tokenizer: Qwen's special tokens as single ids, single digits, words, and bytes for everything else.

Text is cut into pieces by one pattern: the fixed phrases of the chat format and of JSON schemas, words (with the space
before them), single digits, runs of punctuation. A piece that stands in the vocabulary is one token; any other is spelled in bytes,
so every text has an encoding. Names, descriptions and parameters of tools are pieces of their own: a schema is about 30
tokens long, not one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolgrpo.data.arithmetic import OPERATIONS

__all__ = ["CONTROL_TOKENS", "PHRASES", "build_tokenizer", "chat_template"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CONTROL_TOKENS = SPECIAL_TOKENS + MARKERS

# Fixed text of the chat format, of JSON schemas and of the demonstrations.
PHRASES = (
    "system\n# Tools",
    "user\n",
    "assistant\n",
    "\n\nYou may call one or more functions to assist with the user query.",
    "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    '\n{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "integer", "description": "',
    '"}, "',
    '"}}, "required": ["',
    '", "',
    '"]}}}',
    '\n{"name": "',
    '", "arguments": {"',
    '": ',
    ', "',
    "}}\n",
    "The answer is ",
    *(f"{operation}: " for operation in OPERATIONS),
)
_LONGEST_FIRST = sorted(PHRASES, key=len, reverse=True)  # the pattern takes the first that fits
_PATTERN = "|".join(re.escape(phrase) for phrase in _LONGEST_FIRST) + r"| ?[A-Za-z_]+|[0-9]|[^A-Za-z0-9_ \n]|\n+| +"


def chat_template() -> str:
    """Qwen3's chat format as TRL ships it, which the trainer uses too."""
    return (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the bytes and the most frequent pieces of `texts`."""
    byte_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = _pre_tokenizer()
    cut = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))
    pieces: Counter[str] = Counter()
    for text in texts:
        for part in cut.split(text):
            pieces.update(piece for piece, _ in split.pre_tokenize_str(part))
    room = vocab_size - len(CONTROL_TOKENS) - len(byte_alphabet)
    frequent = sorted((piece for piece in pieces if len(piece) > 1), key=lambda piece: (-pieces[piece], piece))[:room]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *byte_alphabet, *frequent])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template()
    return fast


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
