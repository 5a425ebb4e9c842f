"""A tokenizer for every chat template that TRL ships,
to test on where the models' own tokenizers are not at hand.

Each is a `byte_tokenizer` with the special tokens of the family and TRL's copy of the template. Its
ids are not the model's; what is a control token, what the template prints and how a turn is read
are.

Muse Glimmer is in no table of families. It stands for models whose tokenizers carry a response
template; its own is not at hand, so the one here is written after its chat template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl

from toolgrpo.chat.families import family_of
from toolgrpo.testing.chat import byte_tokenizer

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def template_names() -> list[str]:
    """Return the names of the chat templates that TRL ships, without its training variants."""
    return sorted(path.stem for path in _TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))


def template_text(name: str) -> str:
    """Return the text of a chat template that TRL ships, or of its training variant."""
    return (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Special tokens of a family (`skip_special_tokens` drops them) and its markers, which stay."""

    special: tuple[str, ...]
    markers: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None


THINK = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_LFM2 = ("tool_list", "tool_call", "tool_response")


def _named(names: str) -> tuple[str, ...]:
    return tuple(f"<|{name}|>" for name in names.split())


_COHERE = "START_OF_TURN_TOKEN END_OF_TURN_TOKEN USER_TOKEN CHATBOT_TOKEN SYSTEM_TOKEN START_RESPONSE END_RESPONSE"
# By the beginning of a template's name; the first that fits. Only where tokens look otherwise than <|...|>, or stay.
_FAMILIES: dict[str, _Tokens] = {
    "qwen2_5_vl": _Tokens((*CHATML, *VISION), eos="<|im_end|>"),
    "qwen2_5": _Tokens(CHATML, CALLS[:2], eos="<|im_end|>"),
    "qwen": _Tokens((*CHATML, *VISION), (*CALLS, *THINK), eos="<|im_end|>"),
    "nemotron": _Tokens(CHATML, (*CALLS, *THINK), eos="<|im_end|>"),
    "lfm2": _Tokens(
        ("<|startoftext|>", *CHATML, *(f"<|{name}_{side}|>" for name in _LFM2 for side in ("start", "end"))),
        THINK,
        bos="<|startoftext|>",
        eos="<|im_end|>",
    ),
    "llama3": _Tokens(
        _named("begin_of_text end_of_text start_header_id end_header_id eot_id eom_id python_tag"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "gptoss": _Tokens(
        _named("startoftext endoftext start end message channel constrain call return"), eos="<|return|>"
    ),
    "glm4": _Tokens(
        ("[gMASK]", "<sop>", *_named("endoftext system user assistant observation"), "/nothink"),
        (*CALLS, *THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
    ),
    "gemma4": _Tokens(
        ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|image>", "<|image|>", "<image|>"),
        (*(tag for name in ("channel", "tool", *_LFM2[1:]) for tag in (f"<|{name}>", f"<{name}|>")), '<|"|>'),
        bos="<bos>",
        eos="<eos>",
    ),
    "gemma": _Tokens(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>"),
    "cohere": _Tokens(
        ("<BOS_TOKEN>", *_named(_COHERE)),
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
    ),
    "muse_glimmer": _Tokens(
        _named("begin_of_text end_of_text start message eom eot patch video"), bos="<|begin_of_text|>", eos="<|eot|>"
    ),
    "deepseek": _Tokens(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        (
            *(f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call") for side in ("begin", "end")),
            "<｜tool▁sep｜>",
            *THINK,
        ),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
}
_FAMILIES["diffusion_gemma"] = _FAMILIES["gemma4"]

_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_MUSE_GLIMMER: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open": " to=self<|message|>", "close": "<|eom|>"},
        "content": {"open": " to=user<|message|>", "close": "<|eot|>"},
        "tool_calls": {
            "open_pattern": r'<atem:invoke name="(?P<name>[^"\n]+)">',
            "close": "</atem:invoke>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>',
                "value_parser": {"name": "text", "args": {"strip": False}},
            },
            "transform": _FUNCTION,
        },
    },
}


def trl_tokenizer(name: str) -> Any:
    """Build a byte tokenizer with TRL's template `name` and its family's tokens: those listed here, else what stands in
    the template as <|...|> and what ends the family's turns; ChatML's where there is no family.
    """
    template = template_text(name)
    found = family_of(template)
    printed = _FAMILIES["qwen"]
    if found is not None:
        printed = _Tokens(tuple(sorted({*re.findall(r"<\|\w+\|>", template), *found.ends})), eos=found.ends[-1])
    family = next((tokens for start, tokens in _FAMILIES.items() if name.startswith(start)), printed)
    tokenizer = byte_tokenizer(template, family.markers, special=family.special, bos=family.bos, eos=family.eos)
    if name == "muse_glimmer":
        tokenizer.response_template = _MUSE_GLIMMER
    return tokenizer
