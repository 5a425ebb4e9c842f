"""The folder that vLLM reads a model's shape from, the same one for the same config.

vLLM names what it compiles by a hash in which the model's path is. So the folder lies in the user's
cache under a hash of the config: the second start, and each further process, finds what the first
has compiled. Weights are never kept there.

Not covered: a cache that cannot be written, and an engine that reads weights from its folder; these
get a folder that is gone after the start, and compile anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_OF_THE_MOMENT = ("_name_or_path", "transformers_version")


@contextmanager
def config_folder(
    config: PretrainedConfig, weights: Mapping[str, torch.Tensor] | None = None, cache: Path | None = None
) -> Iterator[Path]:
    """Yield a folder with this config in it, and with these weights if there are any."""
    kept = None if weights is not None else _kept_folder(config, cache or _user_cache())
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="toolgrpo-vllm-") as name:
        config.save_pretrained(name)
        if weights is not None:
            contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(contiguous, f"{name}/model.safetensors")
        yield Path(name)


def _kept_folder(config: PretrainedConfig, cache: Path) -> Path | None:
    """Return the folder of this config in the cache, made if it is not there; None if it cannot be."""
    values = {name: value for name, value in config.to_dict().items() if name not in _OF_THE_MOMENT}
    text = json.dumps([type(config).__name__, values], sort_keys=True, default=str)
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]
    if (folder / "config.json").is_file():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
        try:
            config.save_pretrained(made)
            made.rename(folder)  # whole, or not at all
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
    except OSError:
        return None
    return folder if (folder / "config.json").is_file() else None  # another process may have been first


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "toolgrpo" / "vllm_models"
