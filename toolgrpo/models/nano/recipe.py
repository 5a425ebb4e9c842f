"""Everything that decides what nano is, as one value; its fingerprint names the cached model.

The numbers were found by trying: `docs/nano.md` says what they give.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from toolgrpo.data.arithmetic import Operation

__all__ = ["NanoRecipe", "Phase"]

_LIBRARIES = ("torch", "transformers", "tokenizers", "trl")
_SHARED_CODE = (
    "toolgrpo.data.arithmetic",
    "toolgrpo.sft.batches",
    "toolgrpo.sft.loop",
    "toolgrpo.sft.loss",
    "toolgrpo.sft.muon",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some training steps on one kind of demonstration."""

    name: str
    steps: int
    calls: Mapping[int, float]  # weights of questions that need 1, 2 or 3 calls
    canonical: float  # share of toolsets that are the embedded job's own
    spoilt: bool = False  # with the bad habits


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoRecipe:
    """The model's shape, what it is taught, and how."""

    # the model: a Qwen3 of about 0.6 million parameters
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    max_positions: int = 2048
    vocab_size: int = 640

    # what it is taught, in this order
    phases: tuple[Phase, ...] = (
        Phase(name="one call", steps=80, calls={1: 1.0}, canonical=0.2),
        Phase(name="chains", steps=170, calls={1: 0.3, 2: 0.35, 3: 0.35}, canonical=0.3),
        Phase(name="spoil", steps=50, calls={1: 0.4, 2: 0.35, 3: 0.25}, canonical=0.6, spoilt=True),
    )
    guess: Mapping[Operation, float] = field(
        default_factory=lambda: {"add": 0.25, "multiply": 0.25, "subtract": 0.7, "divide": 0.7}
    )
    stop_early: Mapping[Operation, float] = field(
        default_factory=lambda: {"add": 0.25, "multiply": 0.25, "subtract": 0.7, "divide": 0.7}
    )

    # how
    toolsets_per_step: int = 10  # many, or the names are learnt by heart
    examples_per_toolset: int = 3
    learning_rate: float = 0.02  # of the matrices (Muon)
    adam_learning_rate: float = 3e-3  # of embeddings and norms
    warmup_steps: int = 20
    decay: float = 0.4  # share of the steps over which the learning rate falls to 0
    seed: int = 1

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def fingerprint(self) -> str:
        """Hash these numbers, the code that uses them and the library versions that matter."""
        parts = [json.dumps(asdict(self), sort_keys=True)]
        parts += [f"{name}=={importlib.metadata.version(name)}" for name in _LIBRARIES]
        parts += [_source(name) for name in (*_SHARED_CODE, *_nano_code())]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _nano_code() -> tuple[str, ...]:
    return tuple(f"toolgrpo.models.nano.{name}" for name in ("build", "demonstrations", "tokenizer", "toolsets"))


def _source(module: str) -> str:
    """Return the source of a module, without importing it."""
    import importlib.util

    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    return inspect.cleandoc(spec.loader.get_source(module) or "")  # type: ignore[attr-defined]  # a file loader has it
