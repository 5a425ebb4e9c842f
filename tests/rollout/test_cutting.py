from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.rollout.limits import TokenCutter
from toolgrpo.testing import ByteChat
from toolgrpo.tools.render import RenderedText, cut


class Words:
    """A tokenizer of words and spaces, that counts how much text it was given."""

    def __init__(self) -> None:
        self.encoded = 0
        self.words: list[str] = []

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str, **_: Any) -> list[int]:
        self.encoded += len(text)
        self.words += (said := text.split(" "))
        return list(range(len(self.words) - len(said), len(self.words)))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_a_megabyte_costs_no_more_than_its_ends() -> None:
    tokenizer = Words()
    shown = TokenCutter(tokenizer, 10)("word " * 1_000_000)
    assert shown.left_out > 4_999_900 and len(shown.text) < 200
    assert tokenizer.encoded < 10_000


@given(words=st.lists(st.text("abc", min_size=1, max_size=5), max_size=60), limit=st.integers(1, 20))
def test_never_more_tokens_than_allowed(words: list[str], limit: int) -> None:
    text = " ".join(words)
    shown = TokenCutter(Words(), limit)(text)
    assert (shown.left_out > 0) == (len(words) > limit)
    if not shown.left_out:
        assert shown.text == text
    else:
        head, tail = shown.text.split("\n[...")[0], shown.text.split("...]\n")[1]
        assert len(head) + shown.left_out + len(tail) == len(text)
        assert len([w for w in f"{head} {tail}".split(" ") if w]) == limit
        assert text.startswith(head) and text.endswith(tail)


@given(text=st.text("aé", min_size=1, max_size=400), bound=st.integers(2, 300), limit=st.integers(1, 100))
def test_two_cuts_leave_one_notice_whose_count_adds_up(text: str, bound: int, limit: int) -> None:
    once = cut(text, bound)
    shown = TokenCutter(ByteChat(), limit)(once.text, once.left_out)
    head, notice, tail = shown.text.partition(f"\n[... {shown.left_out} characters left out ...]\n")
    assert "left out" not in head and "left out" not in tail
    assert text.startswith(head) and text.endswith(tail)
    if notice:
        assert len(head) + shown.left_out + len(tail) == len(text)
    else:
        assert shown.left_out == 0 and head == text


def test_a_character_of_several_tokens_counts_as_several_and_is_never_split() -> None:
    assert TokenCutter(ByteChat(), 10)("ééééé").left_out == 0
    assert TokenCutter(ByteChat(), 8)("ééééé").left_out == 1
    assert TokenCutter(ByteChat(), 5)("ééééé") == RenderedText("é\n[... 3 characters left out ...]\né", 3)
