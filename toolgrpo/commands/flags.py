"""One flag, which is a YAML key as well: read off our dataclasses, and off the source of TRL and Transformers.

The libraries are not imported for it, so that help and the errors of the first second need no PyTorch.

Not covered: a default or a choice that only the import of a library works out; such a flag has none here.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib.util
import json
import typing
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from confined_python import parse_python
from toolgrpo.support.shipped_files import nearest_is

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as Transformers reads them
TRUE_OR_FALSE = (*_TRUE, *_FALSE)
_TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Unknown:
    """Stands for a type of a library that was not imported."""


Source = tuple[str, str, str]
"""A dataclass of an installed library: package, file and class."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag; `type` is the hint of its field."""

    name: str
    type: Any
    default: Any = None
    help: str = ""
    choices: tuple[Any, ...] | None = None
    ours: bool = True  # not TRL's or Transformers'
    of_training: bool = False  # refused by a command that trains nothing
    theme: str = ""  # where help shows it
    bare: Any = None  # its value where nothing stands behind it

    @property
    def members(self) -> tuple[Any, ...]:
        """The types of which a value may be, but None."""
        arguments = () if typing.get_origin(self.type) in (list, dict, typing.Literal) else typing.get_args(self.type)
        return tuple(one for one in arguments or (self.type,) if one is not type(None))

    @property
    def is_switch(self) -> bool:
        return bool in self.members

    @property
    def takes_several(self) -> bool:
        return not {str, bool} & set(self.members) and typing.get_origin(self.members[0]) is list

    @property
    def takes_one_or_several(self) -> bool:
        return str in self.members and list[str] in self.members

    @property
    def takes_none(self) -> bool:
        """Return whether None can be told from text: an optional field that is not text."""
        return type(None) in typing.get_args(self.type) and str not in self.members

    def from_text(self, text: str) -> Any:
        """Return the value of one word of a command line; raise ValueError that says what is wrong."""
        if self.takes_none and text.lower() in ("none", "null"):
            return None
        if self.choices is not None:
            if text not in map(str, self.choices):
                raise ValueError(
                    f"must be one of {', '.join(map(repr, self.choices))}; got {text!r}" + self._nearest(text)
                )
            return next(choice for choice in self.choices if str(choice) == text)
        kinds = typing.get_args(self.members[0]) if self.takes_several else self.members
        if bool in kinds:
            words = [word for kind in kinds for word in typing.get_args(kind)]  # of a Literal beside it
            if text.lower() not in (*TRUE_OR_FALSE, *words):
                raise ValueError(f"must be {', '.join(['true', *words])} or false, got {text!r}")
            return text if text in words else text.lower() in _TRUE
        if str not in kinds and typing.get_origin(kinds[0]) is dict:
            try:
                return self.from_yaml(json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(f'must be JSON, as {{"rope": true}}, got {text!r} ({error})') from None
        if str in kinds or not isinstance(kinds[0], type) or not issubclass(kinds[0], int | float):
            return text
        try:
            number = kinds[0](text)
            if number != number:
                raise ValueError
            return number
        except ArgumentTypeError as error:
            raise ValueError(str(error)) from error
        except ValueError:
            raise ValueError(f"must be {_TYPE_NAMES.get(kinds[0], kinds[0].__name__)}, got {text!r}") from None

    def from_yaml(self, value: Any) -> Any:
        """Return a value of a file as the field wants it; raise ValueError that says what is wrong."""
        if isinstance(value, str) and self.takes_several and list[str] in self.members:
            value = [value]  # one of what may be several
        if not is_known(self.type) or self._is_plain(value):
            return value
        from pydantic import ConfigDict, TypeAdapter, ValidationError  # only where a value needs a second look

        adapter: TypeAdapter[Any] = TypeAdapter(self.type, config=ConfigDict(arbitrary_types_allowed=True))
        try:
            checked = adapter.validate_python(value)
        except ValidationError as error:
            reason = "; ".join(dict.fromkeys(detail["msg"] for detail in error.errors()[:3]))
            raise ValueError(f"must be {self._type_name()}, got {value!r:.200} ({reason:.200})") from error
        if checked != checked:
            raise ValueError(f"must be {self._type_name()}, got {value!r}")
        if self.choices is not None and checked not in self.choices:
            raise ValueError(
                f"must be one of {', '.join(map(str, self.choices))}; got {value!r:.200}" + self._nearest(value)
            )
        return checked

    def _nearest(self, value: Any) -> str:
        return nearest_is(str(value), map(str, self.choices or ()))

    def _is_plain(self, value: Any) -> bool:
        """Return whether a value is right at first sight."""
        if self.choices is not None:
            return value in self.choices
        if isinstance(value, list) and self.takes_several:
            return {type(one) for one in value} <= set(typing.get_args(self.members[0]))
        kinds = (*self.members, type(None)) if self.takes_none else self.members
        return (type(value) in kinds or (type(value) is int and float in kinds)) and value == value  # a NaN is not

    def _type_name(self) -> str:
        kind = self.members[0] if len(self.members) == 1 and self.members[0] in _TYPE_NAMES else self.type
        if isinstance(kind, type) and not typing.get_args(kind):
            return _TYPE_NAMES.get(kind, kind.__name__)
        return str(kind).replace("typing.", "").replace("NoneType", "None")


def is_known(hint: Any) -> bool:
    """Return whether a hint names no type of a library that was not imported."""
    return hint is not Unknown and all(map(is_known, typing.get_args(hint)))


def flags_of_classes(classes: Iterable[type[Any]]) -> dict[str, Flag]:
    """Return the flags of dataclasses, by name."""
    found: dict[str, Flag] = {}
    for kind in classes:
        hints = typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            if one.init:
                default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
                found[one.name] = Flag(
                    one.name,
                    hints[one.name],
                    None if default is dataclasses.MISSING else default,
                    _sentence(one.metadata.get("help", "")),
                    _choices(hints[one.name], one.metadata.get("choices")),
                    theme=str(one.metadata.get("theme") or getattr(kind, "theme", "")),
                    bare=one.metadata.get("bare"),
                )
    return found


def _choices(hint: Any, given: Iterable[Any] | None) -> tuple[Any, ...] | None:
    """Return what may stand behind a flag: what its field says, or the values of an enum."""
    enums = [one for one in (*typing.get_args(hint), hint) if isinstance(one, type) and issubclass(one, Enum)]
    return tuple(given) if given is not None else tuple(one.value for one in enums[0]) if enums else None


def flags_of_source(package: str, file: str, name: str) -> Iterator[Flag]:
    """Yield the flags of a dataclass of an installed library, from its source."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is installed with this package"
    tree = parse_python((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            given = {one.arg: one.value for one in getattr(node.value, "keywords", ())}
            said = given.get("metadata", ast.Dict([], []))
            assert isinstance(said, ast.Dict)
            metadata = {_literal(key): _literal(value) for key, value in zip(said.keys, said.values, strict=True)}
            yield Flag(
                node.target.id,
                _hint(node.annotation),
                _literal(given.get("default", node.value)),
                _sentence(metadata.get("help") or ""),
                tuple(metadata["choices"]) if metadata.get("choices") else None,
                ours=False,
            )


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:  # what only the module itself can work out
        return None


def _hint(annotation: ast.expr) -> Any:
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    known = {name: getattr(builtins, name, getattr(typing, name, Unknown)) for name in names}
    return eval(ast.unparse(annotation), known)


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("%%", "%")
