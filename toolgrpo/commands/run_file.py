"""Keep what a run was given in `OUTPUT_DIR/run.yaml`, for `--config`, and write the lines that go on with it.

Files and folders stand there whole, so that it can be read from any folder; no defaults; secrets (tokens, keys) are left
out or blanked, and only its owner may read it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from toolgrpo.commands.flags import Flag
from toolgrpo.commands.given import HEAD, RUN_FILE, RUN_ID, Given
from toolgrpo.errors import ConfigError
from toolgrpo.support.plain_text import without_secrets
from toolgrpo.support.settings_files import EXPONENT_IS_NUMBER, BadSettings, read_yaml
from toolgrpo.support.shipped_files import PLUGINS, located
from toolgrpo.support.storage import storage_errors, write_whole

_MAY_BE_PATHS = (
    *("tools_script", "environment", "mcp_config", "reward_fn", "stage_fn", "dataset_id_or_path"),
    *("eval_dataset_id_or_path", "from_run", "model_name_or_path", "output_dir", "agent", "deepspeed"),
)
_OF_FILES = ("gsm8k", "mbpp", "aime")  # data: NAME:PATH
_TEXTS = ("system_prompt",)  # they may speak of keys, and the model reads them as they are
_PER_CALL = ("dry_run", "resume_from_checkpoint")  # of one call of the command, not of the run
LAUNCHED_WITH = "TOOLGRPO_LAUNCHED_WITH"  # a variable of the processes that `--num_processes` and the like start


def run_text(given: Given) -> str:
    """Return the text of the file that keeps these values."""
    from toolgrpo.data.load import EMBEDDED_NAMES
    from toolgrpo.models import NAMED_MODELS  # brings safetensors' weight, which help does not need

    values = dict(given.values)
    # a folder that is called so is not what is meant
    names = (*NAMED_MODELS, *EMBEDDED_NAMES, str(values.get("output_dir")))
    kept = {
        name: _whole(value, () if name == "output_dir" else names) if name in _MAY_BE_PATHS else value
        for name, value in _told(values).items()
        if name not in _PER_CALL and not (value is None and given.flags[name].default is None)
    }
    head = f"{HEAD}; toolgrpo COMMAND --config takes it.\n"
    return head + (yaml.dump(kept, Dumper=_Dumper) if kept else "")


def at_home(given: Given) -> Given:
    """Return the values with `~` in paths as the folder that it is, which no shell has made of `--flag=~/x`."""

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in value]
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value

    values = {name: whole(value) if name in _MAY_BE_PATHS else value for name, value in given.values.items()}
    return replace(given, values=values)


def run_values(text: str) -> Mapping[str, Any]:
    """Return what `run_text` keeps, as reading the file gives it."""
    return yaml.safe_load(text) or {}


def keep_run_config(text: str, output_dir: Path, run: str | None = None) -> None:
    """Write `run_text` into the output folder, with the identity of the run."""
    path = output_dir / RUN_FILE
    with storage_errors(f"the settings of the run ({path})", output_dir):
        write_whole(path, text + (f"{RUN_ID}: {run}\n" if run else ""), mode=0o600)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that `--config` would read as something else, and writes a kind of number as the number."""


_Dumper.add_implicit_resolver(*EXPONENT_IS_NUMBER)
_Dumper.add_multi_representer(float, yaml.SafeDumper.represent_float)


def resume_command(command: str, output_dir: Path) -> str:
    """Return the command line that goes on with a run that was stopped."""
    launcher = os.environ.get(LAUNCHED_WITH)
    start = "accelerate launch -m toolgrpo" if "RANK" in os.environ and launcher is None else "toolgrpo"
    words = f"{command} {launcher}" if launcher else command
    return f"{start} {words} --config {shlex.quote(str(output_dir / RUN_FILE))} --resume_from_checkpoint auto"


def same_command(given: Given, command: str, flags: Mapping[str, Flag], without: Collection[str] = ()) -> str:
    """Return the line that starts another command with what was given, as far as its `flags` take it."""
    words = ["toolgrpo", command] + ([] if given.file is None else ["--config", str(given.file)])
    for name, value in _told(given.values).items():
        taken = name in flags and not flags[name].of_training and name not in without
        unsaid = value is None and given.file is None and name in flags and flags[name].default is None
        if taken and not unsaid and name not in given.places:
            several = value if isinstance(value, list | tuple) else ["none" if value is None else value]
            words += [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in several)]
    return shlex.join(words)


