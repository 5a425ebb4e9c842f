"""What a chat template prints of its own accord, whatever family it is of."""

from __future__ import annotations

import itertools
from typing import Any

from jinja2 import TemplateError

from toolgrpo.chat.transformers_seam import render_jinja_template

_NAME, _KEY, _QUESTION = "look_up", "some_key", "Which one?"
_SHOWN = 200


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
