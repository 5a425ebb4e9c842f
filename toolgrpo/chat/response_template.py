"""Chat formats made of response templates: of a known family, or of what a tokenizer carries.

A known family has a response template of its own (`families.py`); where that only says what TRL's says, the tokenizer's
own or TRL's for exactly this chat template is taken. For a template of no family nothing has to be written: the response
template is the tokenizer's own, or the one that TRL knows. What it does not say is then taken from a call that the chat
template prints: which token ends a turn, what stands around the arguments, and what a model that got it wrong is shown.
`bridge_proof.py` decides, as for every format.

Of TRL, tested with 1.16.0, `trl.chat_template_utils.add_response_schema` is used, which is no public name.

Not covered: chat templates of no family that want results inside the message with the calls, or know no tools.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import regex  # type: ignore[import-untyped]  # it ships no types; transformers compiles its patterns with it
from jinja2 import TemplateError

from toolgrpo.chat.attempts import CallForm
from toolgrpo.chat.bridge_proof import prove
from toolgrpo.chat.encoding import control_tokens
from toolgrpo.chat.families import Family, TurnForm
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.chat.transformers_seam import ResponseTemplate, load_response_template, render_jinja_template
from toolgrpo.chat.turn_reader import CALLS, CONTENT, REASONING, TurnReader
from toolgrpo.errors import ChatFormatError

_QUESTION = "Which one?"
_NAME, _KEY = "look_up", "some_key"
_SHOWN = 200
_CALL = {"name": "NAME", "arguments": {"KEY": "VALUE", "OTHER": "VALUE"}}


def response_template_of(tokenizer: Any) -> dict[str, Any] | None:
    """Return what the tokenizer carries, or what TRL has for exactly this chat template."""
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is None:
        from trl.chat_template_utils import add_response_schema

        with suppress(ValueError):  # TRL does not know exactly this template
            own = getattr(add_response_schema(copy.copy(tokenizer)), "response_template", None)
    return own


def family_format(tokenizer: Any, family: Family) -> TemplateFormat:
    """Return the format of a known family, proven; or what is to be tried in its place."""
    refusals: list[ChatFormatError] = []
    for candidate in (family, *family.otherwise):
        try:
            return _family_format(tokenizer, candidate)
        except ChatFormatError as error:
            refusals.append(error)
    raise refusals[0]


def _family_format(tokenizer: Any, family: Family) -> TemplateFormat:
    if family.form.copied and family.knows_tools:
        with suppress(ChatFormatError):  # what is said of this tokenizer's calls does not hold; the copy may
            theirs = _load(response_template_of(tokenizer))
            if theirs is not None:
                return _proven(tokenizer, family, theirs)
    return _proven(tokenizer, family, load_response_template(family.form.template))


def described_format(tokenizer: Any) -> TemplateFormat | None:
    """Return the format that the response template describes, proven; None if there is none that describes calls."""
    template = _load(response_template_of(tokenizer))
    if template is None:
        return None
    refusals: list[ChatFormatError] = []
    for family in _families(tokenizer, template):
        try:
            return _proven(tokenizer, family, template)
        except ChatFormatError as error:
            refusals.append(error)
    raise refusals[0]


def _load(described: dict[str, Any] | None) -> ResponseTemplate | None:
    if described is None:
        return None
    try:
        template = load_response_template(described)
    except ValueError as error:
        raise ChatFormatError(f"the tokenizer's response template is not valid: {error}") from error
    calls = template.fields.get(CALLS)
    return None if calls is None or calls.open_re is None or calls.close_re is None else template


def _proven(tokenizer: Any, family: Family, template: ResponseTemplate) -> TemplateFormat:
    """Return the format that reads turns with this template."""
    control = control_tokens(tokenizer)
    # The pattern of a stranger may find any token.
    markers = _named(template, family.form.call, control) if family.signs else control
    reader = TurnReader(template, markers, family.ends, family.form.call, family.form.lead)
    chat = TemplateFormat(tokenizer, family, reader)
    prove(chat, tokenizer)
    return chat


def _named(template: ResponseTemplate, form: CallForm, control: Sequence[str]) -> list[str]:
    """Return the control tokens that the response template speaks of; in a turn of a known family all others are text.

    Some it spells; others a pattern finds without spelling them, as `</(?:function>\\s*</)?tool_call>` does.
    """
    patterns = [p for field in template.fields.values() for p in (field.open_re, field.close_re) if p is not None]
    said = [pattern.pattern for pattern in patterns]
    said += [json.dumps(field.content_args, ensure_ascii=False) for field in template.fields.values()]
    text = " ".join([*said, *form.opening, form.closing]).replace("\\", "")
    return [token for token in control if token in text or any(pattern.fullmatch(token) for pattern in patterns)]


def _families(tokenizer: Any, template: ResponseTemplate) -> Iterator[Family]:
    """Return what such a chat template may be like; which it is, the proof finds out."""
    control = control_tokens(tokenizer)
    printed = _printed(tokenizer)
    call, rest = _form(template.fields[CALLS], control, printed)
    ends = _ends(tokenizer, template, control, rest)
    key = next((name for name in REASONING if name in template.fields), REASONING[0])
    for end_opens_results, one_call in itertools.product((False, True), repeat=2):
        yield Family(
            "response-template",
            (),
            ends,
            TurnForm(template, call),
            one_call=one_call,
            end_opens_results=end_opens_results,
            reasoning_key=key,
        )


def _printed(tokenizer: Any) -> str:
    """Return a call and its result, as the chat template prints them."""
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _CALL}]},
        {"role": "tool", "name": "NAME", "content": "RESULT"},
    ]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError) as error:
        raise ChatFormatError(f"the chat template cannot print a call and its result: {error}") from error
    return text.rpartition(_QUESTION)[2]


def _form(calls: Any, control: Sequence[str], printed: str) -> tuple[CallForm, str]:
    """Return the form of a call, and what is printed from its closing on."""
    opening = calls.open_re.search(printed)
    closing = opening and calls.close_re.search(printed, opening.end())
    if not closing:
        raise ChatFormatError(
            f"the tokenizer's response template does not describe the calls that its chat template prints, as in "
            f"{printed[:300]!r}; correct tokenizer.response_template"
        )
    body, between = printed[opening.end() : closing.start()], frozenset[str]()
    if calls.content == "xml-inline":
        tags = regex.compile(calls.content_args["tag_pattern"], regex.DOTALL)
        between = frozenset(piece.strip() for piece in tags.sub("\0", body).split("\0"))
    openings = tuple(token for token in control if calls.open_re.fullmatch(token, partial=True))
    form = CallForm(printed[opening.start() : closing.end()].strip(), closing[0].strip(), openings, between)
    return form, printed[closing.start() :]


def _ends(tokenizer: Any, template: ResponseTemplate, control: Sequence[str], rest: str) -> tuple[str, ...]:
    """Return the tokens that end a turn, first the one that is printed after a call."""
    close = template.fields[CONTENT].close_re if CONTENT in template.fields else None
    ends = [text for text in control if text == tokenizer.eos_token or (close and close.fullmatch(text))]
    printed = sorted((rest.find(end), end) for end in ends if end in rest)
    if not printed:
        raise ChatFormatError(
            f"the response template knows {ends or 'no token'} as the end of a turn, but the chat template prints none of "
            f"them after a call; name the one it prints in the `close` of `{CONTENT}`"
        )
    first = printed[0][1]
    return (first, *(end for end in ends if end != first))


def own_call(tokenizer: Any) -> str:
    """Return a call as this template prints it; nothing if it prints none.

    Templates differ in what they take: arguments as an object or as text, content that is empty or None, tools or none.
    """
    spellings = ({_KEY: "value"}, f'{{"{_KEY}": "value"}}')
    for tools, arguments, content in itertools.product(([_schema()], None), spellings, ("", None)):
        function = {"name": _NAME, "arguments": arguments}
        call = {"id": "firstCall", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        try:  # not by `apply_chat_template`, which from Transformers 5.24 on leaves out what is None
            template = tokenizer.get_chat_template(tools=tools)
            text = render_jinja_template([messages], tools, chat_template=template, **tokenizer.special_tokens_map)[0][
                0
            ]
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            continue
        said = str(text).rpartition(_QUESTION)[2]
        if _NAME in said and _KEY in said:
            return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
    return ""


def _schema() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
    return {"type": "function", "function": {"name": _NAME, "description": "Look up.", "parameters": parameters}}
