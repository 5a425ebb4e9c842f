"""The command line over a YAML file over the defaults, for the dataclasses of a recipe.

    script, config, model = parse_args((ScriptArguments, ToolGRPOConfig, ModelConfig), argv)

Every field is a flag and a YAML key. On top of TRL's parser this gives:

* YAML keys may stand under headings (`model:`, `data:`, ...), which are for the reader only;
* a YAML value is checked against the type of its field, as a flag is; YAML's traps are taken out of
  the way (a bare `no` stays the text "no" where text is wanted, `1e-5` is a number, a key that
  stands twice is an error);
* keys of other recipes (`lr`, `group_size`) are taken where they can mean one thing only
  (`other_names.py`);
* an unknown key or flag is an error that names the nearest known one; abbreviated flags are not
  guessed;
* whatever is wrong is a `ConfigError`: all that is wrong with the file, a line for each; else one
  sentence, also where a dataclass itself refuses its values.

Not covered: what the values mean; the dataclasses check that.
"""

from __future__ import annotations

import typing
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from trl import TrlParser

from toolgrpo.commands.given_words import (
    ALIASES,
    Names,
    file_values,
    split_config,
    unknown_flag,
)
from toolgrpo.commands.known_keys import KnownKey, or_none, said_plainly, takes_none
from toolgrpo.errors import ConfigError, ToolGRPOError

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


@overload
def parse_args(dataclass_types: tuple[type[A]], argv: Sequence[str]) -> tuple[A]: ...
@overload
def parse_args(dataclass_types: tuple[type[A], type[B]], argv: Sequence[str]) -> tuple[A, B]: ...
@overload
def parse_args(dataclass_types: tuple[type[A], type[B], type[C]], argv: Sequence[str]) -> tuple[A, B, C]: ...
@overload
def parse_args(
    dataclass_types: tuple[type[A], type[B], type[C], type[D]], argv: Sequence[str]
) -> tuple[A, B, C, D]: ...
def parse_args(dataclass_types: tuple[type[Any], ...], argv: Sequence[str]) -> tuple[Any, ...]:
    """Return one instance per dataclass, from `--config FILE.yaml` and the flags after it."""
    known = known_keys(dataclass_types)
    parser = _Parser(dataclass_types, known)
    path, flags = split_config(argv)
    if path is not None:
        parser.use_config(read_config(path, known.values()))
    return parser.instances(flags)


def given_values(dataclass_types: tuple[type[Any], ...], argv: Sequence[str]) -> dict[str, Any]:
    """Return what a config file and the flags say, without any default; `parse_args` reads it."""
    known = known_keys(dataclass_types)
    parser = _Parser(dataclass_types, known)
    path, flags = split_config(argv)
    for action in parser._actions:
        action.default = SUPPRESS
        action.required = False
    found = vars(parser.parse_known_args(flags)[0])
    of_file = {} if path is None else read_config(path, known.values())
    return {name: value for name, value in {**of_file, **found}.items() if name in known}


def read_config(path: str | Path, known: Iterable[KnownKey]) -> dict[str, Any]:
    """Return the checked values of a YAML file, without its headings."""
    by_name = {key.name: key for key in known}
    values, complaints = file_values(path, by_name, lambda name, value: by_name[name].check(value))
    if complaints:
        raise ConfigError("\n".join(complaints))
    return values


def given_names(dataclass_types: Iterable[type[Any]], argv: Sequence[str]) -> frozenset[str]:
    """Return the fields that a command line, or its YAML file, gives a value."""
    known = known_keys(dataclass_types)
    path, flags = split_config(argv)
    names = {word[2:].partition("=")[0].replace("-", "_") for word in flags if word.startswith("--")}
    if path is not None:
        names |= read_config(path, known.values()).keys()
    return frozenset(names & known.keys())


def known_names(dataclass_types: tuple[type[Any], ...]) -> Names:
    """Return every name that `parse_args` takes for these dataclasses."""
    return _Parser(dataclass_types, known_keys(dataclass_types)).names


class _Parser(TrlParser):  # type: ignore[misc]  # TRL ships no types
    """TRL's parser, with one kind of error and no guessing of abbreviated flags."""

    def __init__(self, dataclass_types: tuple[type[Any], ...], known: Mapping[str, KnownKey]) -> None:
        super().__init__(dataclass_types, allow_abbrev=False)
        self.add_argument("--config", metavar="FILE.yaml", help="YAML file with values for any of these flags.")
        for alias, name in ALIASES.items():
            if name in known:
                self.add_argument(f"--{alias}", metavar="N", help=f"Another name of --{name}.")
        self._keys = frozenset(known)
        for action in self._actions:
            key = known.get(action.dest)
            if key is not None and action.type is not None and takes_none(key.type):
                action.type = or_none(action.type)

    @property
    def names(self) -> Names:
        """Every name that this parser takes."""
        options = {option for action in self._actions for option in action.option_strings if option.startswith("--")}
        return Names(self._keys, frozenset(option[2:].replace("-", "_") for option in options))

    def use_config(self, values: Mapping[str, Any]) -> None:
        self.set_defaults_with_config(**values)

    def instances(self, flags: list[str]) -> tuple[Any, ...]:
        try:
            *outputs, rest = self.parse_args_into_dataclasses(
                args=flags, return_remaining_strings=True, look_for_args_file=False
            )
        except ToolGRPOError:
            raise
        except (ValueError, TypeError) as error:  # a dataclass refused its values
            raise ConfigError(str(error)) from error
        if rest:
            raise ConfigError(self._complaint(rest))
        return tuple(outputs[: len(self.dataclass_types)])

    def error(self, message: str) -> NoReturn:
        raise ConfigError(said_plainly(message))

    def _complaint(self, rest: Sequence[str]) -> str:
        flag = next((word for word in rest if word.startswith("--")), None)
        if flag is None:
            return f"{rest[0]!r} belongs to no flag; flags are written --name value (--help lists them)"
        return unknown_flag(flag.partition("=")[0], self.names)


def known_keys(dataclass_types: Iterable[type[Any]]) -> dict[str, KnownKey]:
    """Return every key of these dataclasses by its name."""
    known: dict[str, KnownKey] = {}
    for dataclass_type in dataclass_types:
        hints = typing.get_type_hints(dataclass_type)
        for field in dataclass_fields(dataclass_type):
            if field.init:
                choices = field.metadata.get("choices")
                known[field.name] = KnownKey(field.name, hints[field.name], tuple(choices) if choices else None)
    return known
