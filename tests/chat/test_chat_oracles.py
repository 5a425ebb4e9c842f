"""An independent implementation beside ours: the `renderers` package, which writes each family by hand.

Where it has one, its prompt, its bridge and its reading of a turn must be ours.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest

from tests.support.chat_families import trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling, printed_turn
from toolgrpo.chat import resolve_format, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Message

pytestmark = pytest.mark.contract

# gpt-oss is in test_harmony_oracle.py: its renderer encodes with the real vocabulary only.
RENDERERS = {
    "qwen3": "Qwen3",
    "qwen3_instruct_2507": "Qwen3",
    "qwen3_vl": "Qwen3VL",
    "qwen3_5_think": "Qwen35",
    "qwen3_6": "Qwen36",
    "qwen3_8": "Qwen38",
    "glm4moe": "GLM45",
    "llama3_1": "Llama3",
    "llama3_2": "Llama3",
    "nemotron_3_nano": "Nemotron3",
    "nemotron_3_super": "Nemotron3",
    "nemotron_3_ultra": "Nemotron3Ultra",
    "nemotron_3_5_lightning": "Nemotron35",
    "gemma4": "Gemma4",
    "gemma4_v5": "Gemma4",
}
ONE_CALL = {"llama3_1", "llama3_2"}  # both refuse a turn with two calls
CALL = ("look_up", {"key": 'a "b" c'})
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What now?"}
RESULT = tool_message("look_up", "Grüße, 42")


def asks(n_calls: int) -> Message:
    return calling(*[CALL] * n_calls)


CONVERSATIONS = {
    "a question": [SYSTEM, USER],
    "no system message": [USER],
    "one call": [SYSTEM, USER, asks(1), RESULT],
    "parallel calls": [SYSTEM, USER, asks(2), RESULT, RESULT],
    "two rounds": [SYSTEM, USER, asks(1), RESULT, asks(1), tool_message("look_up", "two")],
    "an answer before": [SYSTEM, USER, {"role": "assistant", "content": "Nothing."}, USER, asks(1), RESULT],
}


@cache
def load(name: str) -> tuple[Any, TemplateFormat]:
    tokenizer = trl_tokenizer(name)
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    return tokenizer, chat


def renderer(name: str) -> Any:
    return renderer_of_day(name, time.strftime("%d %b %Y"))


@cache
def renderer_of_day(name: str, day: str) -> Any:
    import renderers
    from renderers import configs

    today = {"date_string": day} if name == "llama3_2" else {}
    return renderers.create_renderer(load(name)[0], getattr(configs, f"{RENDERERS[name]}RendererConfig")(**today))


def turn(chat: TemplateFormat, n_calls: int) -> tuple[list[int], list[int]]:
    """A prompt, and the turn that the template prints after it."""
    printed = printed_turn(chat, [SYSTEM, USER], asks(n_calls), [RESULT] * n_calls, [LOOK_UP])
    return printed.before, printed.said


@pytest.mark.parametrize("what", CONVERSATIONS)
@pytest.mark.parametrize("name", RENDERERS)
def test_prompts_are_those_of_renderers(name: str, what: str) -> None:
    if name in ONE_CALL and what == "parallel calls":
        pytest.skip("this family prints one call a turn")
    ours = load(name)[1].prompt(CONVERSATIONS[what], [LOOK_UP])
    assert renderer(name).render_ids(CONVERSATIONS[what], tools=[LOOK_UP], add_generation_prompt=True) == ours


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("n_results", [1, 3])
@pytest.mark.parametrize("name", RENDERERS)
def test_bridges_are_those_of_renderers(name: str, n_results: int, closed: bool) -> None:
    tokenizer, chat = load(name)
    before, said = turn(chat, 1)
    said = said if closed else said[:-1]
    theirs = renderer(name).bridge_to_next_turn(before, said, [RESULT] * n_results, tools=[LOOK_UP])
    if theirs is None:
        assert name.startswith("gemma4") and not closed  # it does not close a turn that was cut
        return
    ours = [*before, *said, *chat.bridge([*before, *said], [RESULT] * n_results)]
    if (
        name == "glm4moe" and not closed
    ):  # it closes with the end of text and then opens the results; the template never does
        extra = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        ours.insert(len(before) + len(said), extra)
    assert list(theirs.token_ids) == ours


@pytest.mark.parametrize("name", RENDERERS)
def test_turns_are_read_as_renderers_reads_them(name: str) -> None:
    _, chat = load(name)
    n_calls = 1 if name in ONE_CALL else 2
    before, said = turn(chat, n_calls)
    for cut in range(len(said), 0, -3):
        ours = chat.parse(said[:cut], before=before)
        theirs = renderer(name).parse_response(said[:cut], tools=[LOOK_UP], prompt_ids=before)
        good = [(call.name, call.arguments) for call in theirs.tool_calls if call.status.value == "ok"]
        assert [(a.name, a.arguments) for a in ours.attempts if a.status is AttemptStatus.OK] == good
