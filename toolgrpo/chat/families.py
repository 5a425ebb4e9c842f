r"""The model families, as a table: how a chat template is recognised and how its turns are read.

A template is recognised by what it prints, not by comparing it with a stored copy, so a model's own small changes do no
harm; `bridge_proof.py` then decides whether the recognised family really fits. The first family whose signs all stand in the
template is taken, so the more particular ones come first.

Turns of every family are read by one reader (`turn_reader.py`) from a response template in transformers' format. Where TRL's
own loses something that models write, the one here is corrected, and what was corrected stands beside it;
docs/background/chat_formats.md shows each loss, and a test pins it. Patterns are linear: possessive where they repeat, and
those that find arguments begin with `\G`, so that what does not follow the argument before is tried once. `turn_reader.py`
says what `\G` and `\K` mean here. A marker that is a token is only found by its id; these patterns see no text that spells
one. A template of no family is read as its tokenizer's response template says (`response_template.py`).

A family that does not `knows_tools` prints only system, user and assistant texts. It is given the schemas, calls and
results in Hermes' words (`message_shapes.py`). Some templates of a family print less than others: `otherwise` says what is tried
next where the proof refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolgrpo.chat.attempts import CallForm
from toolgrpo.chat.call_bodies import (
    deepseek_call,
    gemma_object,
    llama_calls,
    mistral_calls,
    python_calls,
    tagged_calls,
)


@dataclass(frozen=True, slots=True)
class TurnForm:
    """A response template, and what it cannot say of a call."""

    template: Any  # in transformers' format: a dict of strings, or loaded already
    call: CallForm
    lead: str = ""  # the end of the prompt, where it is the beginning of the turn; patterns see it
    copied: bool = False  # says what TRL's template says: the tokenizer's or TRL's own is taken where there is one


def _template(anchor: str, calls: Mapping[str, Any], **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response template. Calls come first, so that of two openings at one place theirs counts.

    The anchor tells transformers' parser where a turn begins; our reader knows it from the ids.
    """
    fields = {"tool_calls": {"repeats": True, **calls}, "content": {}, **others}
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": anchor, "fields": fields}


