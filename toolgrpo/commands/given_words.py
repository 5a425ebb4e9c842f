"""The words of a command line and of its YAML file, read without PyTorch: which of them nobody knows.

`early_values.py` looks at them before the seconds of imports; `config_files.py` reads them later, with
the same functions and so the same sentences. What a command knows stands in `flags.json`
(`flag_table.py`).
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolgrpo.commands.other_names import REMOVED, answer_to, meant_by
from toolgrpo.errors import ConfigError
from toolgrpo.missing_files import seen_from_here
from toolgrpo.nearest import nearest
from toolgrpo.plain_text import check_nesting

HEADINGS = ("model", "data", "generation", "training", "tools", "reward", "logging")

ALIASES = {"max_grpo_completion_length": "max_completion_length", "model": "model_name_or_path"}

_MEAN_LORA = ("lora_r", "lora_alpha")  # where they describe the model, as other recipes have it

_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Names:
    """What a command knows: keys of a file, and names of flags (`no_...` and aliases among them)."""

    keys: frozenset[str]
    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class GivenKey:
    """One key of a YAML file; the heading is None for one that stands under none."""

    heading: str | None
    name: str
    value: Any


def unknown_flags(words: Sequence[str], known: Names) -> list[str]:
    """Return what is said of each flag that nobody knows."""
    found = []
    for word in words:
        name = word.partition("=")[0]
        if word == "--":
            break
        if name.startswith("--") and " " not in word and name[2:].replace("-", "_") not in known.flags:
            found.append(unknown_flag(name, known))
    return found


def unknown_flag(flag: str, known: Names) -> str:
    """Return what is said of a flag that nobody knows."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in REMOVED:
        return f"{flag} was removed: {REMOVED[name]}"
    instead = answer_to(name)
    if instead is not None:
        return f"unknown flag {flag}; {instead}"
    near = nearest(flag, [f"--{name}" for name in known.flags])[0]
    return f"unknown flag {flag}; the nearest known flag is {near} (--help lists them all)"


def is_missing(name: str) -> str:
    """Return what is said where a flag that is needed is not given."""
    return f"--{name} is missing; for a first look: --config recipes/configs/nano.yaml"


def file_values(
    path: str | Path, known: Collection[str], check: Callable[[str, Any], Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a YAML file by known key, as `check(key, value)` gives them, and all that
    is wrong with the file, a line for each. `check` raises ValueError.
    """
    content = _keys_in(path, known)
    complaints = _unknown_keys(content, path, known)
    values: dict[str, Any] = {}
    for given in content:
        name = _key_for(given, known)
        if name not in known:
            continue
        if name in values:
            complaints.append(f"{path}: {name!r} is given twice ({given.name!r}); keep one")
            continue
        values[name] = given.value
        try:
            values[name] = check(name, given.value)
        except ValueError as error:
            complaints.append(f"{path}: {given.name} {error}")
    if "use_peft" in known and any(given.heading == "model" and given.name in _MEAN_LORA for given in content):
        values.setdefault("use_peft", True)
    return values, complaints


def _unknown_keys(content: Iterable[GivenKey], path: str | Path, known: Collection[str]) -> list[str]:
    """Return what is said of the keys and headings that nobody knows."""
    complaints = []
    for given in content:
        if _key_for(given, known) in known:
            continue
        if given.heading is None and isinstance(given.value, Mapping):
            complaints.append(
                f"{path}: unknown heading {given.name!r}; the headings are {', '.join(HEADINGS)} "
                f"(the nearest is {nearest(given.name, HEADINGS)[0]!r})"
            )
            continue
        if given.name in REMOVED:
            complaints.append(f"{path}: {given.name} was removed: {REMOVED[given.name]}")
            continue
        instead = answer_to(given.name) or f"the nearest known key is {nearest(given.name, known)[0]!r}"
        if given.name in HEADINGS and given.heading is not None:
            instead = f"it is a heading, and stands one level too deep, under {given.heading!r}: indent it less"
        complaints.append(f"{path}: unknown key {given.name!r}; {instead}")
    return complaints


def _key_for(given: GivenKey, known: Collection[str]) -> str:
    """Return the known key that is meant, or the one that stands there."""
    return meant_by(ALIASES.get(given.name, given.name), given.heading, known)


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the path behind `--config`, and the other words, aliases replaced."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", nargs="?", default=[])
    namespace, rest = parser.parse_known_args([_without_alias(argument) for argument in argv])
    paths: list[str | None] = namespace.config
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times; give one file, and single values as flags after it")
    if paths and not paths[0]:
        raise ConfigError("--config needs a file, e.g. --config recipes/configs/nano.yaml")
    return (paths[0] if paths else None), rest


def _keys_in(path: str | Path, known: Collection[str]) -> list[GivenKey]:
    """Return the keys of a YAML file, without its headings."""
    found = []
    for name, value in _load_yaml(Path(path)).items():
        if isinstance(value, Mapping) and name in HEADINGS:
            found += [GivenKey(name, str(key), inner) for key, inner in value.items()]
        elif isinstance(value, Mapping) and name not in known:
            meant = nearest(str(name), HEADINGS)[0]
            found += [GivenKey(None, str(name), value), *(GivenKey(meant, str(key), of) for key, of in value.items())]
        elif value is None and name in HEADINGS and name not in known:
            continue  # a heading with nothing under it
        else:
            found.append(GivenKey(None, str(name), value))
    return found


def _without_alias(argument: str) -> str:
    name, equals, value = argument.partition("=")
    target = ALIASES.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
    return argument if target is None else f"--{target}{equals}{value}"


def _load_yaml(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        raise ConfigError(f"--config {path} is a folder; give a YAML file, e.g. recipes/configs/nano.yaml")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"--config {path} has {path.stat().st_size:,} bytes; that is no config file. Is it data?")
        text = path.read_text(encoding="utf-8")
        check_nesting(text)
        content = yaml.load(text, _Loader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file ({seen_from_here(path)})") from None
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not text (byte {error.start} is no UTF-8); give a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an integer of 5,000 digits, a date in a 13th month
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {why}") from error
    if content is None:
        raise ConfigError(f"--config {path} is empty; it should hold lines such as `learning_rate: 1e-5`")
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path} must hold `key: value` lines, but it is a {type(content).__name__}")
    return content


class _Loader(yaml.SafeLoader):
    """Safe YAML: only true and false are booleans, 1e-5 is a number, a key stands once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$", re.IGNORECASE), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
