"""What follows when a user replies to an answer: proven over every template, or refused in a sentence."""

from __future__ import annotations

import pytest

from tests.support.chat_families import template_names, trl_tokenizer
from tests.support.chat_samples import LOOK_UP
from toolgrpo.chat import prove_rows, resolve_format
from toolgrpo.chat.bridge_proof import can_hear_users
from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ChatFormatError
from toolgrpo.testing import byte_tokenizer

pytestmark = pytest.mark.contract

QUESTION: Message = {"role": "user", "content": "q"}
REPLY: Message = {"role": "user", "content": "And then?"}
REFUSED = ("gptoss",)  # an answer ends with another token where something follows it
WITHOUT_FORMAT = ("idefics3", "llava_next", "smolvlm")


@pytest.mark.parametrize("name", [n for n in template_names() if n not in (*REFUSED, *WITHOUT_FORMAT)])
@pytest.mark.filterwarnings("ignore:.*Hermes:UserWarning")
def test_the_bridge_is_what_the_template_prints_behind_an_answer(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    chat = resolve_format(tokenizer)
    prove_rows(chat, tokenizer, [[{"role": "system", "content": "Be kind."}, QUESTION]], user_turns=True)
    assert can_hear_users(chat, tokenizer)
    answer: Message = {"role": "assistant", "content": "x"}
    whole = chat.prompt([QUESTION, answer, REPLY], [LOOK_UP])
    bridges = [chat.bridge([end], [REPLY], messages=[QUESTION], schemas=[LOOK_UP]) for end in chat.stop_ids]
    assert any([end, *bridge] == whole[-len(bridge) - 1 :] for end, bridge in zip(chat.stop_ids, bridges, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_would_write_the_answer_anew_is_refused_where_users_speak(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    chat = resolve_format(tokenizer)
    prove_rows(chat, tokenizer, [[QUESTION]])
    with pytest.raises(ChatFormatError, match=r"cannot go on with a user's message.*<\|return\|>.*<\|end\|>"):
        prove_rows(chat, tokenizer, [[QUESTION]], user_turns=True)
    assert not can_hear_users(chat, tokenizer)


def test_the_thinking_of_earlier_turns_is_not_taken_back() -> None:
    """Qwen3's template prints it only behind the last words of a user; in an episode it stays where it was sampled."""
    chat = resolve_format(trl_tokenizer("qwen3"))
    thought: Message = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    whole = chat.prompt([QUESTION, thought, REPLY], [])
    bridge = chat.bridge([chat.stop_ids[0]], [REPLY], messages=[QUESTION])
    assert (
        whole[-len(bridge) :] == bridge
        and chat.prompt([QUESTION, {**thought, "reasoning_content": ""}, REPLY], []) == whole
    )


# A template of ChatML's kind; `HEADER` is what its last line may add.
READS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nHEADER{% endif %}"
)


def test_a_template_whose_header_reads_the_conversation_is_refused() -> None:
    header = "{% if messages | length > 4 and messages[-1].role == 'user' %}still {% endif %}"
    tokenizer = byte_tokenizer(
        READS.replace("HEADER", header),
        ("<tool_call>", "</tool_call>"),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
    )
    chat = resolve_format(tokenizer)
    with pytest.raises(ChatFormatError, match=r"cannot go on with a user's message .*toolgrpo's ids are those of"):
        prove_rows(chat, tokenizer, [[QUESTION]], user_turns=True)
