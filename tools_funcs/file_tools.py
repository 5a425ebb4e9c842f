"""Reading files of one folder, and nothing outside it.

The folder is named by the environment variable TOOLGRPO_READ_ROOT; without it every call is refused. Links are followed
only as long as they stay inside.
"""

import os
from pathlib import Path

_MAX_BYTES = 1_000_000


def read_file(path: str, first_line: int = 1, lines: int = 200) -> str:
    """Read lines of a text file.

    Args:
        path: Path of the file, relative to the folder of documents.
        first_line: The first line to read, counted from 1.
        lines: How many lines to read, at most 1000.
    """
    if first_line < 1 or not 1 <= lines <= 1000:
        raise ValueError("first_line must be at least 1, and lines between 1 and 1000")
    target = _inside(path)
    if target.is_dir():
        raise ValueError(f"{path} is a folder; it holds: {', '.join(sorted(os.listdir(target))[:100])}")
    if not target.is_file():
        raise ValueError(f"there is no file {path}; list_files shows what there is")
    with target.open("rb") as file:
        content = file.read(_MAX_BYTES)
    try:
        text = content.decode("utf-8", "strict" if len(content) < _MAX_BYTES else "ignore")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None
    wanted = text.splitlines()[first_line - 1 : first_line - 1 + lines]
    return "\n".join(wanted) if wanted else f"[{path} has {len(text.splitlines())} lines]"


def list_files(path: str = ".") -> list[str]:
    """List the files and folders of a folder; folders end with a slash.

    Args:
        path: Path of the folder, relative to the folder of documents.
    """
    target = _inside(path)
    if not target.is_dir():
        raise ValueError(f"there is no folder {path}")
    return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in target.iterdir())[:500]


def _inside(path: str) -> Path:
    root_name = os.environ.get("TOOLGRPO_READ_ROOT")
    if not root_name:
        raise PermissionError("no folder may be read: TOOLGRPO_READ_ROOT is not set")
    root = Path(root_name).resolve()
    if "\0" in path:
        raise ValueError("a path cannot hold a zero character")
    target = (root / path).resolve()
    if not target.is_relative_to(root):
        raise PermissionError(f"{path} is outside the folder that may be read")
    return target


TOOL_FUNCTIONS = [read_file, list_files]
