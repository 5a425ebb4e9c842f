from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from toolgrpo.chat.encoding import MARK, Encoder, TextGuard
from toolgrpo.errors import ChatFormatError
from toolgrpo.testing import byte_tokenizer

CONTROL = ["<|im_end|>", "<think>", "</think>", '<|"|>', "/nothink"]
ENCODER = Encoder(byte_tokenizer("{{ 1 }}", CONTROL))
GUARD = TextGuard(CONTROL)
PIECES = st.lists(st.one_of(st.sampled_from([*CONTROL, "<", ">", "|", "<|", "think>", '"', "\ufdd0", MARK]), st.text()))


def test_control_tokens_are_those_of_the_template_only() -> None:
    rendered = f"a<|im_end|>{GUARD.text('b<|im_end|>')}<think>"
    found = [i for i in ENCODER.encode(rendered) if i in ENCODER.control.values()]
    assert found == [ENCODER.control[token] for token in ("<|im_end|>", "<think>")]


def test_harmless_text_is_not_touched() -> None:
    text = "a < b, c > d | e"
    assert GUARD.text(text) == text and GUARD.text("") == ""
    assert GUARD.value({"a": ["b", 1, None, {"c": True}]}) == {"a": ["b", 1, None, {"c": True}]}


@given(before=PIECES, middle=PIECES, after=PIECES)
def test_guarded_strings_side_by_side_or_inside_a_template_spell_no_control_token(
    before: list[str], middle: list[str], after: list[str]
) -> None:
    strings = [GUARD.text("".join(pieces)) for pieces in (before, middle, after)]
    for joint in ("", "\n", "{", ">", "<", "|>", "<|im_", "</"):
        ids = ENCODER.encode(joint.join(strings))
        assert not set(ids) & set(ENCODER.control.values())


@given(PIECES)
def test_the_ids_spell_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    clean = text.replace("\ufdd0", "\ufffd").replace(MARK, "\ufffd")
    assert ENCODER.encode(GUARD.text(text)) == ENCODER.plain(clean)


def test_ids_are_decoded_as_the_tokenizer_does() -> None:
    tokenizer = byte_tokenizer("{{ 1 }}", CONTROL, special=["<|im_start|>"])
    ids = [*tokenizer.encode("Grüße , <think>"), tokenizer.convert_tokens_to_ids("<|im_start|>")]
    decoded = Encoder(tokenizer).decode(ids)
    assert decoded == tokenizer.decode(ids, clean_up_tokenization_spaces=False) and decoded.endswith("<|im_start|>")


def test_a_slow_tokenizer_is_refused_with_a_sentence() -> None:
    with pytest.raises(ChatFormatError, match="AutoTokenizer"):
        Encoder(object())


def test_a_space_that_the_tokenizer_adds_to_the_first_word_of_a_text_is_not_added_behind_control_tokens() -> None:
    tokenizer = byte_tokenizer("{{ 1 }}", ["<|m|>"])
    backend = tokenizer.backend_tokenizer
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace, bytes_])  # as Llama's from Transformers 5 on
    rendered = "<|m|>b c<|m|> d<|m|>"
    assert Encoder(tokenizer).encode(rendered) == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.encode("b")[0] == tokenizer.encode("▁")[0], "the tokenizer itself still adds it"


def test_a_long_text_has_the_ids_that_its_pieces_have() -> None:
    assert ENCODER.plain("é " * 20_000) == ENCODER.plain("é ") * 20_000
