"""`OUTPUT_DIR/run.yaml`: what a run was given, as one file that `--config` takes.

Files and folders stand there whole, so that it can be read from any folder. Nothing in it is a
default; secrets (tokens, keys) are left out or blanked, and only its owner may read it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from toolgrpo.commands.arguments import flags_of
from toolgrpo.commands.given import RUN_FILE as NAME
from toolgrpo.commands.given import RUN_ID, read_given
from toolgrpo.errors import ConfigError
from toolgrpo.named_files import located
from toolgrpo.plain_text import without_secrets
from toolgrpo.settings_files import EXPONENT_IS_NUMBER
from toolgrpo.storage import storage_errors, write_whole

_MAY_BE_PATHS = (
    *("tools_script", "environment", "mcp_config", "reward_fn", "dataset_id_or_path", "eval_dataset_id_or_path"),
    *("model_name_or_path", "output_dir"),
)
_TEXTS = ("system_prompt",)  # they may speak of keys, and the model reads them as they are
_PER_CALL = ("dry_run", "resume_from_checkpoint")  # of one call of the command, not of the run


def run_text(argv: Sequence[str], command: str = "train") -> str:
    """Return what the command was given, as the text of its file."""
    flags = flags_of(command)
    given = read_given(flags, argv).values
    kept = {
        name: _whole(value) if name in _MAY_BE_PATHS else value
        for name, value in {**without_secrets(given), **{name: given[name] for name in _TEXTS if name in given}}.items()
        if name not in _PER_CALL and not (value is None and flags[name].default is None)
    }
    head = "# What this run was given; toolgrpo COMMAND --config takes it.\n"
    return head + (yaml.dump(kept, Dumper=_Dumper) if kept else "")


def keep_run_config(text: str, output_dir: Path, run: str | None = None) -> None:
    """Write `run_text` into the output folder, with the identity of the run."""
    path = output_dir / NAME
    with storage_errors(f"what the run was given ({path})", output_dir):
        write_whole(path, text + (f"{RUN_ID}: {run}\n" if run else ""), mode=0o600)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that `--config` would read as something else, and writes a kind of number as the number."""


_Dumper.add_implicit_resolver(*EXPONENT_IS_NUMBER)
_Dumper.add_multi_representer(float, yaml.SafeDumper.represent_float)


def resume_command(command: str, output_dir: Path) -> str:
    """Return the command line that goes on with a run that was stopped."""
    start = "accelerate launch -m toolgrpo" if "RANK" in os.environ else "toolgrpo"
    return f"{start} {command} --config {shlex.quote(str(output_dir / NAME))} --resume_from_checkpoint auto"


def config_of_run(folder: Path) -> Path:
    """Return the file of the run whose recording lies here, or in the folder above."""
    for place in (folder, folder.parent):
        if (place / NAME).is_file():
            return place / NAME
    raise ConfigError(f"{folder} has no {NAME}, which says what its run was given; give that with --config FILE.yaml")


def as_flags(command: str, argv: Sequence[str]) -> list[str]:
    """Return the words of a command with flags alone: those that stand at its begin without one get theirs."""
    return _POSITIONAL.get(command, list)(argv)


def _words_of_rows(argv: Sequence[str]) -> list[str]:
    if not argv or (argv[0].startswith("-") and "--dataset_id_or_path" not in argv):
        raise ConfigError(
            "say which rows: toolgrpo data FILE --show 3 (a file, a hub id, or a task set such as arithmetic)"
        )
    return list(argv) if argv[0].startswith("-") else ["--dataset_id_or_path", *argv]


def _words_of_episode(argv: Sequence[str]) -> list[str]:
    takes_all = "--all" in argv
    if not argv or argv[0].startswith("-") or not (takes_all or (len(argv) > 1 and argv[1].isdecimal())):
        raise ConfigError(
            "give the run's output folder and the number of an episode: toolgrpo replay DIR EPISODE (or --all)"
        )
    return ["--folder", argv[0], "--episode", *(["-1", *argv[1:]] if takes_all else argv[1:])]


def _words_of_model(argv: Sequence[str]) -> list[str]:
    """Return MODEL as a flag, over what the run of that folder was given."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    name, *flags = argv
    of_run = Path(name) / NAME
    given = any(flag == "--config" or flag.startswith("--config=") for flag in flags)
    return [
        *(["--config", str(of_run)] if of_run.is_file() and not given else []),
        "--model_name_or_path",
        name,
        *flags,
    ]


_POSITIONAL = {"chat": _words_of_model, "data": _words_of_rows, "replay": _words_of_episode}


def _whole(value: Any) -> Any:
    """Return a path that exists as an absolute one, and anything else as it is."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    path, colon, rest = str(value).partition(":")
    if not path or not located(path).exists():
        return value
    return f"{located(path).resolve()}{colon}{rest}"
