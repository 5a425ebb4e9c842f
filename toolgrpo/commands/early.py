"""Mistakes that are told before the seconds in which PyTorch is imported, all at once: names, values and files.

Names and values are read as they are read later (`given.py`), with the same sentences. What a run's own arguments say
together is said here alone.

Not covered: files that a command may come to read or not (held-out rows), and those of `replay`, which reads a
recording; what a plugin file holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from toolgrpo.commands.arguments import ScriptArguments, check_reward_given, flags_of, is_missing, own_classes
from toolgrpo.commands.flags import Flag
from toolgrpo.commands.given import read_given
from toolgrpo.commands.other_names import question_iterations
from toolgrpo.commands.run_config import words_of_model
from toolgrpo.errors import ConfigError, DataError, ToolGRPOError
from toolgrpo.folder_claim import claim_folder
from toolgrpo.named_files import located, nearest, no_conversations, no_data_file, no_mcp_config
from toolgrpo.options import batch_of_parts
from toolgrpo.plugin_files import python_file
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import check_weights
from toolgrpo.trainer.checkpoint_files import check_model, check_wanted

_NEEDED = {
    **dict.fromkeys(("train", "check"), ("model_name_or_path", "dataset_id_or_path")),
    **dict.fromkeys(("evaluate", "chat", "gateway"), ("model_name_or_path",)),
}
_DATA_FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow", "neptune"),
    *("swanlab", "tensorboard", "trackio", "wandb"),
)
"""What Transformers knows, beside all and none."""


def early_errors(command: str, argv: Sequence[str]) -> list[ToolGRPOError]:
    """Return an error for each unknown name, each wrong value and each file that is not there."""
    argv = words_of_model(argv) if command == "chat" else argv
    words = argv[1 if "--all" in argv else 2 :] if command == "replay" else argv  # behind DIR and EPISODE
    flags = flags_of(command)
    try:
        given = read_given(flags, words)
    except ToolGRPOError as error:
        return [error]
    errors: list[ToolGRPOError] = [ConfigError(one) for one in given.complaints]
    errors += [ConfigError(is_missing(name, command)) for name in _NEEDED.get(command, ()) if name not in given.values]
    iterations = given.values.get("num_iterations")
    odd = question_iterations(iterations) if isinstance(iterations, int) else None
    errors += [] if odd is None else [ConfigError(odd)]
    if "--json" in words:
        return errors  # a check answers in its report, of files too
    for name, look in _FILES.get(command, {}).items():
        value = given.values.get(name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                errors += _raised(look, one)
    if errors:
        return errors
    for kind in own_classes(command):
        names = {one.name for one in fields(kind)} & given.values.keys()
        errors += _raised(kind, **{name: given.values[name] for name in names})
    if errors:
        return errors
    together = _said_together(command, given.values, flags)
    return [found for look in together for found in _raised(look)]


def _raised(look: Callable[..., Any], *given: Any, **named: Any) -> list[ToolGRPOError]:
    try:
        look(*given, **named)
    except ToolGRPOError as error:
        return [error]
    return []


# What values say together.


def _said_together(command: str, values: Mapping[str, Any], flags: Mapping[str, Flag]) -> Iterator[Callable[[], None]]:
    """Yield the looks at a command's values, of which each single one is right."""
    known = {**{name: flag.default for name, flag in flags.items()}, **values}
    if command in ("train", "check", "evaluate"):
        yield lambda: _rewards(command, values)
    if command in ("train", "check"):
        yield lambda: _batch(known)
    yield lambda: _trackers(known["report_to"])
    if command == "train":
        yield lambda: _held_out(values)
    if command in ("train", "sft"):
        yield lambda: _checkpoint(known)
    folder = Path(known["output_dir"] or "trainer_output")
    writes = command in ("train", "sft", "evaluate") and not known.get("dry_run")
    if writes and folder.is_dir() and os.environ.get("RANK", "0") == "0":
        yield lambda: claim_folder(folder).release()


def _rewards(command: str, values: Mapping[str, Any]) -> None:
    script = ScriptArguments(**{one.name: values[one.name] for one in fields(ScriptArguments) if one.name in values})
    if command == "train":
        check_reward_given(script)
    function, files = script.reward_function_name, script.reward_fn or []
    names = list(script.reward or ())
    for name in names:
        get_reward(name)
    several = len(files) > 1
    names += [
        f"{Path(one).stem}.{function or 'reward_func'}" if several else function or "reward_func" for one in files
    ]
    check_weights(values.get("reward_weights"), names)


def _batch(known: Mapping[str, Any]) -> None:
    """Refuse a batch that groups do not fill, where it follows from the sizes of passes alone."""
    group, at_once = known["num_generations"], known["per_device_train_batch_size"]
    passes = known["gradient_accumulation_steps"] * int(os.environ.get("WORLD_SIZE", "1"))
    if group < 2:
        raise ConfigError(f"num_generations must be at least 2 (GRPO compares the episodes of a group), got {group}")
    if not (known["generation_batch_size"] or known["steps_per_generation"]) and at_once * passes % group:
        raise ConfigError(batch_of_parts(group, at_once, at_once * passes))


def _trackers(report_to: Any) -> None:
    for name in report_to if isinstance(report_to, list) else [report_to or "none"]:
        if name not in (*TRACKERS, "all", "none"):
            raise ConfigError(
                f"report_to {name} is no tracker; there are {', '.join(TRACKERS)}, all and none; the nearest is "
                f"{nearest(str(name), TRACKERS)[0]!r}"
            )


def _held_out(values: Mapping[str, Any]) -> None:
    for name in ("eval_dataset_id_or_path", "eval_split"):
        if values.get(name) and not {"eval_questions", "eval_share"} & values.keys():
            raise ConfigError(
                f"--{name} is given, but no --eval_questions N, so nothing would be measured on it; add it, or 0 to "
                f"measure nothing"
            )


def _checkpoint(known: Mapping[str, Any]) -> None:
    """Refuse to go on from nothing, and to begin anew over the model that is trained."""
    wanted, folder = known["resume_from_checkpoint"], Path(known["output_dir"] or "trainer_output")
    check_wanted(folder, wanted)
    if not wanted and not known.get("dry_run"):
        check_model(folder, str(known["model_name_or_path"]))


# Files, where a value looks like one.


def _python(value: str) -> None:
    path = value.partition(":")[0]
    if path.endswith(".py") and " " not in value.strip():
        python_file(Path(path))


def _mcp(value: str) -> None:
    if value.endswith(".json") and not located(value).exists():
        raise ConfigError(no_mcp_config(Path(value)))


def _rows(value: str, missing: Callable[[Path], str] = no_data_file) -> None:
    path = located(value)
    if ":" not in value and path.suffix.lower() in _DATA_FILES and not path.exists():
        raise DataError(missing(Path(value)))


_PLUGINS = {"tools_script": _python, "environment": _python, "agent": _python, "reward_fn": _python, "mcp_config": _mcp}
_FILES: Mapping[str, Mapping[str, Callable[[str], None]]] = {
    "train": {**_PLUGINS, "dataset_id_or_path": _rows},
    "check": {**_PLUGINS, "dataset_id_or_path": _rows},
    "evaluate": _PLUGINS,
    "chat": _PLUGINS,
    "sft": {**_PLUGINS, "dataset_id_or_path": partial(_rows, missing=no_conversations)},
}
