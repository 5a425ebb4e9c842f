"""Memory of a training: what it will need of one device, and what the machine has.

The need is arithmetic on a model's sizes, which a model on the meta device has too. `tests/trainer/test_memory.py` has
what was measured of passes on a CPU beside it; nothing was measured on a GPU. It is meant for decoders with attention
and a gated MLP, whose passes are nearly all of that kind. Not covered: weights that several processes share out
(FSDP2, ZeRO), and prompts that become longer than the rows' (environments, agents).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from toolgrpo.engines.base import CacheRoom
from toolgrpo.engines.build import ENGINES, EngineMemory, EngineOptions, MemoryFacts
from toolgrpo.engines.policy import kv_bytes_per_token
from toolgrpo.errors import ConfigError
from toolgrpo.models.adapter_step import may_join

_ALWAYS = 2**26  # tiles of the output head, attention, what libraries load at their first use
_LARGE = 2**30  # bytes of activations, from which on memory counts more than a few percent of time
_USABLE = 0.9  # of the free memory: the rest is for rollouts, tools, and what the sum leaves out
_CLEARLY = 0.75  # of it, for a pass that keeps what it could compute again: nothing is gained at the edge
_OF_A_CARD = 0.98  # of the GB that a card is sold with, in GiB; T4, L4 and A10 leave 0.92
_CUDA = int(0.6 * 2**30)  # context and libraries of this process: estimated
_CPU = torch.device("cpu")
_HEAD_TILE = (4096, 32768)  # tokens and vocabulary of a tile of TRL's output head
_WITH_SCALES = 1.125  # of packed weights: each block of 64 has a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The sizes of a model that decide how much memory a training pass takes."""

    layers: int
    width: int
    heads: int  # width of a token's queries, keys and values together
    inner: int  # width of the MLP
    n_trained: int  # weights that are trained
    bytes_of_weights: int  # gradients, what Adam keeps, and the head's gradient in float32
    itemsize: int  # bytes of an activation
    checkpointing: bool
    residual: int | None = None  # bytes of what goes from layer to layer; None: the same
    copies: int = 0  # bytes of a number in the copies that adapters of more bits make of what they read

    @classmethod
    def of(cls, model: Any, *, checkpointing: bool) -> Self | None:
        """Return the shape of a model that computes in the dtype of its trained weights; None if its config does not
        have these sizes.
        """
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
        out = model.get_output_embeddings().weight
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            layers=layers,
            width=width,
            heads=head * (heads + 2 * key_value_heads),
            inner=inner,
            n_trained=sum(parameter.numel() for parameter in trained),
            bytes_of_weights=3 * sum(map(_n_bytes, trained)) + 4 * out.numel() * out.requires_grad,
            itemsize=max((parameter.element_size() for parameter in trained), default=4),
            checkpointing=checkpointing,
        )

    @property
    def bytes_per_token(self) -> int:
        """Activations that are kept for the backward pass, and what that works on at a time."""
        layer = 8 * self.width + self.heads + 4 * self.inner
        if not self.checkpointing:
            itemsize = max(self.itemsize, self.residual or 0)  # under autocast much is as wide as the weights
            copies = self.layers * self.copies * (3 * self.width + self.inner)
            return copies + itemsize * (self.layers * layer + 3 * self.inner)
        between = self.layers * self.width * (self.residual or self.itemsize)
        return between + self.itemsize * (layer + 3 * self.inner)

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
            f"{_helpful(shape)}. --max_tokens_per_pass {of_a_row} tries it anyway"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The sizes of a run in one process that decide what it takes of its device, in bytes where nothing else is said."""

    n_weights: int
    weights: int  # as the trainer holds them
    gradients: int
    optimizer: int
    reference: int
    head_gradient: int  # of an output head that is trained: it is added up in float32
    casts: int  # copies of trained weights that autocast keeps during a forward pass
    passes: PassShape | None
    vocabulary: int
    rows: int  # of a training pass
    context: int  # tokens of the longest episode, with its prompt
    itemsize: int  # of a number that is computed with
    cached_token: int | None  # keys and values of one; None: attention that keeps something else
    engine: str
    options: EngineOptions
    at_a_time: int  # episodes that the engine may be asked for

    @classmethod
    def of(
        cls, model: Any, config: Any, *, dtype: torch.dtype, engine: str, context: int, at_a_time: int, bits: int = 16
    ) -> Self:
        """Return the sizes of training this model as `config` says, computing in `dtype`; it may be on the meta device.

        `bits` are those of the weights of linear layers, where they are going to be packed.
        """
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        sizes = base.config.get_text_config()
        head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
        weights = sum(map(_n_bytes, model.parameters()))
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for module in base.modules() if bits < 16 else ():
            if isinstance(module, torch.nn.Linear) and module is not head and not module.weight.requires_grad:
                weights -= _n_bytes(module.weight) - int(module.weight.numel() * bits / 8 * _WITH_SCALES)
        passes = PassShape.of(model, checkpointing=config.gradient_checkpointing)
        if passes is not None:
            residual = embedding.weight.element_size()
            widens = passes.itemsize > max(dtype.itemsize, residual) and not may_join(model)
            copies = 2 * passes.itemsize if widens else 0  # with what their dropout makes of them
            passes = replace(passes, itemsize=dtype.itemsize, residual=residual, copies=copies)
        in_float32 = [weight for weight in trained if weight.dim() > 1 and weight.element_size() > dtype.itemsize]
        return cls(
            n_weights=sum(one.numel() for one in base.parameters() if base is model or not one.requires_grad),
            weights=weights,
            gradients=sum(map(_n_bytes, trained)),
            optimizer=sum(_states(weight, str(config.optim).lower()) for weight in trained),
            reference=weights if config.beta and base is model else 0,
            head_gradient=4 * head.weight.numel() if head.weight.requires_grad else 0,
            casts=sum(dtype.itemsize * one.numel() for one in in_float32 if one is not embedding.weight),
            passes=passes,
            vocabulary=sizes.vocab_size,
            rows=config.per_device_train_batch_size,
            context=context,
            itemsize=dtype.itemsize,
            cached_token=kv_bytes_per_token(sizes, dtype),
            engine=engine,
            options=config.engine_options(),
            at_a_time=at_a_time,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The bytes that a run takes of one device, part by part, and what its engine can hold."""

    parts: Mapping[str, int]
    needed: int  # at the most, in a training pass or in a rollout
    fixed: int  # whatever the length of the episodes
    to_come: int  # of it, once the engine has started
    there: int
    cache: CacheRoom | None  # of an engine whose cache has a size from its start on

    @property
    def fits(self) -> bool:
        return self.needed <= self.there

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.parts.items() if size)
        return f"estimated: {self.needed / 2**30:.1f} of {self.there / 2**30:.1f} GiB ({parts})"


