"""The command line over a YAML file over the defaults, for the dataclasses of a command.

    script, config, model = parse_args((ScriptArguments, ToolGRPOConfig, ModelConfig), argv)

Every field is a flag and a YAML key.

* YAML keys may stand under headings (`model:`, `data:`, ...), which are for the reader only;
* a value is checked against the type of its field; YAML's traps are taken out of the way (a bare `no` stays
  the text "no" where text is wanted, `1e-5` is a number, a key that stands twice is an error);
* keys of other recipes (`lr`, `group_size`, those of TRL's commands) are taken where they can mean one thing only
  (`other_names.py`); the variables under `env` are set;
* an unknown key or flag is an error that names the nearest known one; abbreviated flags are not guessed;
* whatever is wrong is a `ConfigError`, a line for each mistake, also where a dataclass itself refuses its values.

Not covered: what the values mean; the dataclasses check that.
"""

from __future__ import annotations

import dataclasses
import os
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolgrpo.commands.flags import Flag, flags_of_classes
from toolgrpo.commands.other_names import REMOVED, answer_to, meant_by
from toolgrpo.errors import ConfigError, ToolGRPOError
from toolgrpo.named_files import CONFIGS, located, nearest, seen_from_here, shipped_names
from toolgrpo.settings_files import BadSettings, read_yaml

HEADINGS = ("model", "data", "generation", "training", "tools", "reward", "logging")

ALIASES = {"max_grpo_completion_length": "max_completion_length", "model": "model_name_or_path"}

RUN_FILE = "run.yaml"  # which a command wrote; others that read it pass over what is its own
_MEAN_LORA = ("lora_r", "lora_alpha")  # where they describe the model, as other recipes have it
_NOTHING = object()  # behind a flag


@dataclass(frozen=True, slots=True)
class Given:
    """Values of a file and the flags over it, without any default, and all that is wrong with them."""

    values: dict[str, Any]
    complaints: list[str]

    def right(self) -> dict[str, Any]:
        """Return the values; raise ConfigError where something is wrong with them."""
        if self.complaints:
            raise ConfigError("\n".join(self.complaints))
        return self.values


@dataclass(frozen=True, slots=True)
class GivenKey:
    """One key of a YAML file; the heading is None for one that stands under none."""

    heading: str | None
    name: str
    value: Any


def parse_args(classes: Iterable[type[Any]], argv: Sequence[str]) -> tuple[Any, ...]:
    """Return one instance per dataclass, from `--config FILE.yaml` and the flags after it."""
    classes = tuple(classes)
    return made_of(classes, given_values(classes, argv))


