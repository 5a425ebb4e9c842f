"""Values that a user gave a command: its words over a YAML file, read once and handed on as `Given`.

Every field of a command's dataclasses is a flag and a YAML key.

* YAML keys may stand under headings (`model:`, `data:`, ...), which are for the reader only;
* a value is checked against the type of its field; YAML's traps are taken out of the way (a bare `no` stays
  the text "no" where text is wanted, `1e-5` is a number, a key that stands twice is an error);
* keys of other recipes (`lr`, `group_size`, those of TRL's scripts) are taken where they can mean one thing only, and the
  variables under `env` are set (`other_names.py`);
* an unknown key or flag is an error that names the nearest known one; abbreviated flags are not guessed;
* whatever is wrong is a `ConfigError`, a line for each mistake, also where a dataclass itself refuses its values.

Not covered: what the values mean; the dataclasses check that.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from toolgrpo.commands.flags import TRUE_OR_FALSE, Flag, flags_of_classes, is_known
from toolgrpo.commands.other_names import GivenKey, Reading, answer_to, in_our_words, meant_by
from toolgrpo.errors import ConfigError, ToolGRPOError
from toolgrpo.support.settings_files import BadSettings, read_yaml_with_lines
from toolgrpo.support.shipped_files import CONFIGS, located, nearest, seen_from_here, shipped_names

_OF_ANCHORS = ("x-", ".")  # headings begin so that hold YAML's anchors and no keys
_MEANT_BY = {"data": "dataset_id_or_path", "tools": "tools_script"}  # a value behind a heading
HEADINGS = ("model", "data", "generation", "training", "tools", "reward", "logging")

ALIASES = {"max_grpo_completion_length": "max_completion_length", "model": "model_name_or_path"}

RUN_FILE = "run.yaml"  # which a command wrote; others that read it pass over what is its own
HEAD = "# What this run was given"  # with which it begins
RUN_ID = "run_id"  # a key of that file, which says whose checkpoints are beside it, and which no command takes
_MEAN_LORA = ("lora_r", "lora_alpha")  # where they describe the model, as other recipes have it
_ANY_NUMBER = 1 << 30  # of words behind a flag
_NUMBER = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Given:
    """Values of the words and the file of a command, without any default, and all that is wrong with them.

    `places` has file and line of each value that stands in the file; the others were typed.
    """

    flags: Mapping[str, Flag]
    values: Mapping[str, Any]
    complaints: Sequence[str] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    command: str = ""
    said: Sequence[str] = ()  # how keys of other recipes were read
    launches: bool = False  # processes of their own will read it again
    launcher: Mapping[str, Any] = field(default_factory=dict)  # words for accelerate's launcher in the file

    def over(self, file: Path) -> Given:
        """Return these values over those of a YAML file; raise ConfigError if it cannot be read."""
        below = _file_values(file, self.flags, self.values)
        if self.values.get("eval_strategy") == "no":  # typed, and the file's steps would ask for evaluations
            below = replace(below, values={name: one for name, one in below.values.items() if name != "eval_steps"})
        typed = {*self.values, *re.findall(r"--(\w+)", " ".join(self.complaints))}
        return replace(
            below,
            values={**below.values, **self.values},
            complaints=[*below.complaints, *self.complaints],
            places={name: place for name, place in below.places.items() if name not in typed},
            file=file,
            command=self.command,
        )

    def right(self) -> Mapping[str, Any]:
        """Return the values; raise ConfigError where something is wrong with them."""
        if self.complaints:
            raise ConfigError("\n".join(self.complaints))
        return self.values

    def known(self) -> dict[str, Any]:
        """Return the values over the defaults of their flags."""
        return {name: flag.default for name, flag in self.flags.items()} | dict(self.values)

    def made(self, classes: Iterable[type[Any]]) -> tuple[Any, ...]:
        """Return one instance per dataclass."""
        self.right()
        return tuple(map(self._made, classes))

    def _made(self, kind: type[Any]) -> Any:
        flags = {name: flag for name, flag in flags_of_classes((kind,)).items() if name in self.values}
        values, name = {one: self.values[one] for one in flags}, ""
        try:
            for name, flag in flags.items():
                if not is_known(self.flags[name].type):  # before the libraries were imported
                    values[name] = flag.from_yaml(values[name])
            name = ""
            return kind(**values)
        except ToolGRPOError as error:
            raise self.placed(error) from error
        except (ValueError, TypeError) as error:  # a type or a dataclass refused a value
            said = f"{name} {error}" if name in self.places else f"--{name} {error}" if name else str(error)
            raise self.placed(ConfigError(said)) from error

    def placed(self, error: ToolGRPOError) -> ToolGRPOError:
        """Return the error with file and line of the first key of the file that it names."""
        said = str(error)
        if not isinstance(error, ConfigError) or self.file is None or said.startswith(str(self.file)):
            return error
        named = next((word for word in re.findall(r"\w+", said) if word in self.values), "")  # it may have been typed
        place = self.places.get(named)
        return error if place is None else ConfigError(f"{place}: {error}")


# The words of a command line.


def read_given(
    flags: Mapping[str, Flag], argv: Sequence[str], positional: Mapping[str, str] | None = None, asks: str = ""
) -> Given:
    """Read `--config FILE.yaml` and the words over it; raise ConfigError for a file that cannot be read.

    `positional` names the values that words without a flag are, in order, each with how it is shown; `asks` is said where
    they are wrong.
    """
    positional = positional or {}
    off = {f"no_{name}" for name, flag in flags.items() if flag.is_switch and flag.default is True}
    several = (name for name, flag in flags.items() if flag.takes_several or flag.takes_one_or_several)
    most = {"config": 1, **dict.fromkeys(flags, 1), **dict.fromkeys(off, 0), **dict.fromkeys(several, _ANY_NUMBER)}
    switches = [name for name, flag in flags.items() if flag.is_switch] if positional else ()
    found, others = split_words(argv, most, switches)
    values, complaints = _values_of_words(others, flags, positional, asks, {*most, *ALIASES})
    wrong: dict[str, str] = {}
    for name, behind in found:
        try:
            wrong.pop(name, None)
            if name in off and behind:
                raise ValueError(f"takes no value, got {behind[0]!r}")
            if name in off:
                values[name.removeprefix("no_")] = False
            elif name in flags and flags[name].takes_several and [one for one, _ in found].count(name) > 1:
                raise ValueError("is given twice; write all of its values behind one flag")
            elif name != "config":
                values[name] = _value(flags[name], behind)
        except ValueError as error:
            wrong[name] = f"--{name} {error}"
    given = Given(flags, values, [*complaints, *wrong.values()])
    files = [behind for name, behind in found if name == "config"]
    if len(files) > 1:
        raise ConfigError(f"--config is given {len(files)} times; give one file, and single values as flags after it")
    if files and not any(files[0]):
        raise ConfigError("--config needs a file, e.g. --config recipes/configs/nano.yaml")
    return given.over(Path(files[0][0])) if files else given


def split_words(
    argv: Sequence[str], most: Mapping[str, int], switches: Collection[str] = ()
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return each flag with the words behind it, at `most` so many, and all other words as they stand.

    A switch takes true or false alone, and leaves another word to those that stand behind no flag.
    """
    found, others, words = list[tuple[str, list[str]]](), list[str](), deque(argv)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        name = name[2:].replace("-", "_") if _is_flag(word) and word.startswith("--") else ""
        name = ALIASES.get(name, name)
        if word == "--":
            return found, [*others, word, *words]
        if name not in most:
            others.append(word)
            continue
        behind = [value] if equals else []
        while not equals and words and len(behind) < most[name] and not _is_flag(words[0]):
            if name in switches and words[0].lower() not in TRUE_OR_FALSE:
                break
            behind.append(words.popleft())
        found.append((name, behind))
    return found, others


