"""The flags of the commands as data, from the dataclasses that read them.

`--help` must not wait for PyTorch and TRL to be imported, so what it shows is kept in `flags.json`
beside this file: `python -m toolgrpo.commands.flag_table` writes it, and a test compares it with
the dataclasses. `--help all` reads the dataclasses themselves.

Not covered: defaults that depend on the machine (bf16 on a GPU); a flag without a default stands
without one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolgrpo.commands.given_words import Names

FLAGS_FILE = Path(__file__).with_name("flags.json")

_OF_INSTANCE = ("output_dir", "generation_batch_size", "steps_per_generation")  # filled in by TRL and Transformers


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as a person reads it."""

    name: str
    value: str  # what is written after it
    default: str | None
    help: str
    ours: bool  # not TRL's or Transformers'


def read_flags(command: str) -> dict[str, Flag]:
    """Return the flags that the short page of a command may show, without importing what reads them."""
    table = _read()
    of_command = table["commands"][command]
    records = {**table["flags"], **of_command["other_flags"]}
    return {name: Flag(name, *records[name]) for name in of_command["shown"].split()}


def read_names(command: str) -> Names | None:
    """Return every name that a command knows, without importing what reads the values.

    None where other versions of TRL and Transformers are installed, which may know other names.
    """
    table = _read()
    if table["versions"] != _versions():
        return None
    of_command = table["commands"][command]
    keys = frozenset(of_command["keys"].split())
    return Names(keys, keys | frozenset(of_command["other_names"].split()))


def read_kinds(command: str) -> dict[str, Any]:
    """Return what is kept of the types of a command's keys; true where `read_names` returns something."""
    table = _read()
    keys = set(table["commands"][command]["keys"].split())
    other = table["commands"][command]["other_kinds"]
    kinds = {name: kind for name, kind in {**table["kinds"], **other}.items() if name in keys and kind is not None}
    return {name: (hint, choices.split() or None) for name, (hint, choices) in kinds.items()}


def _read() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FLAGS_FILE.read_text(encoding="utf-8"))
    return table


def flags_of_command(command: str) -> dict[str, Flag]:
    """Return every flag that a command takes and does not refuse; imports PyTorch and TRL."""
    from toolgrpo.trainer.config import ToolGRPOConfig
    from toolgrpo.trainer.trl.fields import WITHOUT_EFFECT

    filled_in = vars(ToolGRPOConfig())
    found: dict[str, Flag] = {}
    for kind in _classes(command):
        theirs = {field.name for base in kind.__mro__[1:] if _is_theirs(base) for field in dataclasses.fields(base)}
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if not field.init or field.name in WITHOUT_EFFECT:
                continue
            fills_in = issubclass(kind, ToolGRPOConfig) and field.name in _OF_INSTANCE
            default = filled_in[field.name] if fills_in else _default(field)
            ours = not _is_theirs(kind) and (field.name not in theirs or field.name in vars(kind))
            found[field.name] = Flag(
                name=field.name,
                value=_value(hints[field.name], field.metadata.get("choices")),
                default=None if default is None or default == "" else _shown(default),
                help=_sentence(field.metadata.get("help", "")),
                ours=ours,
            )
    return found


def _classes(command: str) -> tuple[type[Any], ...]:
    from trl import ModelConfig

    from toolgrpo.commands.arguments import ScriptArguments
    from toolgrpo.commands.check import CheckArguments
    from toolgrpo.commands.evaluate import EvaluationArguments, EvaluationConfig
    from toolgrpo.commands.gateway import GatewayArguments
    from toolgrpo.commands.replay import ReplayArguments
    from toolgrpo.commands.sft import SFTArguments, ToolSFTConfig
    from toolgrpo.trainer.config import ToolGRPOConfig

    classes: Mapping[str, tuple[type[Any], ...]] = {
        "train": (ScriptArguments, ToolGRPOConfig, ModelConfig),
        "check": (CheckArguments, ScriptArguments, ToolGRPOConfig, ModelConfig),
        "replay": (ReplayArguments, ScriptArguments, ToolGRPOConfig, ModelConfig),
        "evaluate": (EvaluationArguments, ScriptArguments, EvaluationConfig, ModelConfig),
        "gateway": (GatewayArguments, EvaluationConfig, ModelConfig),
        "sft": (SFTArguments, ToolSFTConfig, ModelConfig),
    }
    return classes[command]


def _is_theirs(kind: type[Any]) -> bool:
    return dataclasses.is_dataclass(kind) and not kind.__module__.startswith("toolgrpo.")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "(must be given)" if field.default is dataclasses.MISSING else field.default


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list | tuple):
        return " ".join(map(str, default)) or "none"
    return str(getattr(default, "value", default))


def _value(hint: Any, choices: Sequence[Any] | None) -> str:
    if choices:
        return "|".join(map(str, choices))
    kinds = {typing.get_origin(member) or member for member in (typing.get_args(hint) or (hint,))}
    members = typing.get_args(hint)
    if typing.get_origin(hint) is list or list in kinds:
        return "A B ..."
    for kind, name in ((str, "TEXT"), (float, "X"), (int, "N"), (bool, "true|false")):
        if kind in kinds or (members and any(member is kind for member in members)):
            return name
    return "TEXT"


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("%%", "%")


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("transformers", "trl")}


def table() -> dict[str, Any]:
    """Return what `flags.json` has to hold: each flag once, and what a command has otherwise."""
    from toolgrpo.commands.config_files import known_keys, known_names
    from toolgrpo.commands.early_values import kinds_of
    from toolgrpo.commands.help_page import PAGES

    flags: dict[str, list[Any]] = {}
    kinds: dict[str, list[str]] = {}
    of_keys: dict[str, dict[str, list[str]]] = {}
    commands: dict[str, Any] = {}
    for command, page in PAGES.items():
        on_page = {name for names in page.themes.values() for name in names}
        shown = [flag for flag in flags_of_command(command).values() if flag.ours or flag.name in on_page]
        known = known_names(_classes(command))
        of_keys[command] = kinds_of(known_keys(_classes(command)).values())
        kinds |= {name: kind for name, kind in of_keys[command].items() if name not in kinds}
        records = {flag.name: [flag.value, flag.default, flag.help, flag.ours] for flag in shown}
        commands[command] = {
            "shown": " ".join(records),
            "keys": " ".join(sorted(known.keys)),
            "other_names": " ".join(sorted(known.flags - known.keys)),
            "other_flags": {
                name: record for name, record in records.items() if flags.setdefault(name, record) != record
            },
        }
    for command, own in of_keys.items():
        keys = commands[command]["keys"].split()
        commands[command]["other_kinds"] = {name: own.get(name) for name in keys if own.get(name) != kinds.get(name)}
    return {"versions": _versions(), "flags": flags, "kinds": dict(sorted(kinds.items())), "commands": commands}


def _write() -> None:
    """Write a line for each flag, kind and command."""
    parts = []
    for name, value in table().items():
        lines = [f"  {json.dumps(key)}: {json.dumps(of, ensure_ascii=False)}" for key, of in value.items()]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    FLAGS_FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