def estimate(run: RunShape, device: Device, *, tokens: int | None = None) -> Estimate:
    """Return what a run takes of a device if a pass has so many tokens, or all its rows are long and share no prompt."""
    tokens = run.rows * run.context if tokens is None else tokens
    width, inner = (0, 0) if run.passes is None else (run.passes.width, run.passes.inner)
    tile = 0 if device.is_cpu else min(tokens, _HEAD_TILE[0]) * min(run.vocabulary, _HEAD_TILE[1]) * run.itemsize
    head = tile + run.head_gradient + 4 * tokens * width
    facts = MemoryFacts(
        device=device.n_bytes,
        on_cpu=device.is_cpu,
        copy=min(run.weights, run.n_weights * run.itemsize),  # packed ones stay so
        caches=run.at_a_time * run.context * (run.cached_token or 0),
        a_token=(3 * inner + 2 * width) * run.itemsize,
        scores=12 * run.at_a_time * run.vocabulary,
    )
    engine = ENGINES[run.engine].memory(run.options, facts) if run.engine in ENGINES else EngineMemory()
    parts = {
        "weights": run.weights,
        "reference model": run.reference,
        "gradients": run.gradients,
        "optimizer": run.optimizer,
        "activations": 0 if run.passes is None else tokens * run.passes.bytes_per_token,
        "head": max(head, run.casts),
        "CUDA": 0 if device.is_cpu else _CUDA,
        "the engine's copy": engine.copy,
        engine.name or run.engine: engine.taken,
    }
    a_pass = parts["gradients"] + parts["activations"] + parts["head"]
    kept = sum(parts.values()) - a_pass - engine.taken
    grows = not engine.until_pass and (device.is_cpu or engine.cache is None)  # a GPU's cache is taken at the start
    room = None
    if engine.cache is not None and run.cached_token:
        room = CacheRoom(engine.cache // run.cached_token, run.context, run.at_a_time)
    return Estimate(
        parts=parts,
        needed=kept + (max(a_pass, engine.taken) if engine.until_pass else a_pass + engine.taken),
        fixed=kept + parts["gradients"] + (0 if engine.until_pass else engine.taken),
        to_come=a_pass + parts["optimizer"] + (engine.taken if grows else 0),
        there=device.n_bytes,
        cache=room,
    )


def keeps_activations(
    run: RunShape | None, device: Device, *, tokens: int, free: int | None, n_processes: int, say: Callable[[str], None]
) -> bool:
    """Return whether a pass over so many tokens clearly fits into `free` bytes if it computes nothing again. Say why.

    `free` is what is left beside the model and the engine; of several processes each holds its gradients twice.
    """
    if free is None or run is None or run.passes is None or run.cached_token is None:
        say("memory    with gradient checkpointing: auto cannot say what a pass of this run takes without it")
        return False
    found = estimate(replace(run, passes=replace(run.passes, checkpointing=False)), device, tokens=tokens)
    needed = _ALWAYS + found.to_come + (found.parts["gradients"] if n_processes > 1 else 0)
    fits = needed <= _CLEARLY * free
    say(
        f"memory    {'without' if fits else 'with'} gradient checkpointing: a pass over {tokens:,} tokens that keeps its "
        f"activations adds {_gib(needed)}, and {_gib(free)} are free{': it fits' if fits else ''}"
    )
    return fits


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of a GPU, or of a machine without one."""

    n_bytes: int
    is_cpu: bool = False

    @classmethod
    def named(cls, text: str) -> Self:
        """Return a card by its size: 24GB as it is sold, or 22.5GiB as `nvidia-smi` has it."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
        if found is None:
            raise ConfigError(f"--card is the memory of a GPU, as 24GB or 22.5GiB; got {text!r}")
        return cls(int(float(found[1]) * 2**30 * (_OF_A_CARD if found[2] == "GB" else 1)))

    @classmethod
    def here(cls, device: torch.device) -> Self:
        """Return this device of this machine."""
        if device.type == "cuda":
            return cls(torch.cuda.get_device_properties(device).total_memory)
        return cls(psutil.virtual_memory().total, is_cpu=True)


def _n_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def _states(weight: torch.Tensor, optimizer: str) -> int:
    """Return the bytes that an optimizer of this name keeps for a weight: two averages, unless it is known for less."""
    if "8bit" in optimizer:
        return 2 * weight.numel()
    return 0 if "sgd" in optimizer or "adafactor" in optimizer else 2 * _n_bytes(weight)


def free_bytes(device: torch.device = _CPU) -> int | None:
    """Return the memory that this process can still take, on a machine shared among the processes of a run.

    None where the system does not say. Weights that are mapped from their files count as taken: the system would read
    them again for every pass.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
        free = min([free, *_left_by_groups(Path("/sys/fs/cgroup"))])
        mapped = re.findall(r"^(\w+)-(\w+) .*\.safetensors$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        free -= sum(int(end, 16) - int(start, 16) for start, end in mapped)
        return max(0, free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return None


def _left_by_groups(root: Path, own: str | None = None) -> Iterator[int]:
    """Yield what each control group of this process leaves of its limit: a container's own, a batch system's, a service's.

    `own` is /proc/self/cgroup: a line a hierarchy, `0::PATH` for version 2 and `N:memory:PATH` for version 1.
    """
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text() if own is None else own
    for line in (own or "0::/").splitlines():
        _, kinds, path = line.split(":", 2)
        place = {"": ("", "memory.max", "anon "), "memory": ("memory", "memory.limit_in_bytes", "total_rss ")}
        if kinds not in place:
            continue
        below, limit, counted = place[kinds]
        group = Path(path.lstrip("/"))
        for folder in (root / below / one for one in (group, *group.parents)):
            with suppress(OSError, StopIteration, ValueError):
                stat = (folder / "memory.stat").read_text().splitlines()
                used = int(next(line for line in stat if line.startswith(counted)).split()[1])
                yield int((folder / limit).read_text()) - used
