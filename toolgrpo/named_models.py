"""The models that have a name here, on the command line and in Python: `nano` and `smollm2`.

A name wins over a folder and a hub id of the same name, everywhere alike. What builds a model is
imported when it is asked for: it trains one, so it lies above all that merely takes a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["NAMED_MODELS", "folder_of", "missing_folder"]

NAMED_MODELS = {
    "nano": ("toolgrpo.models.nano", "ensure_nano"),
    "smollm2": ("toolgrpo.models.smollm2", "ensure_smollm2"),
}


def folder_of(model: Any, **shown: Any) -> Any:
    """Return the folder of a named model, which is built or unpacked first where it has to be.

    Whatever else is given comes back as it is. `shown` goes to the builder: where it says what it
    does.
    """
    if not isinstance(model, str) or model not in NAMED_MODELS:
        return model
    module, name = NAMED_MODELS[model]
    build: Callable[..., Path] = getattr(import_module(module), name)
    return str(build(**shown))


def missing_folder(model: str) -> str | None:
    """Return what is said of a model that could not be loaded, if it looks like a folder that is not there.

    OWNER/NAME means the hub, unless there is a folder OWNER.
    """
    owner, slash, _ = model.partition("/")
    like_a_path = model.startswith((".", "/", "~", "outputs/")) or model.count("/") > 1
    if Path(model).exists() or not (like_a_path or (slash and Path(owner).is_dir())):
        return None
    return (
        f"there is no folder {model} (the working folder is {Path.cwd()}), and no model of that name could be had from "
        f"the hub"
    )
