"""Several data sets as one, for training with many tools and tasks: a YAML file.

    system_prompt: You may call tools.          # for rows that have none; optional, here or per task
    examples:                                   # messages before each row's own; optional, here or per task
      - {role: user, content: Add 1 and 2.}
      - {role: assistant, content: "3"}
    tasks:
      - data: gsm8k:recipes/data/gsm8k_30.jsonl # anything that load_tasks takes, but no other mixture
        name: gsm8k                             # column `task`; default: the data
        weight: 2                               # share of the rows; default 1
        tools: [calculator]                     # column `tools`; default: all
        hidden_tools: [search]                  # column `hidden_tools`: callable, but not in the prompt; default: none
        reward: gsm8k                           # column `reward`: a built-in name or a file, for --reward by_task

Invariants: no row is used twice, so the data set that runs out first (for its weight) bounds the
mixture; the order is drawn from the seed; the same file and seed give the same rows. Paths are
relative to the working folder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from toolgrpo.data.rows import OnBadRow, Row, RowProblem, check_examples, with_opening
from toolgrpo.errors import DataError
from toolgrpo.plain_text import check_nesting

_SUFFIXES = (".yaml", ".yml")


class _Opening(BaseModel):
    """Messages before those of a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system_prompt: str | None = None
    examples: list[dict[str, Any]] = []

    @field_validator("examples")
    @classmethod
    def _checked(cls, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return check_examples(examples)
        except RowProblem as problem:
            raise ValueError(str(problem)) from problem


class Task(_Opening):
    """One part of a mixture."""

    data: str
    name: str | None = None
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    tools: list[str] | None = None
    hidden_tools: list[str] | None = None
    reward: str | None = None


class _MixtureFile(_Opening):
    tasks: list[Task] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A checked mixture file."""

    path: Path
    content: _MixtureFile

    @classmethod
    def from_file(cls, path: Path) -> Mixture:
        try:
            text = path.read_text(encoding="utf-8")
            check_nesting(text)
            read = yaml.safe_load(text)
            content = _MixtureFile.model_validate({} if read is None else read)
        except OSError as error:
            raise DataError(f"the mixture {path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, detail['loc'])) or 'the file'}: {detail['msg']}" for detail in error.errors()
            )
            raise DataError(
                f"the mixture {path} is wrong: {problems}. It must hold `tasks:` with `data:` each"
            ) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
            raise DataError(f"the mixture {path} is not valid YAML: {why}") from error
        for task in content.tasks:
            if is_mixture(task.data):
                raise DataError(f"the mixture {path} names another mixture, {task.data}; put its tasks here")
        return cls(path, content)

    def rows(
        self, load: Callable[..., Iterator[Row]], *, limit: int | None, seed: int, on_bad_row: OnBadRow
    ) -> Iterator[Row]:
        """Yield the rows of all tasks, by their weights, in an order drawn from the seed."""
        tasks = self.content.tasks
        parts = [list(load(task.data, on_bad_row=on_bad_row)) for task in tasks]
        for task, part in zip(tasks, parts, strict=True):
            if not part:
                raise DataError(f"{self.path}: {task.data} has no rows that can be used")
        total = min(len(part) / task.weight for task, part in zip(tasks, parts, strict=True))
        rows = [
            self._with_task(row, task)
            for task, part in zip(tasks, parts, strict=True)
            for row in part[: max(1, int(total * task.weight + 1e-9))]
        ]
        random.Random(seed).shuffle(rows)
        yield from rows[:limit]

    def _with_task(self, row: Row, task: Task) -> Row:
        shared = self.content
        columns: dict[str, Any] = {"task": task.name or task.data}
        for name in ("tools", "hidden_tools", "reward"):
            if any(getattr(other, name) is not None for other in shared.tasks):
                columns[name] = getattr(task, name)
        opening = task.system_prompt or shared.system_prompt, task.examples or shared.examples
        return with_opening({**row, **columns}, *opening)


def is_mixture(spec: str | Path) -> bool:
    return str(spec).lower().endswith(_SUFFIXES)
