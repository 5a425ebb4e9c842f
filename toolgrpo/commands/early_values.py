"""Mistakes that are told before the seconds in which PyTorch is imported, all at once: names, values and files.

Names and values are read as they are read later (`given.py`), with the same sentences.

Not covered: files that a command may come to read or not (held-out rows), and those of `replay`, which reads a
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolgrpo.commands.arguments import flags_of, is_missing
from toolgrpo.commands.given import read_given
from toolgrpo.commands.other_names import question_iterations
from toolgrpo.errors import ConfigError, DataError, ToolGRPOError
from toolgrpo.missing_files import no_conversations, no_data_file, no_mcp_config
from toolgrpo.plugin_files import python_file

_NEEDED = dict.fromkeys(("train", "check"), ("model_name_or_path", "dataset_id_or_path"))
_DATA_FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")


def early_errors(command: str, argv: Sequence[str]) -> list[ToolGRPOError]:
    """Return an error for each unknown name, each value of the wrong type and each file that is not there."""
    words = argv[2:] if command == "replay" else argv  # behind DIR and EPISODE
    try:
        given = read_given(flags_of(command), words)
    except ToolGRPOError as error:
        return [error]
    errors: list[ToolGRPOError] = [ConfigError(one) for one in given.complaints]
    errors += [ConfigError(is_missing(name)) for name in _NEEDED.get(command, ()) if name not in given.values]
    iterations = given.values.get("num_iterations")
    odd = question_iterations(iterations) if isinstance(iterations, int) else None
    errors += [] if odd is None else [ConfigError(odd)]
    if "--json" in words:
        return errors  # a check answers in its report, of files too
    for name, look in _FILES.get(command, {}).items():
        value = given.values.get(name)
        for one in value if isinstance(value, list) else [value]:
            try:
                if isinstance(one, str):
                    look(one)
            except ToolGRPOError as error:
                errors.append(error)
    return errors


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
