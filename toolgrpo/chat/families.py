"""The model families, as a table: how a chat template is recognised and how its turns are read.

A template is recognised by what it prints, not by comparing it with a stored copy, so a model's own small changes do no
harm; `bridge_proof.py` then decides whether the recognised family really fits. The first family whose signs all stand in the
template is taken, so the more particular ones come first.

Turns of every family are read by one reader (`turn_reader.py`) from a response template: TRL's or, where that one loses
something, a corrected one (`family_templates.py`). A template of no family is read as its tokenizer's response template says
(`response_template.py`).

A family that does not `knows_tools` prints only system, user and assistant texts. It is given the schemas, calls and
results in Hermes' words (`message_shapes.py`). Some templates of a family print less than others: `otherwise` says what is tried
next where the proof refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolgrpo.chat.family_templates import (
    DEEPSEEK,
    FUNCTION_TAGS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    HERMES_COHERE2,
    HERMES_DEEPSEEK,
    LLAMA,
    MISTRAL,
    PYTHON,
    TurnForm,
)

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
    Family(
        "llama3.1",
        ("<|start_header_id|>", '"parameters": '),
        ("<|eot_id|>", "<|eom_id|>"),
        LLAMA,
        one_call=True,
    ),
    Family(
        "lfm2",
        ("<|im_start|>", "<|tool_call_start|>"),
        ("<|im_end|>",),
        PYTHON,
        reasoning_key="thinking",
    ),
    Family(
        "lfm2",
        ("<|im_start|>", "List of tools: "),
        ("<|im_end|>",),
        PYTHON,
        calls_in_text=True,
        reasoning_key="thinking",
    ),
    Family("mistral", ("[TOOL_CALLS]", "[INST]"), ("</s>",), MISTRAL),
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
    "<|vision_start|>": "it takes images, which toolgrpo does not",
    "<|START_ACTION|>": "its form of calls is not read yet",
    "<atem:": "its form of calls is not read yet",
}


def family_of(template: str) -> Family | None:
    """Return the family that this template belongs to."""
    return next((family for family in FAMILIES if all(sign in template for sign in family.signs)), None)


def refusal_of(template: str) -> str:
    """Why no family reads this template, in words that finish "it is of no family that toolgrpo supports: ..."."""
    known = next((why for sign, why in _REFUSED.items() if sign in template), None)
    return known or "nothing in it is a sign of a known one (ChatML's <|im_start|>, Llama's <|start_header_id|>, ...)"
