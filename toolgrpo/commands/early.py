"""Mistakes that are told before the seconds in which PyTorch is imported, all at once: names, values and files.

Everything is read by what reads it later, with the same sentences: names and values (`given.py`), rows, models, the
output folder, a port. Plugin files are compiled, and nothing of them runs. What a run's own arguments say together is
said here alone. A value of a YAML file is named with its line.

Not covered: rows behind the first `_ROWS`, those of the hub and of reasoning_gym, conversations of a mixture; what a
plugin file exports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from toolgrpo.commands.arguments import (
    DEFAULT_QUESTIONS,
    ScriptArguments,
    check_folder,
    check_reward_given,
    flags_of,
    is_missing,
    own_classes,
)
from toolgrpo.commands.flags import Flag
from toolgrpo.commands.given import read_given
from toolgrpo.commands.other_names import question_iterations
from toolgrpo.commands.run_config import as_flags
from toolgrpo.data.rows import raise_bad_row
from toolgrpo.errors import ConfigError, DataError, ToolGRPOError
from toolgrpo.folder_claim import claim_folder
from toolgrpo.models import check_model
from toolgrpo.named_files import located, nearest, no_conversations, no_data_file
from toolgrpo.options import batch_of_parts
from toolgrpo.plugin_files import check_python
from toolgrpo.rewards import OF_TRL, check_weights, get_reward
from toolgrpo.trainer.checkpoint_files import check_model_is_elsewhere, check_wanted

_NEEDED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("train", "check", "evaluate"), ("model_name_or_path", "dataset_id_or_path")),
    **dict.fromkeys(("chat", "gateway"), ("model_name_or_path",)),
    "sft": ("model_name_or_path", "dataset_id_or_path", "output_dir"),
}
_ROWS = 10_000  # that are looked at: half a second
_DATA_FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow", "neptune"),
    *("swanlab", "tensorboard", "trackio", "wandb"),
)
"""What Transformers knows, beside all and none."""


def early_errors(command: str, argv: Sequence[str]) -> list[ToolGRPOError]:
    """Return an error for each unknown name, each wrong value and each file that is not there."""
    flags = flags_of(command)
    try:
        words = as_flags(command, argv)
        given = read_given(flags, words)
    except ToolGRPOError as error:
        return [error]
    errors: list[ToolGRPOError] = [ConfigError(one) for one in given.complaints]
    has = {name for name, value in given.values.items() if value}
    if command == "evaluate" and "eval_dataset_id_or_path" in has:
        has.add("dataset_id_or_path")
    errors += [ConfigError(is_missing(name, command)) for name in _NEEDED.get(command, ()) if name not in has]
    iterations = given.values.get("num_iterations")
    odd = question_iterations(iterations) if isinstance(iterations, int) else None
    errors += [] if odd is None else [ConfigError(odd)]
    if "--json" in words:
        return errors  # a check answers in its report, of files too
    for name, look in _FILES.get(command, {}).items():
        value = given.values.get(name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and one.strip():
                errors += _raised(look, one, place=given.places.get(name))
    if not errors:
        for kind in own_classes(command):
            names = {one.name for one in fields(kind)} & given.values.keys()
            errors += _raised(kind, **{name: given.values[name] for name in names})
    if not errors:
        together = _said_together(command, given.values, flags)
        errors += [found for look in together for found in _raised(look)]
    return [given.placed(error) for error in errors]


def _raised(look: Callable[..., Any], *given: Any, place: str | None = None, **named: Any) -> list[ToolGRPOError]:
    try:
        look(*given, **named)
    except ToolGRPOError as error:
        return [error if place is None else type(error)(f"{place}: {error}")]
    return []


# What values say together.


def _said_together(command: str, values: Mapping[str, Any], flags: Mapping[str, Flag]) -> Iterator[Callable[[], None]]:
    """Yield the looks at a command's values, of which each single one is right."""
    known = {**{name: flag.default for name, flag in flags.items()}, **values}
    if command in ("train", "check", "evaluate"):
        yield lambda: _rewards(command, values)
    if command in ("train", "check", "evaluate", "data"):
        for source in _sources(command, values):
            yield partial(_rows, *source, skips=bool(values.get("skip_bad_rows")), rewards=values.get("reward") or ())
    if command == "sft":
        yield lambda: _conversations(known)
    if command == "gateway":
        yield lambda: _port(known["host"], known["port"])
    if command in ("train", "check"):
        yield lambda: _batch(known)
    yield lambda: _trackers(known.get("report_to"))
    if command == "train":
        yield lambda: _held_out(values)
    if command in ("train", "sft"):
        yield lambda: _checkpoint(known)
    if command in ("train", "sft", "evaluate") and os.environ.get("RANK", "0") == "0":
        yield lambda: _folder(known)


