"""What follows when a user replies to an answer: proven over every template, or refused in a sentence."""

from __future__ import annotations

import pytest

from tests.support.chat_families import template_names, trl_tokenizer
from tests.support.chat_samples import LOOK_UP
from toolgrpo.chat import prove_rows, resolve_format
from toolgrpo.chat.bridge_proof import can_hear_users
from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ChatFormatError

pytestmark = pytest.mark.contract

QUESTION: Message = {"role": "user", "content": "q"}
REPLY: Message = {"role": "user", "content": "And then?"}
REFUSED = "gptoss"  # an answer ends with another token where something follows it
WITHOUT_FORMAT = ("idefics3", "llava_next", "smolvlm")


@pytest.mark.parametrize("name", [n for n in template_names() if n not in (REFUSED, *WITHOUT_FORMAT)])
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


def test_a_family_that_would_write_the_answer_anew_is_refused_where_users_speak() -> None:
    tokenizer = trl_tokenizer(REFUSED)
    chat = resolve_format(tokenizer)
    prove_rows(chat, tokenizer, [[QUESTION]])
    with pytest.raises(ChatFormatError, match=r"cannot continue after a user's message.*<\|return\|>.*<\|end\|>"):
        prove_rows(chat, tokenizer, [[QUESTION]], user_turns=True)
    assert not can_hear_users(chat, tokenizer)


def test_the_thinking_of_earlier_turns_is_not_taken_back() -> None:
    """Qwen3's template prints it only behind the last words of a user; in an episode it stays where it was sampled."""
    chat = resolve_format(trl_tokenizer("qwen3"))
    thought: Message = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    whole, quiet = (
        chat.prompt([QUESTION, said, REPLY], []) for said in (thought, {**thought, "reasoning_content": ""})
    )
    bridge = chat.bridge([chat.stop_ids[0]], [REPLY], messages=[QUESTION])
    assert whole[-len(bridge) :] == bridge and quiet == whole
