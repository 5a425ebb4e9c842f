"""Everything that decides what nano is, as one value.

The numbers were found by trying: `docs/background/nano.md` says what they give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from toolgrpo.data.arithmetic import Operation

__all__ = ["HYBRID", "MINI", "NanoRecipe", "Phase"]


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

    # the model: a Qwen3 of about 0.6 million parameters, or a Qwen3.5 where kinds of layers are given
    layer_types: tuple[str, ...] = ()
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


_LONGER = {"chains": 650}
HYBRID = replace(
    NanoRecipe(),
    layers=4,
    layer_types=(*["linear_attention"] * 3, "full_attention"),
    phases=tuple(replace(phase, steps=_LONGER.get(phase.name, phase.steps)) for phase in NanoRecipe().phases),
)
"""The same lessons for a model of Qwen3.5's shape, three layers of Gated DeltaNet, then one of full attention: more chains,
or it takes one operation for another in the second call, which no reward mends in some hundred steps.
"""

MINI = NanoRecipe(
    hidden_size=64,
    intermediate_size=128,
    layers=1,
    heads=2,
    kv_heads=1,
    phases=(Phase(name="mini", steps=1, calls={1: 1.0}, canonical=1.0),),
    toolsets_per_step=1,
    examples_per_toolset=2,
)
"""A model that is built in a second, for tests: its tokenizer and chat format are nano's, and it can do nothing."""
