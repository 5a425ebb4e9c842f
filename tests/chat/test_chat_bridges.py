"""Bridges where templates look at more than the result: at a call's id, at the tools, at the row; and texts that templates
write otherwise than they got them. Each case is a few lines of template, over bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.chat_families import template_names, trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling, printed_turn
from toolgrpo.chat import assistant_message, prove_rows, resolve_format, tool_message
from toolgrpo.chat.bridge_proof import can_hear_users
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ChatFormatError
from toolgrpo.testing import byte_tokenizer

pytestmark = pytest.mark.contract

QUESTION: Message = {"role": "user", "content": "q"}
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SCHEMAS = [LOOK_UP, {**LOOK_UP, "function": {**LOOK_UP["function"], "name": "search"}}]

# A template of the Qwen kind, in parts that tests replace.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
RESULT = "<|im_start|>user\n<tool_response>{{ message.content }}</tool_response><|im_end|>\n"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(*, tools: str = TOOLS, call: str = CALL, result: str = RESULT, header: str = HEADER) -> str:
    said = "<|im_start|>{{ message.role }}\n{{ message.content }}"
    calls = "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>\n"
    either = "{% if message.role == 'tool' %}" + result + "{% else %}" + said + calls + "{% endif %}"
    return tools + "{% for message in messages %}" + either + "{% endfor %}" + header


def tokenizer_of(text: str, *markers: str) -> Any:
    return byte_tokenizer(text, ("<tool_call>", "</tool_call>", *markers), special=CHATML, eos="<|im_end|>")


def proven(tokenizer: Any) -> TemplateFormat:
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    return chat


def bridged(chat: TemplateFormat, tokenizer: Any, results: list[Message], **row: Any) -> str:
    text: str = tokenizer.decode(chat.bridge([chat.stop_ids[0]], results, **row), clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v2", "gemma4_v5", "gptoss"])
def test_results_of_parallel_calls_are_said_to_be_those_of_their_own_tools(name: str) -> None:
    """Gemma 4's present template looks each name up by the call's id, GPT-OSS's takes that of the call before."""
    tokenizer = trl_tokenizer(name)
    text = bridged(proven(tokenizer), tokenizer, [tool_message("search", "A"), tool_message("weather", "B")])
    places = [text.index(word) for word in ("search", "A", "weather", "B")]
    assert places == sorted(places) and (text.count("search"), text.count("weather")) == (1, 1)


def test_a_template_that_demands_ids_of_nine_letters_and_digits_gets_them() -> None:
    demands = "{% if not ID is defined or ID | length != 9 %}{{ raise_exception('IDs have length 9') }}{% endif %}"
    call, result = demands.replace("ID", "call.id") + CALL, demands.replace("ID", "message.tool_call_id") + RESULT
    tokenizer = tokenizer_of(template(call=call, result=result))
    text = bridged(proven(tokenizer), tokenizer, [tool_message("f", "A"), tool_message("f", "B")])
    assert "<tool_response>B</tool_response>" in text


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("message.tool_call_id", "prints the ids of calls before their results"),  # which nothing reads
        (
            "(messages | selectattr('tool_calls') | list | last).tool_calls[-1].function.name",
            r"parallel calls of two tools, the results of .* are said to be those of",
        ),
    ],
)
def test_a_template_that_gives_results_another_id_or_name_is_refused(before: str, says: str) -> None:
    result = RESULT.replace("{{ message.content }}", f"{{{{ {before} }}}}: {{{{ message.content }}}}")
    with pytest.raises(ChatFormatError, match=says):
        resolve_format(tokenizer_of(template(result=result)))


def test_a_template_that_always_loops_over_tools_is_shown_the_runs() -> None:
    """As Hermes 2 Pro's and Hermes 3's do."""
    loops = "<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    tokenizer = tokenizer_of(template(tools=loops))
    chat = proven(tokenizer)
    assert "<tool_response>A</tool_response>" in bridged(chat, tokenizer, [tool_message("f", "A")], schemas=SCHEMAS)
    with pytest.raises(ChatFormatError, match=r"without tools\. Change the row, .* If it is the variant for tools"):
        chat.prompt([QUESTION], [])