def run_file(model: Path) -> Path | None:
    """Return the file of the run that wrote a model, which may be one of its checkpoints; None: there is none."""
    places = (model, model.parent) if model.name.startswith("checkpoint-") else (model,)
    return next((place / RUN_FILE for place in places if (place / RUN_FILE).is_file()), None)


def read_run(file: Path | None) -> Mapping[str, Any]:
    """Return what a run was given, as far as its file says so."""
    try:
        known = {} if file is None else read_yaml(file)
    except (OSError, BadSettings):
        return {}
    return known if isinstance(known, Mapping) else {}


_HELD_OUT_BY = {"seed": 42, "eval_share": None, "max_rows": None}  # with their defaults


def held_out_otherwise(known: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the flags by which a run held out a share of its rows, if these would hold out others; None: the same ones.

    Both are as `run.yaml` has them. Other data is no share of the same rows.
    """
    if not now.get("eval_share") or known.get("dataset_id_or_path") != now.get("dataset_id_or_path"):
        return None
    if known.get("dataset_split", "train") != now.get("dataset_split", "train"):
        return None
    had, have = ({name: one.get(name, default) for name, default in _HELD_OUT_BY.items()} for one in (known, now))
    if had == have:
        return None
    return " ".join(f"--{name} {'none' if value is None else value}" for name, value in had.items())


def asks_the_same(known: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two runs, as `run.yaml` has them, measure the same held-out rows."""
    asked = ("eval_dataset_id_or_path", "eval_split", "eval_questions", "dataset_id_or_path")
    defaults = {**dict.fromkeys(asked), "dataset_split": "train", **_HELD_OUT_BY}
    return all(known.get(name, default) == now.get(name, default) for name, default in defaults.items())


def config_of_run(folder: Path) -> Path:
    """Return the file of the run whose recording is here, or in the folder above."""
    for place in (folder, folder.parent):
        if (place / RUN_FILE).is_file():
            return place / RUN_FILE
    raise ConfigError(
        f"{folder} has no {RUN_FILE}, which has the settings of its run; give them with --config FILE.yaml"
    )


def lies_in(folder: Path, name: str, spec: str) -> bool:
    """Return whether a word of this setting names something in a folder, or in that of its run."""
    inside = folder.resolve()
    if (inside.parent / RUN_FILE).is_file() and not (inside / RUN_FILE).is_file():
        inside = inside.parent
    words: list[str | None] = [spec, *re.split(r"[\s\0=:\"']+", spec)]
    if name == "tool_functions_module" and (top := spec.partition(".")[0]).isidentifier():
        module = importlib.util.find_spec(top)  # runs nothing
        words = [] if module is None else [module.origin, *(module.submodule_search_locations or ())]
    paths = (located(Path(word).expanduser(), PLUGINS) for word in words if word and "\0" not in word)
    return any(path.exists() and path.resolve().is_relative_to(inside) for path in paths)


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without their secrets; what a path, or a text for the model, looks like is none."""
    told = dict(without_secrets(dict(values)))
    for name in told.keys() & {*_MAY_BE_PATHS, *_TEXTS}:
        given, shown = (value if isinstance(value, list) else [value] for value in (values[name], told[name]))
        parts = [one if name in _TEXTS or _place(one) else blank for one, blank in zip(given, shown, strict=True)]
        told[name] = parts if isinstance(values[name], list) else parts[0]
    return told


def _whole(value: Any, names: Collection[str]) -> Any:
    """Return a path that exists as an absolute one, and anything else as it is; names come before paths."""
    if isinstance(value, list):
        return [_whole(one, names) for one in value]
    place = None if value in names else _place(value)
    if place is None:
        return value
    name, colon, rest = str(value).partition(":")
    return f"{name}:{place.resolve()}" if rest and name in _OF_FILES else f"{place.resolve()}{colon}{rest}"


def _place(value: Any) -> Path | None:
    """Return the file or folder that a value names before its first colon, or behind it, if there is one."""
    name, _, rest = str(value).partition(":")
    path = rest if rest and name in _OF_FILES else name
    try:
        return located(path) if path and located(path).exists() else None
    except OSError:  # a command, too long for a name
        return None