def made_of(classes: Iterable[type[Any]], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return one instance per dataclass, of the values that are its fields."""
    made = []
    for kind in classes:
        names = [one.name for one in dataclasses.fields(kind) if one.init and one.name in values]
        try:
            made.append(kind(**{name: values[name] for name in names}))
        except ToolGRPOError:
            raise
        except (ValueError, TypeError) as error:  # a dataclass refused its values
            raise ConfigError(str(error)) from error
    return tuple(made)


def given_values(classes: Iterable[type[Any]], argv: Sequence[str]) -> dict[str, Any]:
    """Return what a config file and the flags say, without any default."""
    return read_given(flags_of_classes(classes), argv).right()


def read_given(flags: Mapping[str, Flag], argv: Sequence[str]) -> Given:
    """Read a file and the flags over it; raise ConfigError for a file that cannot be read."""
    path, words = split_config(argv)
    values, complaints = ({}, []) if path is None else _file_values(path, flags)
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=SUPPRESS)
    for flag in flags.values():
        behind = (
            {"nargs": "*"} if flag.takes_several or flag.takes_one_or_several else {"nargs": "?", "const": _NOTHING}
        )
        parser.add_argument(*_spelled(flag.name), dest=flag.name, **behind)
        if bool in flag.members and flag.default is True:
            parser.add_argument(*_spelled(f"no_{flag.name}"), dest=flag.name, action="store_const", const="false")
    try:
        found, rest = parser.parse_known_args(words)
    except ArgumentError as error:
        return Given(values, [*complaints, str(error)])
    known = {option[2:].replace("-", "_") for action in parser._actions for option in action.option_strings}
    complaints += _unknown_words(rest, {*known, *ALIASES, "config"})
    for name, behind_it in vars(found).items():
        try:
            if flags[name].of_training:
                raise ValueError("is read by a training alone; leave it out here (a training's YAML file may have it)")
            values[name] = _value(flags[name], behind_it)
        except ValueError as error:
            complaints.append(f"--{name} {error}")
    return Given(values, complaints)


def _spelled(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def _value(flag: Flag, behind_it: Any) -> Any:
    """Return the value of a flag, from what stands behind it; raise ValueError."""
    if behind_it is _NOTHING and bool in flag.members:
        return True
    if behind_it is _NOTHING or behind_it == []:
        raise ValueError("needs a value after it")
    if not isinstance(behind_it, list):
        return flag.from_text(behind_it)
    values = [flag.from_text(one) for one in behind_it]
    if None in values and len(values) > 1:
        raise ValueError(f"takes none alone, got {' '.join(behind_it)!r}")
    return values if len(values) > 1 or (flag.takes_several and values != [None]) else values[0]


def _unknown_words(rest: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return what is said of the words that are no known flag and stand behind none."""
    rest = rest[: rest.index("--")] if "--" in rest else rest
    found = [word.partition("=")[0] for word in rest if word.startswith("--") and " " not in word]
    if rest and not found:
        return [f"{rest[0]!r} belongs to no flag; flags are written --name value (--help lists them)"]
    return [_unknown_flag(flag, known) for flag in found]


def _unknown_flag(flag: str, known: Iterable[str]) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    if name in REMOVED:
        return f"{flag} was removed: {REMOVED[name]}"
    instead = answer_to(name)
    if instead is not None:
        return f"unknown flag {flag}; {instead}"
    near = nearest(flag, [f"--{name}" for name in known])[0]
    return f"unknown flag {flag}; the nearest known flag is {near} (--help lists them all)"


def _file_values(path: str | Path, known: Mapping[str, Flag]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a YAML file by known key, and all that is wrong with it, a line for each."""
    content = _keys_in(path, known)
    for variable, value in next((one.value for one in content if _sets_variables(one)), {}).items():
        os.environ[str(variable)] = str(value)
    content = [one for one in content if not _sets_variables(one)]
    if Path(path).name == RUN_FILE:
        content = [one for one in content if _key_for(one, known) in known or not _of_another_command(one.name)]
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
            values[name] = known[name].from_yaml(given.value)
        except ValueError as error:
            complaints.append(f"{path}: {given.name} {error}")
    if "use_peft" in known and any(given.heading == "model" and given.name in _MEAN_LORA for given in content):
        values.setdefault("use_peft", True)
    return values, complaints


def _of_another_command(name: str) -> bool:
    from toolgrpo.commands.arguments import flags_of  # which imports this module

    return any(name in flags_of(command) for command in ("train", "sft", "evaluate"))


def _sets_variables(given: GivenKey) -> bool:
    """Return whether a key is TRL's `env`, the variables of the environment."""
    return given.name == "env" and isinstance(given.value, Mapping)


def _unknown_keys(content: Iterable[GivenKey], path: str | Path, known: Mapping[str, Flag]) -> list[str]:
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


def _key_for(given: GivenKey, known: Mapping[str, Flag]) -> str:
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


def _keys_in(path: str | Path, known: Mapping[str, Flag]) -> list[GivenKey]:
    """Return the keys of a YAML file, without its headings."""
    found = []
    for name, value in _load_yaml(Path(path)).items():
        if isinstance(value, Mapping) and name in HEADINGS:
            found += [GivenKey(name, str(key), inner) for key, inner in value.items()]
        elif isinstance(value, Mapping) and name not in (*known, "env"):
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
    path = located(path, CONFIGS)
    if path.is_dir():
        raise ConfigError(f"--config {path} is a folder; give a YAML file, e.g. recipes/configs/nano.yaml")
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise ConfigError(
            f"--config {path}: there is no such file ({seen_from_here(path)}); by name: {', '.join(shipped_names(CONFIGS))}"
        ) from None
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except BadSettings as error:
        raise ConfigError(f"--config {path} {error}") from error
    if content is None:
        raise ConfigError(f"--config {path} is empty; it should hold lines such as `learning_rate: 1e-5`")
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path} must hold `key: value` lines, but it is a {type(content).__name__}")
    return content
