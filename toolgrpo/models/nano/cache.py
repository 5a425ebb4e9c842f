"""Where the built nano is kept, and how it gets there without ever being half there.

Invariants:

* A folder named after a recipe's fingerprint is complete: it is built beside its place and moved
  there in one step.
* Two processes that want it at once build it once: the second waits for a lock that dies with its
  holder.
* What a killed build left is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from toolgrpo.errors import ModelError
from toolgrpo.models.nano.recipe import NanoRecipe
from toolgrpo.sft.training_bar import StepProgress

__all__ = ["cache_folder", "ensure_nano", "nano_path"]


def cache_folder() -> Path:
    """Return the user's cache folder for this package (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "toolgrpo"


def nano_path(recipe: NanoRecipe | None = None) -> Path:
    """Return where this recipe's model is, or will be."""
    return cache_folder() / f"nano-{(recipe or NanoRecipe()).fingerprint()}"


def ensure_nano(recipe: NanoRecipe | None = None, *, console: Console | None = None) -> Path:
    """Return the folder of the built model; build it first if this recipe was never built here."""
    recipe = recipe or NanoRecipe()
    path = nano_path(recipe)
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(f".{path.name}.lock")):
            if not path.is_dir():
                _build(recipe, path, console or Console(stderr=True))
    except OSError as error:
        raise ModelError(
            f"nano cannot be built in {path.parent}: {error}. Free some space there, or set XDG_CACHE_HOME to a "
            "folder that can be written."
        ) from error
    return path


def _build(recipe: NanoRecipe, path: Path, console: Console) -> None:
    from toolgrpo.models.nano.build import build_nano

    for left_over in path.parent.glob(f".{path.name}.build-*"):  # the lock is ours: nobody works there
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.build-", dir=path.parent))
    try:
        console.print(
            "building nano, once: teaching a tiny model to call tools (one to two minutes on two idle cores)",
            highlight=False,
        )
        with StepProgress(console, "nano", recipe.steps) as progress:
            build_nano(recipe, folder, progress.step)
        folder.chmod(0o755)
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(f"nano is in {path}", highlight=False, soft_wrap=True)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold an advisory lock of the operating system, which is gone when its holder is."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
