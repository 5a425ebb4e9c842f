"""One key that a config file or command line may have, and what its value must be.

Read without PyTorch and TRL, so that `early_values.py` can look at values before the seconds of
imports; `config_files.py` looks again with the same functions and so the same sentences.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# What argparse and Transformers say about a flag, in our words.
_SAID_PLAINLY = tuple(
    (re.compile(said), plainly)
    for said, plainly in (
        (r"^argument (--\w+)(?:/-[\w-]+)*: ", r"\1 "),
        (r"invalid int value: (.*)", r"must be a whole number, got \1"),
        (r"invalid float value: (.*)", r"must be a number, got \1"),
        (r"Truthy value expected: got (.*?) but expected one of .*", r"must be true or false, got '\1'"),
        (r"invalid choice: (.*) \(choose from (.*)\)", r"must be one of \2; got \1"),
        (r"expected (?:one|at least one) argument", r"needs a value after it"),
    )
)


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key by name; `type` is the hint of its field."""

    name: str
    type: Any
    choices: tuple[Any, ...] | None

    def check(self, value: Any) -> Any:
        """Return the value as the field wants it; raise ValueError that says what is wrong."""
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        adapter: TypeAdapter[Any] = TypeAdapter(self.type, config=ConfigDict(arbitrary_types_allowed=True))
        if isinstance(value, str) and _takes_texts_only(self.type):
            value = [value]  # one of what may be several
        try:
            checked = adapter.validate_python(value)
        except ValidationError as error:
            reason = "; ".join(dict.fromkeys(detail["msg"] for detail in error.errors()[:3]))
            raise ValueError(f"must be {_type_name(self.type)}, got {value!r} ({reason})") from error
        if self.choices is not None and checked not in self.choices:
            raise ValueError(f"must be one of {', '.join(map(str, self.choices))}; got {value!r}")
        return checked


def said_plainly(message: str) -> str:
    """Return what argparse says about a flag in our words."""
    for said, plainly in _SAID_PLAINLY:
        message = said.sub(plainly, message)
    return message


def takes_none(hint: Any) -> bool:
    """Return whether None can be told from text: an optional field that is not text."""
    arguments = typing.get_args(hint)
    return type(None) in arguments and str not in arguments


def or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of a flag's text that takes `none` and `null`, too."""

    def converted(text: str) -> Any:
        return None if isinstance(text, str) and text.lower() in ("none", "null") else convert(text)

    converted.__name__ = getattr(convert, "__name__", "value")  # argparse names it in its error
    return converted


def _takes_texts_only(hint: Any) -> bool:
    """Return whether a field is a list of texts, and never a single one."""
    arguments = typing.get_args(hint)
    return (hint == list[str] or list[str] in arguments) and str not in arguments


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    members = typing.get_args(hint)
    if len(members) == 2 and members[0] in names and members[1] is type(None):
        hint = members[0]
    plain = hint if isinstance(hint, type) and not typing.get_args(hint) else None
    return names.get(plain, plain.__name__) if plain else str(hint).replace("typing.", "").replace("NoneType", "None")
