"""Memory of a training pass on a CPU: what it will need, and what the machine has.

The need is arithmetic on a model's sizes; `tests/trainer/test_memory.py` has what was measured beside it. It is meant
for decoders with attention and a gated MLP, whose passes are nearly all of that kind. Not covered: accelerators, and
prompts that become longer than the rows' (environments, agents).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from toolgrpo.errors import ConfigError

_ALWAYS = 2**26  # tiles of the output head, attention, what libraries load at their first use
_LARGE = 2**30  # bytes of activations, from which on memory counts more than a few percent of time
_USABLE = 0.9  # of the free memory: the rest is for rollouts, tools, and what the sum leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The sizes of a model that decide how much memory a training pass takes."""

    layers: int
    width: int
    heads: int  # width of a token's queries, keys and values together
    inner: int  # width of the MLP
    n_trained: int  # weights that are trained
    itemsize: int  # bytes of an activation
    checkpointing: bool

    @classmethod
    def of(cls, model: Any, *, checkpointing: bool) -> Self | None:
        """Return the shape of a model, or None if its config does not have these sizes."""
        config = model.config.get_text_config()
        layers, width, heads, inner = (
            getattr(config, name, None)
            for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
        )
        if not (layers and width and heads and isinstance(inner, int)):
            return None
        if experts := getattr(config, "num_experts_per_tok", None):
            inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        head = getattr(config, "head_dim", None) or width // heads
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            layers=layers,
            width=width,
            heads=head * (heads + 2 * key_value_heads),
            inner=inner,
            n_trained=sum(parameter.numel() for parameter in trained),
            itemsize=max((parameter.element_size() for parameter in trained), default=4),
            checkpointing=checkpointing,
        )

    @property
    def bytes_of_weights(self) -> int:
        """Gradients, and the two averages that Adam keeps, in float32."""
        return 12 * self.n_trained

    @property
    def bytes_per_token(self) -> int:
        """Activations that are kept for the backward pass, and what that works on at a time."""
        layer = 8 * self.width + self.heads + 4 * self.inner
        kept = self.layers * self.width + layer if self.checkpointing else self.layers * layer
        return self.itemsize * (kept + 3 * self.inner)

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes that a pass over these tokens adds, with its gradients and the optimizer's averages."""
        return _ALWAYS + self.bytes_of_weights + tokens * self.bytes_per_token

    def is_large(self, tokens: int) -> bool:
        """Return whether a pass over these tokens fragments the heap by more than its speed is worth."""
        return tokens * self.bytes_per_token >= _LARGE

    def tokens_in(self, n_bytes: float) -> int:
        """Return how many tokens a pass within these bytes may have, 0 if none."""
        return max(0, int(n_bytes - _ALWAYS - self.bytes_of_weights) // self.bytes_per_token)


def most_tokens(
    shape: PassShape,
    *,
    largest: int,
    of_a_row: int,
    free: int,
    given: int | None,
    shares: bool,
    say: Callable[[str], None],
) -> int | None:
    """Return the most tokens of a pass, `given` or what fits into `free` bytes; None where all do. Say why.

    `largest` is the most that a pass can have, and `of_a_row` that of one row, which is never cut. `shares` is whether
    prompts are shared, without which a pass cannot be cut.
    """
    tokens = largest if given is None or not shares else min(largest, max(given, of_a_row))
    kept = "with" if shape.checkpointing else "without"
    line = (
        f"memory    a training pass has at most {tokens:,} tokens in {shape.layers} layers, {kept} gradient checkpointing: "
        f"{_gib(shape.bytes_of(tokens))}, of which {_gib(shape.bytes_of_weights)} for gradients and Adam; "
        f"{_gib(free)} are free"
    )
    if shape.bytes_of(tokens) <= _USABLE * free:
        say(line)
        return given
    if given is not None:
        say(f"{line}: it may not fit; lower --max_tokens_per_pass (now {given:,})")
        return given
    if shape.bytes_of(of_a_row) > _USABLE * free:
        raise ConfigError(
            f"A training pass over one row does not fit into memory: {of_a_row:,} tokens in {shape.layers} layers {kept} "
            f"gradient checkpointing take about {_gib(of_a_row * shape.bytes_per_token + _ALWAYS)}, gradients and Adam of "
            f"{shape.n_trained:,} trained weights {_gib(shape.bytes_of_weights)}, and {_gib(free)} are free; "
            f"{_helpful(shape)}. --max_tokens_per_pass {of_a_row} tries it all the same"
        )
    if not shares:
        say(f"{line}: it may not fit; lower --per_device_train_batch_size, and raise --gradient_accumulation_steps")
        return None
    most = max(of_a_row, shape.tokens_in(_USABLE * free))
    say(
        f"{line}: it is cut into passes of at most {most:,} tokens, {_gib(shape.bytes_of(most))} (--max_tokens_per_pass)"
    )
    return most


def _helpful(shape: PassShape) -> str:
    """Return the flag that saves most."""
    if shape.bytes_of_weights > 2**30:
        return "train an adapter (--use_peft true)"
    if not shape.checkpointing:
        return "keep fewer activations (--gradient_checkpointing true)"
    return "lower --max_completion_length"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def free_bytes() -> int | None:
    """Return the memory that this process can still take, shared among the processes of a run on this machine.

    None where the system does not say. Weights that are mapped from their files count as taken: the system would read
    them again for every pass.
    """
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
        with suppress(OSError, StopIteration, ValueError):  # a container's own limit
            folder = Path("/sys/fs/cgroup")
            used = next(line for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("anon "))
            free = min(free, int((folder / "memory.max").read_text()) - int(used.split()[1]))
        mapped = re.findall(r"^(\w+)-(\w+) .*\.safetensors$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        free -= sum(int(end, 16) - int(start, 16) for start, end in mapped)
        return max(0, free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return None