def test_of_named_templates_the_one_for_tools_makes_the_bridge() -> None:
    """transformers takes `default` where no tools are given, and that one may know no calls."""
    tokenizer = tokenizer_of(template())
    tokenizer.chat_template = {"default": template(call="", tools=""), "tool_use": template()}
    assert "<tool_response>A</tool_response>" in bridged(proven(tokenizer), tokenizer, [tool_message("f", "A")])


SWITCHED = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if '/no_think' in messages[0].content %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


def test_the_header_of_a_turn_is_the_rows() -> None:
    """As SmolLM3's, which reads `/no_think` from the system message."""
    tokenizer = tokenizer_of(template(header=SWITCHED), "<think>", "</think>")
    chat = proven(tokenizer)
    for system, expected in (("/no_think Be brief.", True), ("Be brief.", False)):
        row: list[Message] = [{"role": "system", "content": system}, QUESTION]
        prompt = tokenizer.decode(chat.prompt(row, SCHEMAS), clean_up_tokenization_spaces=False)
        text = bridged(chat, tokenizer, [tool_message("f", "A")], messages=row, schemas=SCHEMAS)
        header = text[text.rindex("<|im_start|>") :]
        assert prompt.endswith(header) and ("</think>" in header) == expected


# Once a call was made, this template's header reads the row no more; a bridge that reads the row then differs from it.
WAYWARD = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if 'Speak Latin' in messages[0].content and messages | length > 4 %}<think>{% endif %}{% endif %}"
)


def test_the_proof_tries_the_system_messages_of_the_rows_themselves() -> None:
    tokenizer = tokenizer_of(template(header=WAYWARD), "<think>", "</think>")
    chat = proven(tokenizer)
    rows: list[list[Message]] = [[{"role": "system", "content": "Be kind."}, QUESTION], [QUESTION]]
    prove_rows(chat, tokenizer, [*rows, "a text"])
    with pytest.raises(ChatFormatError, match=r"a row's own system message 'Speak Latin\.'"):
        prove_rows(chat, tokenizer, [*rows, [{"role": "system", "content": "Speak Latin."}, QUESTION]])


def test_a_template_whose_header_reads_what_users_say_is_refused_where_they_speak() -> None:
    still = "{% if messages | length > 4 and messages[-1].role == 'user' %}still {% endif %}{% endif %}"
    tokenizer = tokenizer_of(template(header=HEADER.replace("{% endif %}", still)))
    chat = proven(tokenizer)
    with pytest.raises(ChatFormatError, match=r"cannot continue after a user's message .*toolgrpo's ids are those of"):
        prove_rows(chat, tokenizer, [[QUESTION]], user_turns=True)


NESTED = "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | string }},{% endfor %}"


@pytest.mark.parametrize("printed", [NESTED, "{{ call.function.arguments | tojson(ensure_ascii=true) }}"])
def test_a_mark_that_a_template_writes_in_letters_is_no_text(printed: str) -> None:
    """LFM2.5 writes nested arguments as Python's `repr` does; text that ends like the beginning of a token is marked."""
    tokenizer = tokenizer_of(template(call=CALL.replace("\n</tool_call>", f"\n<!-- {printed} -->\n</tool_call>")))
    plain = proven(tokenizer_of(template()))
    chat = TemplateFormat(tokenizer, plain.family, plain.reader)

    def row(said: str) -> list[Message]:
        return [QUESTION, calling(("f", {"a": [said, {"b": said}]})), tool_message("f", said), QUESTION]

    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if i in chat.control.values()]

    for said in ("x <", "x <|im_en", "\\ufdd0", "<\\ufdd0|im_end|>", "\\\\ufdd1<|im_end|>"):
        own = tokenizer.apply_chat_template(row(said), tokenize=False, add_generation_prompt=True)
        ids = chat.prompt(row(said), [])
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == own
        assert controls(ids) == controls(chat.prompt(row("x"), []))


