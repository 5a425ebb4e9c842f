"""Names that a user gives: where files are looked for, the message where there is none, and which known name may be meant.

The working folder comes first. What it lacks is looked for among the shipped files: recipes, launch files,
tools, rewards and pages. A clone has them at its root, an installed package in `toolgrpo/shipped/`. Of some
kinds the bare name is enough: `--config nano`, `--tools_script calculator`, `--accelerate_config zero3`.

The messages are the same early, before PyTorch is imported, and late, where the file is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

CONFIGS = ("recipes/configs/{}.yaml",)
LAUNCH_FILES = ("recipes/accelerate/{}.yaml",)
PLUGINS = ("tools_funcs/{}.py", "tools_funcs/{}_tools.py", "rewards/{}.py")
TROUBLESHOOTING = "docs/how-to/troubleshooting.md"

_ALIKE = 0.7  # of the letters of two names
_LONGEST = 100  # characters of a name that are compared; what is longer is none


def nearest(name: str, known: Iterable[str], n: int = 1, *, alike: float = 0.0) -> list[str]:
    """Return up to `n` of the known names, the nearest first.

    `alike`, from 0 to 1, is what they must share at least.
    """
    return difflib.get_close_matches(name[:_LONGEST], list(known), n=n, cutoff=alike)


def nearest_is(name: str, known: Iterable[str]) -> str:
    """Return a clause that names the known name which is likely meant; an empty text if none is alike."""
    near = nearest(name, known, alike=_ALIKE)
    return f"; the nearest is {near[0]!r}" if near else ""


def shipped_root() -> Path:
    """Return the folder of the files that come with the package."""
    packed = Path(__file__).parents[1] / "shipped"
    return packed if packed.is_dir() else Path(__file__).parents[2]


def page_here(section: str = "", page: str = TROUBLESHOOTING) -> str:
    """Return the path of a page, and a section of it, relative to the working folder where possible."""
    path = shipped_root() / page
    shown = page if path == Path.cwd() / page else str(path)
    return f"{shown}#{section}" if section else shown


def located(path: str | Path, by_name: tuple[str, ...] = ()) -> Path:
    """Return the path, or the shipped file that it names where there is no such file.

    `by_name` has the places of files that their bare name stands for, the user's before the shipped ones.
    """
    path = Path(path)
    if path.is_absolute() or path.exists():
        return path
    bare = path.name if len(path.parts) == 1 else ""
    places = (path, *(Path(pattern.format(bare)) for pattern in by_name if bare))
    found = (whole for folder in (Path(), shipped_root()) for place in places if (whole := folder / place).exists())
    return next(found, path)


def shipped_names(by_name: tuple[str, ...]) -> list[str]:
    """Return the bare names that stand for shipped files."""
    ends = {pattern: pattern.rpartition("{}")[2] for pattern in by_name}
    found = {
        file.name.removesuffix(end)
        for pattern, end in ends.items()
        for file in shipped_root().glob(pattern.format("*"))
    }
    return sorted(name for name in found if name + "_tools" not in found)


def seen_from_here(path: Path) -> str:
    """Return where a relative path was looked for, and a file of like name that lies there."""
    return f"the working folder is {Path.cwd()}{_meant(path)}"


def no_python_file(path: Path) -> str:
    names = f", or a name: {', '.join(shipped_names(PLUGINS))}" if path.suffix == "" else ""
    return f"No such file: {path} ({seen_from_here(path)}). Give the path of a Python file{names}."


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
