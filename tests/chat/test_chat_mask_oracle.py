"""Ids and mask of whole episodes against TRL's training templates, whose `{% generation %}` markers are an oracle of their own.

An episode is replayed from the oracle's ids: our prompt, then what stands until the end-of-turn token as the sampled turn,
then our bridge, and so on. All of it together must be the oracle's ids. The mask must be the oracle's, but for two things
that its markers take in and that no engine samples: the header of the turn, where the marker stands before it, and the
line break (and Phi's end of text) behind the end-of-turn token.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_families import template_names, template_text
from tests.support.chat_samples import LOOK_UP, calling
from tests.support.real_tokenizers import format_of
from toolgrpo.chat import tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.chat.message_shapes import tools_as_text, with_objects
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import Message, StopReason

pytestmark = pytest.mark.property

NOT_COMPARABLE = {
    "deepseek_r1_distill",  # asks for a turn with <think>, and prints past turns without it
    "deepseekv3",  # the same
    "diffusion_gemma",  # prints a header before a turn that follows results, but not when it asks for one
}
UNREAD = {"idefics3", "llava_next", "smolvlm"}  # refused, see the contract tests
BEHIND = {"", "\n", "\n<|endoftext|>"}


def oracle_name(name: str) -> str | None:
    """The template with generation markers: a training variant, or the template itself."""
    if (Path(trl.__file__).parent / "chat_templates" / f"{name}_training.jinja").exists():
        return f"{name}_training"
    return name if "{%- generation" in template_text(name) else None


NAMES = [name for name in template_names() if oracle_name(name) and name not in NOT_COMPARABLE | UNREAD]


def load(name: str) -> tuple[Any, TemplateFormat, str]:
    oracle = oracle_name(name.removeprefix("real-"))
    assert oracle is not None
    return *format_of(name), template_text(oracle)


words = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=12)
texts = st.lists(words, min_size=1, max_size=6).map(" ".join)
turns = st.tuples(texts, texts, st.booleans())  # a call's key, a result, whether something is thought


def conversation(
    question: str, rounds: list[tuple[str, str, bool]], answer: str, *, always_thinks: bool
) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": question}]
    for key, result, thinks in rounds:
        thought = {"reasoning_content": f"look for {key}"} if thinks or always_thinks else {}
        messages += [{**calling(("look_up", {"key": key})), **thought}, tool_message("look_up", result)]
    return [*messages, {"role": "assistant", "content": answer, "reasoning_content": "now I know"}]


def oracle(name: str, messages: list[Message]) -> tuple[list[int], list[int]]:
    tokenizer, chat, template = load(name)
    shaped, tools = with_objects(messages, chat.family.reasoning_key), [LOOK_UP]
    if not chat.family.knows_tools:
        shaped, tools = tools_as_text(shaped, tools, system=chat.family.knows_system), []
    asked = {"tools": tools or None, "chat_template": template, "enable_thinking": True, "tokenize": True}
    encoded = tokenizer.apply_chat_template(shaped, **asked, return_dict=True, return_assistant_tokens_mask=True)
    return list(encoded["input_ids"]), list(encoded["assistant_masks"])


@pytest.mark.parametrize("name", [*NAMES, "real-qwen3", "real-qwen2_5", "real-gptoss"])
@settings(max_examples=8, deadline=None)
@given(question=texts, rounds=st.lists(turns, min_size=1, max_size=3), answer=texts, split=st.integers(0, 30))
def test_ids_and_mask_of_an_episode_are_the_oracles(
    name: str, question: str, rounds: list[tuple[str, str, bool]], answer: str, split: int
) -> None:
    tokenizer, chat, _ = load(name)
    # Nemotron asks for a turn with `<think>` and a line break, but prints one without thoughts as `<think></think>`.
    messages = conversation(question, rounds, answer, always_thinks=name.startswith("nemotron"))
    expected, expected_mask = oracle(name, messages)
    ledger = Ledger(chat.prompt(messages[:1], [LOOK_UP], enable_thinking=True), expects_logprobs=False)
    results = [message for message in messages if message["role"] == "tool"]
    for result in [*results, None]:
        position = len(ledger.all_ids)
        assert expected[:position] == ledger.all_ids
        end = next(i for i in range(position, len(expected)) if expected[i] in chat.stop_ids) + 1
        for said in (expected[position:end][:split], expected[position:end][split:]):
            ledger.sampled(said, None)
        if result is not None:
            ledger.context(chat.bridge(ledger.all_ids, [result], enable_thinking=True))
    done = ledger.finish(StopReason.FINISHED)
    n_prompt = len(done.prompt_ids)
    behind = expected[n_prompt + len(done.ids) :]
    assert tokenizer.decode(behind, skip_special_tokens=False) in BEHIND
    ours = [0] * n_prompt + list(done.mask) + [0] * len(behind)
    asked, plain = (chat.render(messages[:1], [LOOK_UP], enable_thinking=True, ask=ask) for ask in (True, False))
    header = asked[len(plain) :] if asked.startswith(plain) else asked[asked.rindex("<|assistant|>") :]
    for before, inside, after in spans(ours, expected_mask):
        assert inside[0] <= inside[1]
        assert header.endswith(tokenizer.decode(expected[before[0] : before[1]], skip_special_tokens=False))
        assert tokenizer.decode(expected[after[0] : after[1]], skip_special_tokens=False) in BEHIND


def spans(ours: list[int], oracles: list[int]) -> list[tuple[tuple[int, int], ...]]:
    """For each of the oracle's runs of ones: where it stands before, on and behind our own."""

    def runs(mask: list[int]) -> list[tuple[int, int]]:
        changes = [at for at, (one, other) in enumerate(itertools.pairwise([0, *mask, 0])) if one != other]
        return list(zip(changes[::2], changes[1::2], strict=True))

    found: list[tuple[tuple[int, int], ...]] = []
    for (start, end), (their_start, their_end) in zip(runs(ours), runs(oracles), strict=True):
        assert their_start <= start and end <= their_end, "the oracle's turn does not hold ours"
        found.append(((their_start, start), (start, end), (end, their_end)))
    return found