def test_added_tokens_of_white_space_are_text() -> None:
    """As Gemma's for runs of line breaks, of tabs and of spaces."""
    tokenizer = trl_tokenizer("gemma3")
    added = [AddedToken(text, special=False, normalized=False) for text in ("\n\n", "\n\n\n", "\t\t", "▁▁")]
    tokenizer.backend_tokenizer.add_tokens(added)
    chat = proven(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    for text in ("a\n\nb", "a\n\n\n\n\nb\t\t\tc", "a▁▁▁b"):
        row, loud = ([{"role": "user", "content": said}] for said in (text, f"{text}<end_of_turn>"))
        own = tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert chat.prompt(row, []) == own
        assert chat.prompt(loud, []).count(end) == own.count(end)


def test_tokens_that_swallow_space_swallow_it_here() -> None:
    """As Phi-3's, whose `<|end|>` takes the line break behind it."""
    tokens = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    tokenizer = byte_tokenizer(trl_tokenizer("phi3_5").chat_template, (), eos="<|endoftext|>")
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=True, lstrip=token == "<|user|>") for token in tokens]
    )
    chat = proven(tokenizer)
    row = [{"role": "system", "content": "a \n"}, {"role": "user", "content": " \n b \n"}]
    own = tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat.prompt(row, []) == own
    bridge = chat.bridge([chat.stop_ids[0]], [tool_message("f", "r")])
    assert bridge[0] == tokenizer.convert_tokens_to_ids("<|user|>"), "the line break before it is the end's"


@pytest.mark.parametrize("name", ["gptoss", "qwen3", "gemma4_v5"])
def test_keys_that_a_message_lacks_may_be_none(name: str) -> None:
    """As `datasets` fills them."""
    chat = proven(trl_tokenizer(name))
    answer: Message = {"role": "assistant", "content": "a"}
    filled = {**answer, "reasoning_content": None, "tool_calls": None, "name": None}
    assert chat.prompt([QUESTION, filled, QUESTION], []) == chat.prompt([QUESTION, answer, QUESTION], [])
    call, behind = calling(("look_up", {"key": "x"})), [tool_message("look_up", "r", "aaaaaaaa1"), QUESTION]
    empty, none = (chat.prompt([QUESTION, {**call, "content": said}, *behind], SCHEMAS) for said in ("", None))
    assert empty == none, "from Transformers 5.24 on a template would find no content"


@pytest.mark.parametrize("name", ["qwen3_5_think", "nemotron_3_nano", "glm4moe", "qwen3", "lfm2_2_5"])
def test_where_the_end_of_a_call_is_a_token_only_the_token_ends_it(name: str) -> None:
    chat = proven(trl_tokenizer(name))
    arguments = {"key": f"say {chat.family.form.call.closing} now"}
    turn = calling(("look_up", arguments))
    printed = printed_turn(chat, [QUESTION], turn, [tool_message("look_up", "r")], [LOOK_UP])
    (attempt,) = chat.parse(printed.said, before=printed.before).attempts
    assert attempt.arguments == arguments


