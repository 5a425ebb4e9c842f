"""Reach the parts of TRL that are used outside its trainer and are no public names. Tested with TRL
1.16.0.

* the folder `trl/chat_templates`, with the chat templates of the families that TRL trains;
* `trl.chat_template_utils.add_response_schema`, which knows how the turns of these templates are
  read.

What is private in TRL's trainer is touched in `toolgrpo/trainer/trl/trainer.py` alone. Nothing is
imported before it is asked for.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def chat_template(name: str) -> str:
    """Return the text of a chat template that TRL ships, or of its training variant."""
    return (_templates() / f"{name}.jinja").read_text(encoding="utf-8")


def response_schema(tokenizer: Any) -> dict[str, Any] | None:
    """Return what TRL says of how turns of this tokenizer's chat template are read.

    None where TRL does not know exactly this template.
    """
    from trl.chat_template_utils import add_response_schema

    try:
        known = add_response_schema(copy.copy(tokenizer))
    except ValueError:
        return None
    return getattr(known, "response_template", None)


def _templates() -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates"
