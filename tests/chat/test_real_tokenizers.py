"""Random conversations with real tokenizers: no token of a prompt or a bridge differs from the tokenizer's own, and calls
are read as they were made. `python tests/real_tokenizers/fetch.py` fetches the tokenizers; what was not fetched is skipped.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from tests.support.fetched_tokenizers import CASES, cache_folder, fetched_tokenizer, llama_cpp_templates
from tests.support.random_conversations import tally
from tests.support.real_tokenizers import NotAtHand
from toolgrpo.chat import resolve_format
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.errors import ChatFormatError
from toolgrpo.testing import byte_tokenizer

pytestmark = pytest.mark.property

# One for each thing that went wrong once: ids, white space, schemas, the row, marks in letters, forms of calls.
QUICK = (
    *("qwen3", "qwen3.5", "llama3.1", "gemma3", "gemma4", "mistral-small-3.2", "deepseek-v3.1", "smollm3", "hermes3"),
    "lfm2.5",
)
REFUSED = "command-r-tool-use"  # its `default` template beside it is what it needs


def fetched(name: str) -> Any:
    try:
        return fetched_tokenizer(name)
    except NotAtHand as missing:
        pytest.skip(str(missing))


def check(name: str, n: int) -> None:
    tokenizer = fetched(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of families that are spoken to in Hermes' words
        chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    counts = tally(chat, tokenizer, n, f"{name} {n}")
    assert counts.conversations == n and counts.tokens > 200 * n and counts.calls > n
    assert counts.drifted == 0 and counts.misread == 0, counts.shown


@pytest.mark.parametrize("name", QUICK)
def test_a_few_conversations(name: str) -> None:
    check(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != REFUSED])
def test_a_thousand_conversations(name: str) -> None:
    check(name, 1000)


@pytest.mark.slow
def test_what_is_refused_says_why_and_the_way_out_works() -> None:
    tokenizer, default = fetched(REFUSED), fetched("command-r").chat_template
    with pytest.raises(ChatFormatError, match=r"without tools.*tokenizer\.chat_template ="):
        resolve_format(tokenizer)
    tokenizer.chat_template = {"default": default, "tool_use": tokenizer.chat_template}
    assert resolve_format(tokenizer).name == "cohere"


# What may be a special token, in the text of a template.
TOKEN = re.compile(
    r"""<[|｜][^<>\s'"{}]{1,40}[|｜]>|</?[a-z_]{2,24}>|\[/?[A-Z_]{3,20}\]|<[a-z_]+\|>|<\|(?:[a-z_]+|"\|)>"""
)
ENDS = (
    *("<｜end▁of▁sentence｜>", "<|eot_id|>", "<|im_end|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<|return|>"),
    *("<|endoftext|>", "</s>"),
)


def over_bytes(template: str) -> Any:
    """The template with every token that stands in it."""
    end = next((token for token in ENDS if token in template), "</s>")
    tokens = {*TOKEN.findall(template), end, "<s>", "<|tool_call_start|>", "<|tool_call_end|>"}
    return byte_tokenizer(template, (), special=sorted(tokens), bos="<s>", eos=end)


@pytest.mark.slow
def test_every_template_that_llama_cpp_collects_is_proven_or_refused_with_a_way_out() -> None:
    """Where the model is spoken to in Hermes' words although its template prints calls, a warning says so."""
    names = llama_cpp_templates()
    if not names:
        pytest.skip("the templates were not fetched")
    accepted, warned = [], []
    for name in names:
        tokenizer = over_bytes((cache_folder() / "templates" / f"{name}.jinja").read_text(encoding="utf-8"))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                chat: Any = resolve_format(tokenizer)
            except ChatFormatError as error:
                assert re.search("Set|set|Use|pass|Change", str(error)), name
                continue
        own_words = [str(warning.message) for warning in said if "Hermes' words" in str(warning.message)]
        assert not (own_words and chat.family.knows_tools), name
        accepted.append(name)
        warned += own_words
    assert len(names) >= 70 and len(accepted) >= 40 and len(warned) >= 11, (len(accepted), len(warned))
