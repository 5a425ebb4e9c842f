from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.rollout.truncation import TokenCutter


class Words:
    """A tokenizer of words and spaces, that counts how much text it was given."""

    def __init__(self) -> None:
        self.encoded = 0
        self.words: list[str] = []

    def encode(self, text: str, **_: Any) -> list[int]:
        self.encoded += len(text)
        ids = []
        for word in text.split(" "):
            self.words.append(word)
            ids.append(len(self.words) - 1)
        return ids

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_short_text_passes_untouched() -> None:
    assert TokenCutter(Words(), 4)("a b c d") == ("a b c d", False)


def test_long_text_keeps_both_ends_and_says_what_is_gone() -> None:
    text, truncated = TokenCutter(Words(), 4)("one two three four five six seven")
    assert truncated
    assert text == "one two\n[... 17 characters left out ...]\nsix seven"


def test_no_limit() -> None:
    assert TokenCutter(Words(), None)("a " * 1000)[1] is False


def test_one_token_is_left_of_the_head() -> None:
    text, truncated = TokenCutter(Words(), 1)("one two three")
    assert truncated and text.startswith("one\n[...")


def test_a_megabyte_costs_no_more_than_its_ends() -> None:
    tokenizer = Words()
    text, truncated = TokenCutter(tokenizer, 10)("word " * 1_000_000)
    assert truncated and len(text) < 200
    assert tokenizer.encoded < 10_000


@given(words=st.lists(st.text("abc", min_size=1, max_size=5), max_size=60), limit=st.integers(1, 20))
def test_never_more_tokens_than_allowed(words: list[str], limit: int) -> None:
    text = " ".join(words)
    cut, truncated = TokenCutter(Words(), limit)(text)
    assert truncated == (len(words) > limit)
    if not truncated:
        assert cut == text
    else:
        head, tail = cut.split("\n[...")[0], cut.split("...]\n")[1]
        assert len([w for w in f"{head} {tail}".split(" ") if w]) == limit
        assert text.startswith(head) and text.endswith(tail)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_notice_is_there_however_small_the_limit(limit: int) -> None:
    assert "characters left out" in TokenCutter(Words(), limit)("a b c d e f").text
