"""Markers in ordinary pieces: every way to write them is read, nothing else moves, and a saved tokenizer says it all.

`test_chat_formats.py` runs every case of the contract over the spelled tokenizers of Qwen3 and Qwen2.5."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat_families import trl_tokenizer
from tests.support.chat_samples import LOOK_UP
from tests.support.real_tokenizers import format_of
from toolgrpo.chat import resolve_format, tool_message
from toolgrpo.chat.encoding import marker_tokens, spelled_markers, with_spelled
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.errors import ChatFormatError

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}\n</tool_call>'


def pieces(text: str, tokenizer: Any, *cuts: int) -> list[int]:
    """Return the ids of text that is cut here, each part by itself."""
    parts = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    return [number for part in parts for number in tokenizer.encode(part, add_special_tokens=False)]


@pytest.mark.parametrize("name", ["glm4moe", "nemotron_3_nano", "qwen2_5", "qwen3"])
def test_every_family_that_has_these_markers_can_spell_them(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    markers = marker_tokens(tokenizer)
    spelled = with_spelled(tokenizer, markers.values())
    assert spelled_markers(spelled) == markers and not marker_tokens(spelled)
    assert not set(markers) & set(resolve_format(spelled).control)  # type: ignore[attr-defined]


def test_a_call_is_read_and_its_bridge_made_whichever_way_it_was_tokenized() -> None:
    tokenizer, chat = format_of("spelled-qwen2_5")
    written = {tuple(pieces(CALL, tokenizer, cut)) for cut in range(1, len(CALL))}
    written |= {tuple(pieces(CALL, tokenizer, *range(1, len(CALL)))), tuple(tokenizer.encode(CALL))}
    assert len(written) > 15, "ways to write one text"
    results = [tool_message("look_up", "a </tool_response> and <tool_call> in it")]
    end = chat.stop_ids[0]
    plain = chat.bridge([*tokenizer.encode(CALL), end], results)
    for ids in written:
        (attempt,) = chat.parse([*ids, end]).attempts
        assert (attempt.status, attempt.arguments) == (AttemptStatus.OK, {"key": "x"}), ids
        assert chat.bridge([*ids, end], results) == plain
        assert chat.bridge([*ids], results) == [end, *plain]


def test_the_single_tokens_are_no_markers_any_more_and_all_other_ids_stay() -> None:
    (tokenizer, chat), plain = format_of("spelled-qwen2_5"), format_of("real-qwen2_5")[0]
    opening, closing = spelled_markers(tokenizer).values()
    body = tokenizer.encode('{"name": "look_up", "arguments": {}}', add_special_tokens=False)
    assert not chat.parse([opening, *body, closing, chat.stop_ids[0]]).attempts
    text = "<|im_start|>user\nq<|im_end|><|fim_prefix|>Grüße"
    assert tokenizer.encode(text) == plain.encode(text) and len(tokenizer) == len(plain)
    assert tokenizer.special_tokens_map == plain.special_tokens_map


def test_a_saved_tokenizer_spells_too_and_vllms_parser_reads_what_was_trained(tmp_path: Path) -> None:
    parsers = pytest.importorskip("vllm.tool_parsers.hermes_tool_parser")
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    tokenizer, chat = format_of("spelled-qwen2_5")
    tokenizer.save_pretrained(tmp_path)
    served = AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": "q"}]
    prompt = served.apply_chat_template(asked, tools=[LOOK_UP], add_generation_prompt=True, return_dict=False)
    assert prompt == chat.prompt(asked, [LOOK_UP])
    request = protocol.ChatCompletionRequest(model="m", messages=asked, tools=[LOOK_UP])
    parser = parsers.Hermes2ProToolParser(served, request.tools)
    for ids in (pieces(CALL, served), pieces(CALL, served, 3), pieces(CALL, served, *range(1, len(CALL)))):
        (call,) = parser.extract_tool_calls(served.decode(ids), request).tool_calls
        assert (call.function.name, call.function.arguments) == ("look_up", '{"key": "x"}')


def test_a_token_that_cannot_be_renamed_is_refused_in_a_sentence() -> None:
    tokenizer, _ = format_of("spelled-qwen2_5")
    with pytest.raises(ChatFormatError, match="cannot spell its markers"):
        with_spelled(tokenizer, [tokenizer.eos_token_id])  # its configuration adds it again, with another id