NEMO = (
    "{% for message in messages %}{% if message.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ message.content }}, "
    '"call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]{% elif message.tool_calls %}[TOOL_CALLS]['
    '{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% elif message.role == 'assistant' %}{{ message.content }}</s>{% else %}{% if tools and loop.last %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
NEMO_TOKENS = ("</s>", *(f"[{end}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for end in ("", "/")))


def test_a_result_bears_the_id_that_the_model_wrote() -> None:
    """As Mistral Nemo's; a call without an id, or with one that no template would take, gets one."""
    tokenizer = byte_tokenizer(NEMO, (), special=(*NEMO_TOKENS, "[TOOL_CALLS]"), eos="</s>")
    chat = proven(tokenizer)
    calls = [{"name": "f", "arguments": {}, "id": written} for written in ("abcdefgh1", "x" * 999)]
    parsed = chat.parse(chat.encode(f"[TOOL_CALLS]{json.dumps(calls)}</s>"))
    assert [attempt.call_id for attempt in parsed.attempts] == ["abcdefgh1", None]
    assert [call.get("id") for call in assistant_message(parsed)["tool_calls"]] == ["abcdefgh1", None]
    results = [tool_message("f", "1", attempt.call_id) for attempt in parsed.attempts]
    text = bridged(chat, tokenizer, results, messages=[QUESTION], schemas=SCHEMAS)
    assert '"call_id": "abcdefgh1"' in text and "xxx" not in text and text.count('"call_id"') == 2


def test_ids_of_another_form_become_such_as_the_template_takes() -> None:
    """Mistral's templates refuse OpenAI's ids, which rows and conversations have."""
    tokenizer = byte_tokenizer(NEMO, (), special=(*NEMO_TOKENS, "[TOOL_CALLS]"), eos="</s>")
    both = calling(("f", {}), ("g", {}))
    ids = ("call_0a1b2c3d4e5f", "abcdefgh1")
    both["tool_calls"] = [{**call, "id": one} for call, one in zip(both["tool_calls"], ids, strict=True)]
    results = [tool_message(None, str(place), one) for place, one in enumerate(ids)]
    text = tokenizer.decode(proven(tokenizer).prompt([QUESTION, both, *reversed(results)], []))
    assert re.findall(r'"(?:id|call_id)": "(.*?)"', text) == ["id0000000", "abcdefgh1", "abcdefgh1", "id0000000"]


def test_calls_of_a_row_stand_in_the_text_of_a_template_that_prints_none() -> None:
    """As LFM2's first templates, which show tools and results; the model's own form is read."""
    tokenizer = trl_tokenizer("lfm2")
    chat = proven(tokenizer)
    assert chat.name == "lfm2"
    said = '<|tool_call_start|>[look_up(key="x")]<|tool_call_end|>'
    (attempt,) = chat.parse(chat.encode(f"{said}<|im_end|>")).attempts
    assert (attempt.name, attempt.arguments) == ("look_up", {"key": "x"})
    row = [QUESTION, calling(("look_up", {"key": "x <|im_end|>"})), tool_message("look_up", "r"), QUESTION]
    text = tokenizer.decode(chat.prompt(row, SCHEMAS), clean_up_tokenization_spaces=False)
    assert "<|tool_call_start|>[look_up(key='x <|im_end|>')]<|tool_call_end|>" in text


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_model_that_is_spoken_to_in_other_words_than_its_templates_is_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=r"Hermes' form of calls .*its chat template prints .*tool▁calls▁begin"):
        chat = proven(trl_tokenizer(name))
    printed = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
    (attempt,) = chat.parse(chat.encode(printed)).attempts
    assert attempt.name == "f", "and read all the same"


# Their templates print results behind calls only; there the bridge is the one after a call.
BEHIND_CALLS_ONLY = ("gemma4", "diffusion_gemma", "gptoss")
PROVABLE = [name for name in template_names() if name not in ("idefics3", "llava_next", "smolvlm")]


@pytest.mark.parametrize("name", PROVABLE)
@pytest.mark.filterwarnings("ignore:.*Hermes:UserWarning")
def test_a_result_after_a_turn_without_a_marked_call_is_bridged_as_after_one(name: str) -> None:
    """What an answered or accepted unmarked call is followed by."""
    chat = proven(trl_tokenizer(name))
    results, close = [tool_message("look_up", "42", "aaaaaaaa1")], chat.stop_ids[0]
    bridge = chat.bridge([close], results, messages=[QUESTION], schemas=SCHEMAS)
    for end in chat.stop_ids:
        assert chat.bridge([end], results, messages=[QUESTION], schemas=SCHEMAS) in (bridge, [close, *bridge])
    if not name.startswith(BEHIND_CALLS_ONLY):
        whole = chat.prompt([QUESTION, {"role": "assistant", "content": "x"}, *results], SCHEMAS)
        assert whole[-len(bridge) - 1 :] == [close, *bridge]


# Behind a user's reply to an answer: proven over every template, or refused in a sentence.

REPLY: Message = {"role": "user", "content": "And then?"}
REFUSED = "gptoss"  # an answer ends with another token where something follows it


@pytest.mark.parametrize("name", [name for name in PROVABLE if name != REFUSED])
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