def _folder(known: Mapping[str, Any]) -> None:
    folder = Path(known["output_dir"] or "trainer_output")
    check_folder(str(folder))
    if folder.is_dir() and not known.get("dry_run"):
        claim_folder(folder).release()


def _rewards(command: str, values: Mapping[str, Any]) -> None:
    script = ScriptArguments(**{one.name: values[one.name] for one in fields(ScriptArguments) if one.name in values})
    if command == "train":
        check_reward_given(script)
    function, files = script.reward_function_name, script.reward_fn or []
    names = list(script.reward or ())
    for name in names:
        if _is_ours(name):
            get_reward(name)
    several = len(files) > 1
    names += [
        f"{Path(one).stem}.{function or 'reward_func'}" if several else function or "reward_func" for one in files
    ]
    check_weights(values.get("reward_weights"), names)


def _is_ours(reward: str) -> bool:
    """Return whether looking a reward up imports nothing: it is neither TRL's nor of another package."""
    return reward not in OF_TRL and "." not in reward


def _sources(command: str, values: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return data, split and number of the rows that a command reads."""
    script = ScriptArguments(**{one.name: values[one.name] for one in fields(ScriptArguments) if one.name in values})
    questions = script.eval_questions or (DEFAULT_QUESTIONS if command == "evaluate" else 0)
    found = []
    if command != "evaluate" or script.eval_share:
        found.append((str(script.dataset_id_or_path), script.dataset_split, script.max_rows or _ROWS))
    if command in ("train", "evaluate") and questions and not script.eval_share:
        found.append((*script.heldout_source(), questions))
    return found


def _rows(spec: str, split: str, limit: int, *, skips: bool, rewards: Sequence[str]) -> None:
    """Read rows as they are read later, and see whether built-in rewards get their columns."""
    from toolgrpo.data.load import Mixture, hub_place, is_mixture, task_rows  # not for help and a wrong flag

    parts = [task.data for task in Mixture.from_file(located(spec)).tasks] if is_mixture(spec) else [spec]
    on_bad_row: Callable[[DataError], None] = (lambda error: None) if skips else raise_bad_row
    for part in parts:
        if part.startswith("reasoning_gym:") or hub_place(part, split) is not None:
            continue
        rows = task_rows(part, split=split, limit=min(limit, _ROWS), on_bad_row=on_bad_row)
        columns, n = set[str](), 0
        for row in rows:
            columns |= row.keys()
            n += 1
        if not n:
            raise DataError(f"{part} [{split}] has no rows that can be used")
        if n < _ROWS and not is_mixture(spec):  # else others may have more columns
            for name in filter(_is_ours, rewards):
                if name != "by_task":
                    get_reward(name).check_columns(columns)


def _conversations(known: Mapping[str, Any]) -> None:
    from toolgrpo.data.load import hub_place, is_mixture
    from toolgrpo.sft.encoder import read_conversations

    spec, split = str(known["dataset_id_or_path"]), known["dataset_split"]
    if not is_mixture(spec) and hub_place(spec, split) is None:
        read_conversations(spec, split, _ROWS)


def _port(host: str, port: int) -> None:
    from toolgrpo.gateway.server import listening

    listening(host, port).close()


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
        check_model_is_elsewhere(folder, str(known["model_name_or_path"]))


# Files, where a value looks like one.


def _python(value: str) -> None:
    path = value.partition(":")[0]
    if path.endswith(".py") and " " not in value.strip():
        check_python(Path(path))


def _mcp(value: str) -> None:
    if value.endswith(".json"):
        from toolgrpo.tools.mcp.config_file import read_mcp_config  # imports pydantic

        read_mcp_config(value)


def _data(value: str, missing: Callable[[Path], str] = no_data_file) -> None:
    path = located(value)
    if ":" not in value and path.suffix.lower() in _DATA_FILES and not path.exists():
        raise DataError(missing(Path(value)))


def _recording(value: str) -> None:
    from toolgrpo.commands.show import recording_in

    recording_in(Path(value))


_PLUGINS: Mapping[str, Callable[[str], None]] = {
    **dict.fromkeys(("tools_script", "environment", "agent", "reward_fn"), _python),
    "mcp_config": _mcp,
    "model_name_or_path": check_model,
}
_FILES: Mapping[str, Mapping[str, Callable[[str], None]]] = {
    "train": {**_PLUGINS, "dataset_id_or_path": _data},
    "check": {**_PLUGINS, "dataset_id_or_path": _data},
    "evaluate": {**_PLUGINS, "baseline": partial(check_model, flag="baseline")},
    "chat": _PLUGINS,
    "gateway": {"model_name_or_path": check_model},
    "data": {**_PLUGINS, "dataset_id_or_path": _data},
    "replay": {**_PLUGINS, "folder": _recording, "with_model": partial(check_model, flag="with_model")},
    "sft": {**_PLUGINS, "dataset_id_or_path": partial(_data, missing=no_conversations)},
}
