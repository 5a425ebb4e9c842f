"""Two independent implementations beside ours: the `renderers` package, and TRL's response templates.

`renderers` writes each family by hand: where it has one, its prompt, its bridge and its reading of a turn must be ours.
TRL's response templates are what its own trainer reads turns with. Neither is used by the package itself; the docs say why.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest

from toolgrpo.chat import resolve_format, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.testing import trl_tokenizer
from toolgrpo.testing.chat_families import template_names
from toolgrpo.trajectory import AttemptStatus, Message

# gpt-oss is not among them: its renderer encodes with a vocabulary of its own, which needs a download.
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
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"key": 'a "b" c'}}}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What now?"}
RESULT = tool_message("look_up", "Grüße, 42")


def asks(n_calls: int) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [CALL] * n_calls}


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


@cache
def renderer(name: str) -> Any:
    import renderers
    from renderers import configs

    today = {"date_string": time.strftime("%d %b %Y")} if name == "llama3_2" else {}
    return renderers.create_renderer(load(name)[0], getattr(configs, f"{RENDERERS[name]}RendererConfig")(**today))


def turn(chat: TemplateFormat, n_calls: int) -> tuple[list[int], list[int]]:
    """A prompt, and the turn that the template prints after it."""
    asked = chat.prompt([SYSTEM, USER], [SCHEMA])
    whole = chat.prompt([SYSTEM, USER, asks(n_calls), *[RESULT] * n_calls], [SCHEMA])
    start = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
    return whole[:start], whole[start : whole.index(chat.stop_ids[0], start) + 1]


@pytest.mark.parametrize("what", CONVERSATIONS)
@pytest.mark.parametrize("name", RENDERERS)
def test_prompts_are_those_of_renderers(name: str, what: str) -> None:
    if name in ONE_CALL and what == "parallel calls":
        pytest.skip("this family prints one call a turn")
    ours = load(name)[1].prompt(CONVERSATIONS[what], [SCHEMA])
    assert renderer(name).render_ids(CONVERSATIONS[what], tools=[SCHEMA], add_generation_prompt=True) == ours


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("n_results", [1, 3])
@pytest.mark.parametrize("name", RENDERERS)
def test_bridges_are_those_of_renderers(name: str, n_results: int, closed: bool) -> None:
    tokenizer, chat = load(name)
    before, said = turn(chat, 1)
    said = said if closed else said[:-1]
    theirs = renderer(name).bridge_to_next_turn(before, said, [RESULT] * n_results, tools=[SCHEMA])
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
        theirs = renderer(name).parse_response(said[:cut], tools=[SCHEMA], prompt_ids=before)
        good = [(call.name, call.arguments) for call in theirs.tool_calls if call.status.value == "ok"]
        assert [(a.name, a.arguments) for a in ours.attempts if a.status is AttemptStatus.OK] == good


def response_template_names() -> list[str]:
    """The templates that TRL has a response template for, and that we do not refuse."""
    from trl.chat_template_utils import add_response_schema

    found = []
    for name in template_names():
        try:
            add_response_schema(trl_tokenizer(name))
        except ValueError:
            continue
        found.append(name)
    return [name for name in found if name not in ("gemma4_v2", "deepseek_r1_distill")]  # refused; writes no calls


@pytest.mark.parametrize("name", response_template_names())
def test_turns_are_read_as_trls_response_templates_read_them(name: str) -> None:
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer, chat = load(name)
    before, said = turn(chat, 1 if chat.family.one_call else 2)
    theirs = parse_response(add_response_schema(tokenizer), said, prefix=before, tools=[SCHEMA])
    ours = chat.parse(said, before=before)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs["tool_calls"]]
    assert [(attempt.name, attempt.arguments) for attempt in ours.attempts] == calls
    left_over = theirs["content"].removesuffix("<|observation|>")  # an end of a turn that TRL's GLM does not know
    assert ours.content.strip() == left_over.strip() == ""


def test_every_family_with_a_response_template_is_covered() -> None:
    assert len(response_template_names()) >= 24
