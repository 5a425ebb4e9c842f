"""Messages about a missing file: where it was looked for, and which file beside it may be meant.

Said early, before PyTorch is imported, and late, by what reads the file, in the same words.
"""

from __future__ import annotations

from pathlib import Path

from toolgrpo.nearest import nearest

_ALIKE = 0.7  # of the letters of two names


def seen_from_here(path: Path) -> str:
    """Return where a relative path was looked for, and a file of like name that lies there."""
    return f"the working folder is {Path.cwd()}{_meant(path)}"


def no_python_file(path: Path) -> str:
    return f"No such file: {path} ({seen_from_here(path)}). Give the path of a Python file."


def no_data_file(path: Path) -> str:
    return f"the data file {path} does not exist ({seen_from_here(path)})"


def no_mcp_config(path: Path) -> str:
    return f"No such file: {path} ({seen_from_here(path)}). Give the path of an mcp.json."


def no_conversations(path: Path) -> str:
    return (
        f"there is no file {path} ({seen_from_here(path)}); give a .jsonl file of conversations, one "
        f"{{'messages': [...]}} per line"
    )


def _meant(path: Path) -> str:
    try:
        beside = [file.name for file in path.parent.iterdir() if file.suffix == path.suffix and file.is_file()]
    except OSError:
        return ""
    alike = nearest(path.name, beside, alike=_ALIKE)
    return f"; did you mean {path.parent / alike[0]}?" if alike else ""