_THOUGHTS = {"open": "<think>", "close_pattern": r"</think>\s*"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_AS_WRITTEN = {"name": "text", "args": {"strip": False}}

# The same as TRL's for Qwen3, also for families whose schemas are spelled out, which TRL knows no calls of.
_HERMES_CALLS = {
    "open": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_HERMES_FORM = CallForm(
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>', "</tool_call>", ("<tool_call>",)
)
HERMES = TurnForm(
    _template(r"<\|im_start\|>assistant\n", _HERMES_CALLS, reasoning_content=_THOUGHTS), _HERMES_FORM, copied=True
)
# A marker in its content says nothing.
HERMES_COHERE2 = TurnForm(
    _template(
        r"<\|CHATBOT_TOKEN\|>",
        _HERMES_CALLS,
        reasoning_content=_THOUGHTS,
        content={"close": "<|END_RESPONSE|>", "repeats": True},
    ),
    _HERMES_FORM,
)

# DeepSeek's own form in both spellings: V3's and R1's with a code fence behind the name, V3.1's without. The markers around
# all calls of a turn say nothing. Where its chat template cannot print calls the family is spoken to in Hermes' words, and
# whichever of the two the model writes is read.
_DEEPSEEK_TEMPLATE = _template(
    r"<｜Assistant｜>",
    {
        "open": ["<｜tool▁call▁begin｜>", "<tool_call>"],
        "close_pattern": r"(?:<｜tool▁call▁end｜>|</tool_call>)\s*",
        "content": "text",
        "content_args": {"also": "<｜tool▁sep｜>"},
    },
    reasoning_content=_THOUGHTS,
    content={"close_pattern": r"<｜tool▁calls▁(?:begin|end)｜>", "repeats": True},
)
_DEEPSEEK_OPENINGS = ("<｜tool▁call▁begin｜>", "<tool_call>")
DEEPSEEK = TurnForm(
    _DEEPSEEK_TEMPLATE,
    CallForm(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"key": "value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁call▁end｜>",
        _DEEPSEEK_OPENINGS,
        body=deepseek_call,
    ),
)
HERMES_DEEPSEEK = TurnForm(
    _DEEPSEEK_TEMPLATE,
    CallForm(_HERMES_FORM.text, _HERMES_FORM.closing, _DEEPSEEK_OPENINGS[::-1], body=deepseek_call),
)

# Mistral's, of which TRL has none: `[TOOL_CALLS]` and a JSON list (Nemo), or name and arguments for each call (from v11 on),
# with an id between them for some (Small 3.2). A call ends where the next begins, or with the turn.
MISTRAL = TurnForm(
    _template(
        r"\[/INST\]",
        {
            "open_pattern": r"\[TOOL_CALLS\](?:\s*+[^\s\[{]++\s*+(?:\[CALL_ID\]\s*+[^\s\[{]*+\s*+)?+\[ARGS\])?+",
            "close_pattern": r"(?=\[TOOL_CALLS\]|</s>)",
            "content": "text",
        },
        reasoning_content={"open": "[THINK]", "close_pattern": r"\[/THINK\]\s*"},
    ),
    CallForm('[TOOL_CALLS]NAME[ARGS]{"key": "value"}', "</s>", ("[TOOL_CALLS]",), body=mistral_calls),
)

# TRL's for Qwen3.5, corrected: of the space around a value only the line breaks that the template prints are dropped; the
# pattern of a value is linear (TRL's is cubic in spaces and quadratic in parameters); a call without a name is an attempt.
# For Nemotron also: thinking has its opening (TRL looks ahead for its end from every character).
_TAG_NAME = r"[^\S\n]*+(?P<{}>(?:[^\s>]++|[^\S\n]++(?!>))*+)[^\S\n]*+>"
FUNCTION_TAGS = TurnForm(
    _template(
        r"<\|im_start\|>assistant\n",
        {
            "open_pattern": rf"<tool_call>(?:\s*+<function={_TAG_NAME.format('name')})?+",
            "close_pattern": r"</(?:function>\s*+</)?+tool_call>\s*",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": rf"\G\s*+<parameter={_TAG_NAME.format('key')}\n?+"
                r"(?P<value>(?:[^\n<]++|\n(?!</parameter>)|<(?!/parameter>))*+)\n?+</parameter>",
                "value_parser": _AS_WRITTEN,
            },
            "transform": _FUNCTION,
        },
        reasoning_content=_THOUGHTS,
    ),
    CallForm(
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        "</tool_call>",
        ("<tool_call>",),
        bare=tagged_calls,
    ),
)

# TRL's for GLM 4, corrected: the name ends where the arguments begin, with or without a line break; values keep their
# space, and may be empty; values that nothing closes are read once. (The token that ends a turn with calls, which no field
# closes with, stands in the table of families.)
_NO_ARG = r"<(?!/?arg_(?:key|value)>)"
GLM = TurnForm(
    _template(
        r"<\|assistant\|>",
        {
            "open_pattern": r"<tool_call>\s*+(?P<name>[^\s<]++)?+",
            "close_pattern": r"</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": rf"\G\s*+<arg_key>\s*+(?P<key>(?:[^\s<]++|{_NO_ARG}|\s++(?!</arg_key>))*+)\s*+</arg_key>"
                rf"\s*+<arg_value>(?P<value>(?:[^<]++|{_NO_ARG})*+)</arg_value>",
                "value_parser": _AS_WRITTEN,
            },
            "transform": _FUNCTION,
        },
        reasoning_content=_THOUGHTS,
    ),
    CallForm(
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        "</tool_call>",
        ("<tool_call>",),
    ),
)

# TRL's for Gemma 4, corrected: a name may hold any character but space and brace; a call without one is an attempt; the
# label of thinking may be missing. The object is read by a function, because transformers' JSON takes no space between its
# parts, and puts strings back with a pass for each.
GEMMA = TurnForm(
    _template(
        r"<\|turn>model\n",
        {
            "open_pattern": r"<\|tool_call>(?:\s*+call:(?P<name>[^\s{]*+)\s*+(?=\{))?+",
            "close_pattern": r"<tool_call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": _FUNCTION,
        },
        reasoning_content={"open": ["<|channel>thought\n", "<|channel>"], "close_pattern": r"<channel\|>\s*"},
    ),
    CallForm(
        '<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>',
        "<tool_call|>",
        ("<|tool_call>",),
        body=gemma_object,
    ),
)

# TRL's for LFM 2, corrected: the block between its tokens is the field, so a comma and a bracket in an answer begin no
# call. Its list of calls is Python, which no parser of transformers reads: TRL's pattern makes text of False.
PYTHON = TurnForm(
    _template(
        r"<\|im_start\|>assistant\n",
        {"open": "<|tool_call_start|>", "close_pattern": r"<\|tool_call_end\|>\s*", "content": "text"},
        thinking=_THOUGHTS,
    ),
    CallForm(
        "<|tool_call_start|>[name(key='value', other=1)]<|tool_call_end|>",
        "<|tool_call_end|>",
        ("<|tool_call_start|>",),
        body=python_calls,
    ),
)

