"""Find markers of a chat format that a model was never trained on, from its weights alone.

A vocabulary has rows that no text ever used, behind the tokenizer's last token. Training pushes all of them the same way,
so they end as one vector. A marker whose row is that vector was never seen: the model can neither read nor write it, and
no training of other weights changes that, because all such rows share one logit. Qwen2.5-Coder's `<tool_call>` is one.

Not covered: models without unused rows, models whose unused rows differ from one another (never trained, or made up for
a test), and weights that are split over processes. Nothing is said of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

_FEWEST_UNUSED = 8
_ALIKE = 0.999  # cosine; 1.0000 where it was seen, and 0.88 to 0.93 for the least trained of the others
_HEADS = ("lm_head.weight", "embed_tokens.weight", "wte.weight")  # the first that there is; tied heads are embeddings


def untrained_rows(rows: torch.Tensor, ids: Iterable[int], n_tokens: int) -> list[int]:
    """Return those of `ids` whose row equals the rows behind the tokenizer's `n_tokens`."""
    if rows.ndim != 2 or len(rows) - n_tokens < _FEWEST_UNUSED:
        return []
    unused = torch.nn.functional.normalize(rows[n_tokens:].float(), dim=-1)
    mean = unused.mean(0)
    if not torch.isfinite(mean).all() or (unused @ mean).min() < _ALIKE * mean.norm():
        return []
    mean = mean / mean.norm()
    return [one for one in ids if torch.nn.functional.normalize(rows[one].float(), dim=-1) @ mean >= _ALIKE]


def output_rows(model: Any) -> torch.Tensor | None:
    """Return the rows of a loaded model's output head, None if it has none that can be read here."""
    rows = getattr(model.get_output_embeddings(), "weight", None)
    return rows.detach() if isinstance(rows, torch.Tensor) and not rows.is_meta else None


def output_rows_in(files: Iterable[Path]) -> torch.Tensor | None:
    """Return the rows of the output head in a model's safetensors files, reading nothing else of them."""
    found: dict[str, tuple[Path, str]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                found |= {ending: (file, name) for ending in _HEADS if name.endswith(ending)}
    where = next((found[ending] for ending in _HEADS if ending in found), None)
    if where is None:
        return None
    with safe_open(where[0], framework="pt") as opened:
        rows: torch.Tensor = opened.get_tensor(where[1])
    return rows


def weight_files(path: str | Path, revision: str | None = None) -> list[Path]:
    """Return the safetensors files that hold the model of this folder or hub id; none if there are none."""
    folder = Path(path)
    if not folder.is_dir():
        wanted = ["model*.safetensors", "model.safetensors.index.json"]
        folder = Path(snapshot_download(str(path), revision=revision, allow_patterns=wanted))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def untrained_line(
    head: Callable[[], torch.Tensor | None],
    markers: Mapping[str, int],
    n_tokens: int,
    *,
    spelled: bool,
    unmarked_calls: str,
) -> str | None:
    """Return the start line about markers that are `spelled`, or untrained and not spelled; None if there are none."""
    rows = head() if markers else None
    untrained = [] if rows is None else untrained_rows(rows, markers.values(), n_tokens)
    names = " and ".join(text for text, one in markers.items() if spelled or one in untrained)
    if not names:
        return None
    if spelled:
        reason = ": this model was never trained on their tokens (their rows equal those of unused ones)"
        return (
            f"markers   {names} are written and read in ordinary pieces, by a server of the saved model too"
            f"{reason if untrained else ''}"
        )
    cure = "--call_markers auto writes them in ordinary pieces"
    if unmarked_calls != "accept":
        cure += ", --unmarked_calls accept runs the calls that it writes without them"
    return (
        f"markers   {names}: this model was never trained on them (their rows equal those of unused tokens), so it can "
        f"neither read nor write them, and LoRA on its layers does not change that; {cure}, and `toolgrpo sft` of all "
        f"weights trains these rows too"
    )
