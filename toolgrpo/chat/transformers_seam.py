"""Reach the parts of Transformers' reading of turns that are no public names. Tested with Transformers 5.19.

`ResponseTemplate` and `load_response_template` say what a response template is, `process_field` reads what a call holds;
`render_jinja_template` prints messages as they are given.
"""

from __future__ import annotations

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template
from transformers.utils.chat_template_utils import render_jinja_template

__all__ = ["ResponseTemplate", "load_response_template", "process_field", "render_jinja_template"]
