"""The multi-turn tasks of BFCL v4, read out of the installed package `bfcl-eval`.

200 scenarios, each in four categories: `base`; `long_context` (the APIs say much more than is asked);
`miss_param` (the user leaves something out, and says it when asked); `miss_func` (a function is
missing, and is shown a turn later). Every fourth scenario is held out in all four of them, so that
nothing that is measured was trained on in another dress.

Not covered: BFCL's single-turn, memory and web-search categories.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from toolgrpo.errors import DataError

__all__ = ["CATEGORIES", "FUNCTIONS", "Task", "tasks"]

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
INSTALL = "pip install --no-deps -r recipes/bfcl/requirements.txt"
_HELD_OUT_OF = 4  # every fourth scenario
_TYPES = {"dict": "object", "float": "number"}  # BFCL's names; the others are those of JSON schemas

try:
    import bfcl_eval
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
except ImportError as error:
    raise DataError(
        f"the BFCL recipe needs the package bfcl-eval, with its data, simulated APIs and checker; {error}. Install it: {INSTALL}"
    ) from error

_FOLDER = Path(bfcl_eval.__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation: what the user says turn by turn, in which world, and what would be right."""

    name: str
    category: str
    scenario: int
    questions: tuple[str, ...]  # empty where functions are shown instead
    missing: Mapping[int, tuple[str, ...]]  # turn -> names of the functions that are shown there
    functions: tuple[str, ...]  # those that the prompt shows
    gold: tuple[tuple[str, ...], ...]  # the calls of each turn, as BFCL writes them
    entry: Mapping[str, Any]  # as BFCL has it

    @property
    def held_out(self) -> bool:
        return self.scenario % _HELD_OUT_OF == _HELD_OUT_OF - 1

    @property
    def withheld(self) -> tuple[str, ...]:
        return tuple(name for names in self.missing.values() for name in names)


def _lines(path: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path.name} of the package bfcl-eval cannot be read ({error}); the recipe knows the version in "
            f"recipes/bfcl/requirements.txt: {INSTALL}"
        ) from error


def _schema(described: Any) -> Any:
    """Return a parameter as JSON schema has it, with everything in it."""
    if not isinstance(described, Mapping):
        return described
    schema = {**described, "type": _TYPES.get(described["type"], described["type"])}
    if "properties" in schema:
        schema["properties"] = {name: _schema(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema


def _functions() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the functions of each simulated API, in the OpenAI form."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    classes = {name for category in CATEGORIES for entry in _entries(category) for name in entry["involved_classes"]}
    for name in sorted(classes):
        documents = _lines(_FOLDER / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])
        found[name] = {
            one["name"]: {
                "type": "function",
                "function": {
                    "name": one["name"],
                    "description": one["description"],
                    "parameters": _schema(one["parameters"]),
                },
            }
            for one in documents
        }
    return found


@functools.cache
def _entries(category: str) -> list[Any]:
    return _lines(_FOLDER / f"BFCL_v4_multi_turn_{category}.json")


FUNCTIONS = _functions()


@functools.cache
def tasks() -> Mapping[str, Task]:
    """Return all tasks by name, in BFCL's order."""
    found = {}
    for category in CATEGORIES:
        gold = {
            one["id"]: one["ground_truth"]
            for one in _lines(_FOLDER / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json")
        }
        for entry in _entries(category):
            task = _task(category, entry, gold[entry["id"]])
            found[task.name] = task
    return found


def _task(category: str, entry: Mapping[str, Any], gold: list[list[str]]) -> Task:
    missing = {int(turn): tuple(names) for turn, names in entry.get("missed_function", {}).items()}
    later = {name for names in missing.values() for name in names}
    return Task(
        name=entry["id"],
        category=category,
        scenario=int(entry["id"].rpartition("_")[2]),
        questions=tuple("\n".join(message["content"] for message in turn) for turn in entry["question"]),
        missing=missing,
        functions=tuple(
            name for of_class in entry["involved_classes"] for name in FUNCTIONS[of_class] if name not in later
        ),
        gold=tuple(map(tuple, gold)),
        entry=entry,
    )


def api_class(name: str) -> type[Any]:
    """Return the class of a simulated API."""
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    made: type[Any] = getattr(import_module(CLASS_FILE_PATH_MAPPING[name]), name)
    return made