# TRL's for Llama 3, corrected: a call begins a turn, or follows a call (TRL's begins anywhere, and spans all of them), with
# any space; it ends where its braces are balanced, or with the turn; there may be `;` between two. What else these models
# write, behind a text or in the forms of 3.1's and 3.2's other prompts, `call_bodies.py` reads.
_OBJECT = r'(?P<object>\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+"|(?&object))*+\})'
LLAMA = TurnForm(
    _template(
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        {
            "open_pattern": r'\G[\s;]*+(?:<\|python_tag\|>[\s;]*+|(?=\{\s*+"name"\s*+:))',
            "close_pattern": rf"\G(?:{_OBJECT}\K[\s;]*+|(?:[^<]++|<(?!\|eot_id\|>))*+\K<\|eot_id\|>)",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    ),
    CallForm('{"name": ..., "parameters": {...}}', "}", bare=llama_calls),
)

# TRL's for GPT-OSS, corrected: a turn is a row of messages, each a header, `<|message|>` and a text. A header with a
# recipient (before the channel or behind it, as OpenAI writes it) is a call, one of the channel `analysis` is thinking, and
# any other separates content, as do the tokens that end a message. The first header begins in the prompt. (TRL's knows one
# order of three headers.)
_BORDER = r"(?:<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>)"
_IN_HEADER = r"<(?!\|(?:start|message|end|call|return)\|>)"
_MESSAGE = rf"(?:[^<]++|{_IN_HEADER})*+<\|message\|>"
_RECIPIENT = r"to=(?!assistant[\s<])(?:functions\.)?+(?P<name>[^\s<]*+)"
_JOINED = {"repeats": True, "join": "\n"}
HARMONY = TurnForm(
    _template(
        r"(?=<\|start\|>assistant)",
        {
            "open_pattern": rf"{_BORDER}(?>(?=to=)|(?:[^\s<]++|\s(?!to=)|{_IN_HEADER})*+\s){_RECIPIENT}{_MESSAGE}",
            "close_pattern": rf"(?={_BORDER})",
            "content": "json",
            "transform": _FUNCTION,
        },
        thinking={
            "open_pattern": rf"{_BORDER}(?:[^<]++|(?!<\|channel\|>){_IN_HEADER})*+<\|channel\|>(?:\s++|<\|constrain\|>)*+"
            rf"analysis(?=\s|<\|(?:constrain|message)\|>){_MESSAGE}",
            "close_pattern": rf"(?={_BORDER})",
            **_JOINED,
        },
        content={"close_pattern": rf"{_BORDER}(?:{_MESSAGE})?+", **_JOINED},
    ),
    CallForm('to=functions.NAME<|channel|>commentary json<|message|>{"key": "value"}<|call|>', "<|call|>"),
    lead="<|start|>",
)

# The table, and how a family is found.

_GEMMA4_ENDS = ("<|tool_response>", "<turn|>", "<eos>")


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about a family that its template does not show."""

    name: str
    signs: tuple[str, ...]  # texts that all stand in the template
    ends: tuple[str, ...]  # tokens that end a turn; the first one closes a turn that was cut
    form: TurnForm = HERMES
    knows_tools: bool = True
    knows_system: bool = True
    one_call: bool = False  # the template prints one call a message
    results_inside: bool = False  # the template takes results as `tool_responses` of the message with the calls
    end_opens_results: bool = False  # ends[0] is the first token of the results, so they need it after any other end
    reasoning_key: str = "reasoning_content"
    shows_tools: bool = True  # the template prints schemas; else they go into the system message, in the family's words
    calls_in_text: bool = False  # the template prints results, but no calls, so these go into the text of a turn
    arguments_as_text: bool = False  # the template joins arguments to its text, so they have to be text
    short_ids: bool = False  # the template takes ids of nine letters and digits alone
    otherwise: tuple[Family, ...] = ()


_DEEPSEEK = Family("deepseek", ("<｜Assistant｜>", "<｜tool▁sep｜>"), ("<｜end▁of▁sentence｜>",), DEEPSEEK)
_DEEPSEEK_IN_WORDS = Family(
    "deepseek", ("<｜Assistant｜>",), ("<｜end▁of▁sentence｜>",), HERMES_DEEPSEEK, knows_tools=False
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>", "to=assistant"),
        ("<|call|>", "<|return|>"),
        HARMONY,
        one_call=True,
        reasoning_key="thinking",
    ),
    Family(
        "gemma4",
        ("<|tool_call>call:", "<|turn>", "if message['tool_responses']"),  # its second version; later ones use .get
        _GEMMA4_ENDS,
        GEMMA,
        results_inside=True,
        end_opens_results=True,
    ),
    Family("gemma4", ("<|tool_call>call:", "<|turn>"), _GEMMA4_ENDS, GEMMA, end_opens_results=True),
    Family(
        "glm4",
        ("<arg_key>", "<|observation|>"),
        ("<|observation|>", "<|user|>", "<|endoftext|>"),
        GLM,
        end_opens_results=True,
    ),
    Family("llama3.1", ("<|start_header_id|>", '"parameters": '), ("<|eot_id|>", "<|eom_id|>"), LLAMA, one_call=True),
    Family("lfm2", ("<|im_start|>", "<|tool_call_start|>"), ("<|im_end|>",), PYTHON, reasoning_key="thinking"),
    Family(
        "lfm2",
        ("<|im_start|>", "List of tools: "),
        ("<|im_end|>",),
        PYTHON,
        calls_in_text=True,
        reasoning_key="thinking",
    ),
    Family("mistral", ("[TOOL_CALLS]", "[INST]"), ("</s>",), MISTRAL, short_ids=True),
    Family("qwen3.5", ("<|im_start|>", "<function="), ("<|im_end|>",), FUNCTION_TAGS),
    Family("qwen3", ("<|im_start|>", "<tool_call>", "<think>"), ("<|im_end|>",)),
    Family("qwen2.5", ("<|im_start|>", "<tool_call>"), ("<|im_end|>",)),
    Family("chatml", ("<|im_start|>",), ("<|im_end|>",), knows_tools=False),
    Family("llama3", ("<|start_header_id|>",), ("<|eot_id|>", "<|end_of_text|>"), knows_tools=False),
    Family(
        "cohere2",
        ("<|START_OF_TURN_TOKEN|>", "<|END_RESPONSE|>"),
        ("<|END_OF_TURN_TOKEN|>",),
        HERMES_COHERE2,
        knows_tools=False,
    ),
    Family("cohere", ("<|START_OF_TURN_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",), knows_tools=False),
    Family("gemma", ("<start_of_turn>",), ("<end_of_turn>", "<eos>"), knows_tools=False, knows_system=False),
    Family("phi3", ("<|assistant|>", "<|end|>"), ("<|end|>", "<|endoftext|>"), knows_tools=False),
    replace(
        _DEEPSEEK,
        otherwise=(
            replace(_DEEPSEEK, shows_tools=False),
            replace(_DEEPSEEK, shows_tools=False, arguments_as_text=True),
            _DEEPSEEK_IN_WORDS,
        ),
    ),
    _DEEPSEEK_IN_WORDS,
)

_REFUSED = {
    "<|vision_start|>": "it takes images, which toolgrpo does not support",
    "<|START_ACTION|>": "its form of calls is not read yet",
    "<atem:": "its form of calls is not read yet",
}


_VLLM_PARSERS = {  # of calls, of thinking, by what vLLM names them; a format without one is served without
    **{"qwen2.5": ("hermes", ""), "qwen3": ("hermes", "qwen3"), "qwen3.5": ("qwen3_coder", ""), "lfm2": ("lfm2", "")},
    **{"llama3.1": ("llama3_json", ""), "mistral": ("mistral", ""), "glm4": ("glm45", "glm45")},
    **{"gpt-oss": ("openai", "openai_gptoss"), "gemma4": ("gemma4", "gemma4")},
}


def vllm_flags(chat: str) -> str:
    """Return with which flags `vllm serve` reads the calls of a chat format; empty where none is known."""
    calls, thinking = _VLLM_PARSERS.get(chat, ("", ""))
    reasoning = f" --reasoning-parser {thinking}" if thinking else ""
    return f" --enable-auto-tool-choice --tool-call-parser {calls}{reasoning}" if calls else ""


def family_of(template: str) -> Family | None:
    """Return the family that this template belongs to."""
    return next((family for family in FAMILIES if all(sign in template for sign in family.signs)), None)


def refusal_of(template: str) -> str:
    """Why no family reads this template, in words that finish "it is of no family that toolgrpo supports: ..."."""
    known = next((why for sign, why in _REFUSED.items() if sign in template), None)
    return known or "it has no marker of a known family (ChatML's <|im_start|>, Llama's <|start_header_id|>, ...)"
