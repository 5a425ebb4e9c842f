"""Choose held-out rows where no file or split of them was given."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolgrpo.data.files import find_files
from toolgrpo.data.sources import FORMATS
from toolgrpo.errors import DataError
from toolgrpo.named_files import located

_GENERATED = ("arithmetic", "chains", "embedded", "reasoning_gym")
_NAMES = ("heldout", "test", "eval", "validation")  # of splits, the first that there is


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The places of the rows to train on and of those to measure on, in their order."""

    train: list[int]
    heldout: list[int]


def hold_out(prompts: Iterable[Any], share: float, seed: int) -> HeldOut:
    """Hold out about this share of the rows, drawn by the seed.

    Rows of one prompt stay together, so no held-out question is trained on.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(json.dumps(prompt, sort_keys=True, default=str), []).append(place)
    if len(places) < 2:
        raise DataError(f"eval_share needs at least two different prompts to hold one out, got {len(places)}")
    questions = list(places.values())
    random.Random(seed).shuffle(questions)
    wanted = max(1, round(share * sum(map(len, questions))))
    heldout: list[int] = []
    for question in questions[:-1]:  # one at least is left to train on
        if len(heldout) >= wanted:
            break
        heldout += question
    held = set(heldout)
    return HeldOut(sorted(place for rows in questions for place in rows if place not in held), sorted(heldout))


def held_out_split(spec: str) -> str:
    """Return the split of a data set that is meant for measuring; `train` is the whole of a single file."""
    name, _, rest = spec.partition(":")
    path = located(spec)
    if spec in _GENERATED or name in _GENERATED:
        return "heldout"
    if name in FORMATS and not path.exists():
        if not rest:
            return next((split for split in _NAMES if split in FORMATS[name].splits), "train")
        path = located(rest)
    if path.is_dir():
        return next((split for split in _NAMES if _has(path, split)), "train")
    return "train" if path.exists() or path.suffix else "test"


def _has(folder: Path, split: str) -> bool:
    try:
        return bool(find_files(folder, split))
    except DataError:
        return False
