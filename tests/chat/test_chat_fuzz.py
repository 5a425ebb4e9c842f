"""Turns that no model should write, for every form of turn: nothing raises, and whatever is kept can be written down.

The inputs come from a seeded generator that knows the syntax of every family: truncated, nested, interleaved, repeated,
with broken JSON, lone surrogates as escapes, control bytes and arguments of a megabyte. 100,000 of them as a slow test; a
few thousand by default. That the work grows linearly is shown twice: here by counting calls, which is exact, and in
benchmarks/chat.py by processor time, which also sees what happens inside one call.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from functools import cache
from types import FrameType

import pytest

from tests.support.chat_families import trl_tokenizer
from toolgrpo.chat import assistant_message, resolve_format
from toolgrpo.chat.attempts import Marker
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.chat.response_template import described_format
from toolgrpo.chat.unmarked import unmarked_call
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.testing import byte_tokenizer

pytestmark = pytest.mark.property

# One template for each form; gemma finds its markers as text. The last three are read by a response template alone, two of
# them in the place of the family's own form.
OWN = (
    *("qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "gptoss", "gemma4_v5", "lfm2_2_5", "gemma3", "cohere2"),
    *("mistral", "deepseekv3"),
)
MISTRAL = (  # TRL ships no template of Mistral's; this one prints what Ministral 3's does
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]{% elif message.role == 'assistant' %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}</s>{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL_TOKENS = (
    *("</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)
DESCRIBED = ("described qwen3", "described qwen3_5_think", "muse_glimmer")
NAMES = (*OWN, *DESCRIBED)
OFFERED = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]

CALLS = [
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {"a": "b"}}'),
    '{"name": "f", "arguments": "{\\"a\\": [1, 2]}"}',
    "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
    *("call:f{a:1,b:[true,null]}", "[f(a='x', b={'k': [1, true]}), g()]", "f\n"),
    '<atem:invoke name="f"><atem:parameter name="a">1</atem:parameter></atem:invoke>',
    '[{"name": "f", "arguments": {"a": 1}}, {"function": "g", "parameters": {}}]',
    '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}',
    *('<function=f>{"a": 1}</function>', 'f[ARGS]{"a": 1}'),
    '[{"name": "f", "arguments": {"a": 1}, "id": "abcdefgh1"}]',
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
]
SCRAPS = [
    *CALLS,
    *("{", "}", "[", "]", '"', "'", "\\", ":", ",", "null", "NaN", "-Infinity", "1e999", "\\ud800", "\\u0000", "\x00"),
    *('{"name": ', '"arguments": ', '{"a":' * 40, "[" * 300, "]" * 300, "(" * 250, "'''", "\n", " " * 50, "\\" * 31),
    *("<function=", "<parameter=", "</parameter>", "</function>", ">", "to=functions.f", "to=", "analysis", "json"),
    *("call:", "f(", "f(a=", "=", ")", ";", "lambda: ", "not " * 60, "-" * 99, "a.b", "f'{x}'", "b'x'", "9" * 5000),
    *("Grüße", "你好", "\U0001f600", "\u202e", "﷽", "a\u0301", "\xed\xa0\x80"),  # the last: half a pair's bytes
]


@cache
def load(name: str) -> TemplateFormat:
    if name == "mistral":
        tokenizer = byte_tokenizer(MISTRAL, (), special=MISTRAL_TOKENS, eos="</s>")
    else:
        tokenizer = trl_tokenizer(name.removeprefix("described "))
    chat = described_format(tokenizer) if name in DESCRIBED else resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat) and (chat.name == "response-template") == (name in DESCRIBED)
    return chat


def brackets(chat: TemplateFormat) -> tuple[str, str]:
    """What stands before and behind a call."""
    form = chat.family.form.call
    if form.opening:
        return form.opening[0], form.closing
    openings = {"gpt-oss": "<|start|>", "llama3.1": "<|python_tag|>", "response-template": '<atem:invoke name="f">'}
    return openings[chat.name], form.closing


def syntax(chat: TemplateFormat) -> tuple[str, ...]:
    """All that means something in a turn of this format, as a token or as text."""
    return (*brackets(chat), *chat.reader.markers, *chat.reader.thinking, "</think>")


def ids_of(chat: TemplateFormat, random_: random.Random) -> list[int]:
    """One input: scraps and markers in any order, cut anywhere, or a well-formed call that was damaged."""
    control, markers = sorted(chat.control), syntax(chat)
    parts: list[str] = []
    for _ in range(random_.randint(0, 12)):
        draw = random_.random()
        if draw < 0.35:
            parts.append(random_.choice(markers))
        elif draw < 0.4:
            parts.append(random_.choice(control))
        elif draw < 0.5:
            parts += [markers[0], random_.choice(CALLS), markers[1]]
        else:
            parts.append(random_.choice(SCRAPS) * random_.choice([1, 1, 1, 2, 3]))
    ids = chat.encode("".join(parts))
    if ids and random_.random() < 0.5:
        del ids[random_.randrange(len(ids)) :]
    for _ in range(random_.choice([0, 0, 0, 1, 5])):
        if ids:
            ids[random_.randrange(len(ids))] = random_.randrange(256 + len(control))
    return ids


def check(chat: TemplateFormat, ids: list[int], random_: random.Random) -> None:
    before = chat.encode(random_.choice(["", "x", "<think>\n"]))
    parsed = chat.parse(ids, before=before)
    assert parsed.closed == (bool(ids) and ids[-1] in chat.stop_ids)
    for attempt in parsed.attempts:
        good = attempt.status is AttemptStatus.OK
        assert good == (attempt.arguments is not None) == (not attempt.detail)
        assert attempt.name or not good
    form = chat.family.form.call
    if form.opening and chat.name != "lfm2":
        text = chat._decode(ids)
        lists = text.count("{") if "[" in text else 0
        openings = (
            *form.opening,
            *(("<function=",) if "<function=" in form.text else ()),
        )  # read without a marker, too
        assert len(parsed.attempts) <= sum(map(text.count, openings)) + lists
    names = [attempt.name for attempt in parsed.attempts]
    json.dumps([assistant_message(parsed), names], ensure_ascii=False, allow_nan=False).encode()
    unmarked = unmarked_call(parsed.content, OFFERED, form="a call")
    assert unmarked is None or (unmarked.name == "f" and unmarked.arguments is not None)


def fuzz(name: str, n_inputs: int) -> None:
    chat, random_ = load(name), random.Random(f"{name} {n_inputs}")
    for number in range(n_inputs):
        ids = ids_of(chat, random_)
        try:
            check(chat, ids, random_)
        except Exception as error:
            raise AssertionError(f"input {number} of {name}: {chat._decode(ids)!r}") from error


@pytest.mark.parametrize("n_turns", [4_500, pytest.param(108_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_random_turns(name: str, n_turns: int) -> None:
    fuzz(name, n_turns // len(NAMES))


@pytest.mark.parametrize("n", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS)
def test_large_arguments(call: str, n: int) -> None:
    huge = {
        "text": call.replace("a", "a" * n, 1),
        "value": call.replace("1", '"' + "x\\n" * (n // 3) + '"', 1),
        "quotes": call.replace("1", "\\'" * (n // 2), 1),
        "nesting": call.replace("1", "[" * (n // 2), 1),
    }
    for name in NAMES:
        reader = load(name).reader
        opening, closing = map(Marker, brackets(load(name)))
        for text in huge.values():
            cuts: tuple[list[str | Marker], ...] = ([opening, text, closing], [opening, text], [text])
            for segments in cuts:
                parsed = reader.read(segments, closed=True, thinking=False)
                json.dumps(assistant_message(parsed), ensure_ascii=False, allow_nan=False).encode()
                assert sum(len(attempt.raw) for attempt in parsed.attempts) <= 2 * len(text) + 100


def work(chat: TemplateFormat, ids: list[int]) -> int:
    """How many functions are called, Python's and C's, to read a turn."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what other tests left behind is not counted
    sys.setprofile(on_event)
    try:
        chat.parse(ids)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize("name", NAMES)
def test_four_times_the_turn_is_at_most_four_times_the_work(name: str) -> None:
    chat = load(name)
    first, last = brackets(chat)
    calls = [first + call + last for call in CALLS]
    pieces = [*syntax(chat), *calls, "<parameter=a>", "<parameter=a></parameter>", "[{(", '{"a":', "\\'"]
    for piece in pieces:
        for opening in ("", first, f"{first}<function=f>", f"{first}[f(a="):
            once, four = (work(chat, chat.encode(opening + piece * n)) for n in (25, 100))
            assert four <= 4.3 * once, f"{opening!r} and then {piece!r} again and again"  # quadratic would be 16
