"""Random conversations with real tokenizers: no token of a prompt or a bridge differs from the tokenizer's own, and calls
are read as they were made. `python tests/real_tokenizers/fetch.py` fetches the tokenizers; what was not fetched is skipped.
"""

from __future__ import annotations

import warnings

import pytest

from toolgrpo.chat import resolve_format
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.errors import ChatFormatError
from toolgrpo.testing.fetched_tokenizers import CASES, fetched_tokenizer
from toolgrpo.testing.random_conversations import tally
from toolgrpo.testing.real_tokenizers import NotAtHand

# One for each thing that went wrong once: ids, white space, schemas, the row, marks in letters, forms of calls.
QUICK = (
    *("qwen3", "qwen3.5", "llama3.1", "gemma3", "gemma4", "mistral-small-3.2", "deepseek-v3.1", "smollm3", "hermes3"),
    "lfm2.5",
)
REFUSED = {"command-r-tool-use": "without tools"}  # its `default` template beside it is what it needs


def check(name: str, n: int) -> None:
    try:
        tokenizer = fetched_tokenizer(name)
    except NotAtHand as missing:
        pytest.skip(str(missing))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of families that are spoken to in Hermes' words
        chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    counts = tally(chat, tokenizer, n, f"{name} {n}")
    assert counts.conversations == n and counts.tokens > 200 * n and counts.calls > n
    assert counts.drifted == 0 and counts.misread == 0, counts.shown


@pytest.mark.parametrize("name", QUICK)
def test_thirty_conversations(name: str) -> None:
    check(name, 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_thousand_conversations(name: str) -> None:
    check(name, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_the_way_out_works(name: str) -> None:
    try:
        tokenizer, default = fetched_tokenizer(name), fetched_tokenizer("command-r").chat_template
    except NotAtHand as missing:
        pytest.skip(str(missing))
    with pytest.raises(ChatFormatError, match=f"{REFUSED[name]}.*give them all by name"):
        resolve_format(tokenizer)
    tokenizer.chat_template = {"default": default, "tool_use": tokenizer.chat_template}
    assert resolve_format(tokenizer).name == "cohere"
