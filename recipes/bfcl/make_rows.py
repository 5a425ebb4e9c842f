"""Write the rows of BFCL v4's multi-turn tasks: 600 to train on and 200 held out, from the installed package.

python recipes/bfcl/make_rows.py outputs/bfcl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolgrpo.errors import ToolGRPOError

try:
    from bfcl_tasks import Task, tasks
except ToolGRPOError as error:  # the package is not installed
    sys.exit(str(error))


def row(task: Task) -> dict[str, Any]:
    """Return a task as a row: what is asked first, and what the environment is told."""
    return {
        "prompt": task.questions[0],
        "task": task.category,
        "tools": list(task.functions),
        "hidden_tools": list(task.withheld),
        "bfcl": task.name,
    }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("heldout", True)):
        n = write(folder / f"{name}.jsonl", (row(task) for task in tasks().values() if task.held_out is held_out))
        print(f"{folder / f'{name}.jsonl'}: {n} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/bfcl"))