def _is_flag(word: str) -> bool:
    """Return whether a word is no value: it begins as a flag does, and is neither a number nor a sentence."""
    name = word.partition("=")[0]
    return len(word) > 1 and word[0] == "-" and not re.search(r"\s", name) and not _NUMBER.fullmatch(word)


def _values_of_words(
    others: Sequence[str], flags: Mapping[str, Flag], positional: Mapping[str, str], asks: str, known: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the words that stand behind no flag, and what is wrong with them."""
    end = others.index("--") if "--" in others else len(others)
    unknown = [word.partition("=")[0] for word in others[:end] if word.startswith("--") and _is_flag(word)]
    words = [word for word in others[:end] if not _is_flag(word)] + [*others[end + 1 :]]
    stray = [word for word in others[:end] if _is_flag(word)] + words[len(positional) :]
    complaints = [_unknown_flag(flag, known) for flag in unknown] if flags else []
    if complaints:
        words = [*takewhile(lambda word: not _is_flag(word), others)]  # those behind it may belong to it
    elif stray:
        no_flag = f"{stray[0]!r} belongs to no flag; flags are written --name value (--help lists them)"
        complaints.append(f"{asks} (got {stray[0]!r})" if asks else no_flag)
    values: dict[str, Any] = {}
    for (name, shown), word in zip(positional.items(), words, strict=False):
        try:
            values[name] = flags[name].from_text(word) if name in flags else word
        except ValueError as error:
            complaints.append(f"{shown.strip('[]')} {error}; {asks}")
    return values, complaints


def _value(flag: Flag, behind: Sequence[str]) -> Any:
    """Return the value of a flag, from the words behind it; raise ValueError."""
    if flag.of_training:
        raise ValueError("is only read in training; leave it out here (a YAML file for training may have it)")
    bare = True if flag.is_switch else flag.bare
    if not behind and bare is not None:
        return bare
    if not behind:
        raise ValueError("needs a value after it")
    values = [flag.from_text(one) for one in behind]
    if None in values and len(values) > 1:
        raise ValueError(f"takes none alone, got {' '.join(behind)!r}")
    return values if len(values) > 1 or (flag.takes_several and values != [None]) else values[0]


def _unknown_flag(flag: str, known: Iterable[str]) -> str:
    instead = answer_to(flag.removeprefix("--").replace("-", "_"))
    if instead is not None:
        return f"unknown flag {flag}; {instead}"
    near = nearest(flag, [f"--{name}" for name in known])[0]
    return f"unknown flag {flag}; the nearest known flag is {near} (--help lists them all)"


# The keys of a file.


def _file_values(path: Path, known: Mapping[str, Flag], typed: Mapping[str, Any]) -> Given:
    """Return the values of a YAML file by known key, and all that is wrong with it, a line for each."""
    content = _keys_in(path, known)
    if path.name == RUN_FILE:  # it may come with a recording from elsewhere: it sets no variables and launches nothing
        read = Reading([one for one in content if _key_for(one, known) in known or not _of_another_command(one.name)])
    else:
        read = in_our_words(content, typed, known, str(path))
    complaints = [*read.complaints, *_unknown_keys(read.keys, known)]
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for given in read.keys:
        name = _key_for(given, known)
        if name not in known:
            continue
        if name in values:
            complaints.append(f"{given.where}: {name!r} is given twice ({given.name!r}); keep one")
            continue
        values[name], places[name] = given.value, given.where
        try:
            values[name] = known[name].from_yaml(given.value)
        except ValueError as error:
            complaints.append(f"{given.where}: {given.name} {error}")
    means_lora = [one.where for one in read.keys if one.heading == "model" and one.name in _MEAN_LORA]
    if "use_peft" in known and means_lora and "use_peft" not in values:
        values["use_peft"], places["use_peft"] = True, means_lora[0]
    return Given(known, values, complaints, places, said=read.said, launcher=read.launcher)


def _of_another_command(name: str) -> bool:
    from toolgrpo.commands.table import flags_of  # which imports this module

    return any(name in flags_of(command) for command in ("train", "sft", "evaluate"))


def _unknown_keys(content: Iterable[GivenKey], known: Mapping[str, Flag]) -> list[str]:
    """Return what is said of the keys and headings that nobody knows."""
    complaints = []
    for given in content:
        if _key_for(given, known) in known:
            continue
        if given.heading is None and isinstance(given.value, Mapping) and answer_to(given.name) is None:
            complaints.append(
                f"{given.where}: unknown heading {given.name!r}; the headings are {', '.join(HEADINGS)} "
                f"(the nearest is {nearest(given.name, HEADINGS)[0]!r}; one for anchors alone begins with x-)"
            )
            continue
        instead = answer_to(given.name) or f"the nearest known key is {nearest(given.name, known)[0]!r}"
        if given.name in HEADINGS and given.heading is None:
            key = f"`{_MEANT_BY[given.name]}: {given.value}`" if given.name in _MEANT_BY else "its keys"
            complaints.append(f"{given.where}: {given.name!r} is a heading; put {key} under it")
            continue
        if given.name in HEADINGS and given.heading is not None:
            instead = f"it is a heading that is one level too deep, under {given.heading!r}: indent it less"
        complaints.append(f"{given.where}: unknown key {given.name!r}; {instead}")
    return complaints


def _key_for(given: GivenKey, known: Mapping[str, Flag]) -> str:
    """Return the known key that is meant, or the one that stands there."""
    return given.meant or meant_by(ALIASES.get(given.name, given.name), given.heading, known)


def _keys_in(path: Path, known: Mapping[str, Flag]) -> list[GivenKey]:
    """Return the keys of a YAML file without its headings; those of an unknown one if they stand nowhere else."""
    found, astray = list[GivenKey](), list[GivenKey]()
    content, lines = _load_yaml(path)

    def key(heading: Any, name: Any, value: Any, under: Any = None) -> GivenKey:
        line = lines.get((str(under or heading or ""), str(name)))
        return GivenKey(heading, str(name), value, str(path) if line is None else f"{path}, line {line}")

    for name, value in content.items():
        if name == RUN_ID or str(name).startswith(_OF_ANCHORS):
            continue
        if isinstance(value, Mapping) and name in HEADINGS:
            found += [key(name, inner, of) for inner, of in value.items()]
        elif isinstance(value, Mapping) and name not in known and answer_to(name) is None:
            meant = nearest(str(name), HEADINGS)[0]
            found.append(key(None, name, value))
            astray += [key(meant, inner, of, under=name) for inner, of in value.items()]
        elif value is None and name in HEADINGS and name not in known:
            continue  # a heading with nothing under it
        else:
            found.append(key(None, name, value))
    names = {one.name for one in found}
    return found + [one for one in astray if one.name not in names]


def _load_yaml(path: Path) -> tuple[Mapping[str, Any], Mapping[tuple[str, str], int]]:
    """Return what a YAML file holds, and the line of each key by its heading ("": none)."""
    path = located(path, CONFIGS)
    if path.is_dir():
        raise ConfigError(f"--config {path} is a folder; give a YAML file, e.g. recipes/configs/nano.yaml")
    try:
        content, lines = read_yaml_with_lines(path)
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
    return content, lines
