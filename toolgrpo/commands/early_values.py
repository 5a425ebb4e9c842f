"""Words and values that are wrong whatever PyTorch says, told before the seconds of its import, all at once.

`early_errors` looks at names, numbers, truth values and choices, in the YAML file and on the command
line, and at files that are not there. Whatever is wrong is told in the sentence of what reads the value
later: `known_keys.py` for types, `missing_files.py` and `plugin_files.py` for files.

Not covered: whether a value makes sense; fields that may be of several types; files that a command
may come to read or not (held-out rows), and those of `replay`, which reads a recording.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from toolgrpo.commands.given_words import Names, file_values, is_missing, split_config, unknown_flags
from toolgrpo.commands.known_keys import KnownKey, or_none, said_plainly, takes_none
from toolgrpo.commands.other_names import question_iterations
from toolgrpo.errors import ConfigError, DataError, ToolGRPOError
from toolgrpo.missing_files import no_conversations, no_data_file, no_mcp_config
from toolgrpo.plugin_files import python_file

HINTS: Mapping[str, Any] = {
    "int": int,
    "int or none": int | None,
    "float": float,
    "float or none": float | None,
    "bool": bool,
    "bool or none": bool | None,
    "str": str,
    "str or none": str | None,
}
"""The hints whose values are looked at, by the names they have in `flags.json`."""

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as Transformers reads them
_NEEDED = dict.fromkeys(("train", "check"), ("model_name_or_path", "dataset_id_or_path"))
_DATA_FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")


def kinds_of(known: Iterable[KnownKey]) -> dict[str, list[str]]:
    """Return what `flags.json` keeps of the types of keys: the name of the hint, and the choices."""
    return {
        key.name: [name, " ".join(key.choices or ())]
        for key in known
        for name, hint in HINTS.items()
        if key.type == hint and (key.choices is not None or not name.startswith("str"))
    }


def early_errors(command: str, argv: Sequence[str], names: Names, kinds: Mapping[str, Any]) -> list[ToolGRPOError]:
    """Return an error for each unknown name, each value of the wrong type and each file that is not there."""
    keys = {
        name: KnownKey(name, HINTS[hint], None if choices is None else tuple(choices))
        for name, (hint, choices) in kinds.items()
    }

    def check(name: str, value: Any) -> Any:
        return value if name not in keys or _is_plain(value, keys[name]) else keys[name].check(value)

    errors: list[ToolGRPOError] = []
    try:
        path, words = split_config(argv)
        values, complaints = ({}, []) if path is None else file_values(path, names.keys, check)
    except ToolGRPOError as error:
        return [error]
    errors += map(ConfigError, (*complaints, *unknown_flags(words, names)))
    try:
        values |= _flags(keys.values(), words)
    except ToolGRPOError as error:
        errors.append(error)
    given = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")} | values.keys()
    errors += [ConfigError(is_missing(name)) for name in _NEEDED.get(command, ()) if name not in given]
    iterations = values.get("num_iterations")
    odd = question_iterations(iterations) if isinstance(iterations, int) else None
    errors += [] if odd is None else [ConfigError(odd)]
    if "--json" in words:
        return errors  # a check answers in its report, of files too
    for name, look in _FILES.get(command, {}).items():
        given_value = values.get(name)
        for one in given_value if isinstance(given_value, list) else [given_value]:
            try:
                if isinstance(one, str):
                    look(one)
            except ToolGRPOError as error:
                errors.append(error)
    return errors


def _is_plain(value: Any, key: KnownKey) -> bool:
    """Return whether a value of a YAML file is right at first sight, without pydantic."""
    if key.choices is not None:
        return value in key.choices
    kinds = (key.type, *getattr(key.type, "__args__", ()))
    return type(value) in kinds or (type(value) is int and float in kinds)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(said_plainly(message))


def _flags(keys: Iterable[KnownKey], words: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)

    def add(name: str, **how: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **how)

    for key in keys:
        read: Callable[[str], Any] = next(kind for hint, kind in _READERS if key.type in (hint, hint | None))
        of_bool = {"nargs": "?", "const": True} if read is _truth else {}
        add(key.name, type=or_none(read) if takes_none(key.type) else read, choices=key.choices, **of_bool)
    for name in dict.fromkeys(name for files in _FILES.values() for name in files):
        add(name, nargs="*")
    return vars(parser.parse_known_args(words)[0])


def _truth(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() in _TRUE


_READERS: tuple[tuple[Any, Callable[[str], Any]], ...] = ((int, int), (float, float), (bool, _truth), (str, str))


# Files, where a value looks like one.


def _python(value: str) -> None:
    path = value.partition(":")[0]
    if path.endswith(".py") and " " not in value.strip():
        python_file(Path(path))


def _mcp(value: str) -> None:
    if value.endswith(".json") and not Path(value).exists():
        raise ConfigError(no_mcp_config(Path(value)))


def _rows(value: str) -> None:
    if _is_missing_data(value):
        raise DataError(no_data_file(Path(value)))


def _conversations(value: str) -> None:
    if _is_missing_data(value):
        raise DataError(no_conversations(Path(value)))


def _is_missing_data(value: str) -> bool:
    path = Path(value)
    return ":" not in value and path.suffix.lower() in _DATA_FILES and not path.exists()


_PLUGINS = {"tools_script": _python, "environment": _python, "agent": _python, "reward_fn": _python, "mcp_config": _mcp}
_FILES: Mapping[str, Mapping[str, Callable[[str], None]]] = {
    "train": {**_PLUGINS, "dataset_id_or_path": _rows},
    "check": {**_PLUGINS, "dataset_id_or_path": _rows},
    "evaluate": _PLUGINS,
    "sft": {"tools_script": _python, "dataset_id_or_path": _conversations},
}
