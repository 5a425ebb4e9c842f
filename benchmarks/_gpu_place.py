"""What the parts of `gpu_proof.py` have in common: where they run, what they measure, a model of a real shape."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, and between which bounds it must lie, where there is a right answer."""

    what: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_off(self) -> bool:
        """Whether it lies outside of its bounds; what is not a number does."""
        if self.value != self.value:
            return True
        too_much = self.at_most is not None and self.value > self.at_most
        return too_much or (self.at_least is not None and self.value < self.at_least)

    def __str__(self) -> str:
        shown = f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.3g}"
        bounds = [f"at most {self.at_most:g}"] if self.at_most is not None else []
        bounds += [f"at least {self.at_least:g}"] if self.at_least is not None else []
        asked = f" ({', '.join(bounds)}{': IT IS NOT' if self.is_off else ''})" if bounds else ""
        return f"{self.what} {shown}{' ' + self.unit if self.unit else ''}{asked}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where parts run, and whether in small."""

    device: str  # cuda or cpu
    tiny: bool
    known: frozenset[str] = frozenset()  # figures of the part that runs, from a run that was cut short

    @property
    def n_gpus(self) -> int:
        """How many GPUs may be used."""
        if self.device == "cpu":
            return 0
        import torch

        return torch.cuda.device_count()

    @property
    def gpu_gib(self) -> float:
        """Memory of the first GPU; 0 without one."""
        import torch

        return torch.cuda.get_device_properties(0).total_memory / 2**30 if self.n_gpus else 0.0

    def vllm_share(self, gib: float) -> float:
        """The share of the GPU that is so many GiB, for a vLLM beside other work on it; on a CPU it means nothing."""
        return min(0.5, gib / (self.gpu_gib or 80.0))

    def wait(self) -> None:
        """Wait until the GPU has done what it was asked, so that a clock can be read."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the proof. `run` gives each figure as soon as it is measured."""

    about: str
    limit_s: float
    run: Callable[[Place], Iterator[Figure]]
    gpus: int = 0  # that it needs; none: it runs on a CPU as well
    on_cpu: bool = False  # it does, whatever it needs of GPUs
    modules: tuple[str, ...] = ()  # that must be installed

    def missing(self, place: Place) -> str | None:
        """Return what the part needs and the place does not have."""
        absent = [name for name in self.modules if find_spec(name) is None]
        if absent:
            return f"needs {', '.join(absent)}, not installed here"
        if place.n_gpus >= self.gpus or (self.on_cpu and place.device == "cpu"):
            return None
        return "needs a GPU" if self.gpus == 1 else f"needs {self.gpus} GPUs; there is {place.n_gpus or 'none'}"


def seconds_of(place: Place, work: Callable[[], object], rounds: int) -> float:
    """Return the median time of some rounds, after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        place.wait()
        started = time.perf_counter()
        work()
        place.wait()
        taken.append(time.perf_counter() - started)
    return sorted(taken[1:])[rounds // 2]


SHAPES = {  # of Qwen2.5: hidden, intermediate, layers, heads, key-value heads
    "1.5B": (1536, 8960, 28, 12, 2),
    "0.5B": (896, 4864, 24, 14, 2),
    "tiny": (64, 128, 2, 2, 1),
}
VOCABULARY = {"tiny": 1024}  # else that of Qwen2.5


def model_of_shape(place: Place, dtype: torch.dtype, shape: str = "1.5B") -> Any:
    """Return a model of this shape with random weights; in small, one of two layers.

    The last norm is larger than it begins, so that what the model says is as uneven as a trained one's. Angles of
    positions stay in fp32: with those in bf16 the difference to vLLM grew from 0.08 to 0.62 along 4,096 tokens.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = "tiny" if place.tiny else shape
    hidden, intermediate, layers, heads, key_heads = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY.get(shape, 151936),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    with torch.device(place.device):
        model = Qwen2ForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, 2.0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def folder_of_shape(place: Place, folder: str, shape: str) -> str:
    """Save such a model in bf16 with nano's tokenizer, which has a word for each of its ids."""
    import torch
    from transformers import AutoTokenizer

    from toolgrpo.models import NANO

    model = model_of_shape(place, torch.bfloat16, shape)
    torch.nn.init.constant_(model.model.norm.weight, 1.0)  # the sharper, the further apart in bf16: 0.08 with 4.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(NANO)).save_pretrained(folder)
    file = Path(folder) / "tokenizer.json"
    content = json.loads(file.read_text())
    known = max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])) + 1
    content["model"]["vocab"] |= {f"word{number}": number for number in range(known, model.config.vocab_size)}
    file.write_text(json.dumps(content))
    return folder
