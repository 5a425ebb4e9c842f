"""The tools that nano's demonstrations are shown with: the four of the embedded job, and many others like them.

A toolset is a list of schemas in the OpenAI form, with the operation that each stands for. Some demonstrations see the
embedded job's own schemas (a test holds them equal to tools_funcs/math_tools.py); most see shuffled schemas under other
names, descriptions and parameter names, drawn at random. Each operation has four possible names, and only the schemas say
which of them there is this time, so they have to be read. Some combinations of names are held out: no demonstration shows
them (`is_held_out`).

Not covered: names that say nothing about what a tool does. They could only be understood by their descriptions.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toolgrpo.data.arithmetic import OPERATIONS, Operation

__all__ = ["CANONICAL", "PARAMETERS", "SYNONYMS", "ToolSpec", "draw_toolset", "is_held_out", "renamed", "reordered"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as a model sees it, and what it does."""

    operation: Operation
    name: str
    description: str
    parameters: tuple[tuple[str, str], tuple[str, str]]  # (name, description), in call order

    @property
    def schema(self) -> dict[str, Any]:
        properties = {name: {"type": "integer", "description": text} for name, text in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }

    def arguments(self, left: int, right: int) -> dict[str, int]:
        (first, _), (second, _) = self.parameters
        return {first: left, second: right}


CANONICAL: tuple[ToolSpec, ...] = (
    ToolSpec("add", "add", "Add two integers.", (("a", "The first integer."), ("b", "The second integer."))),
    ToolSpec(
        "subtract",
        "subtract",
        "Subtract the second integer from the first.",
        (("a", "The integer to subtract from."), ("b", "The integer to subtract.")),
    ),
    ToolSpec(
        "multiply", "multiply", "Multiply two integers.", (("a", "The first integer."), ("b", "The second integer."))
    ),
    ToolSpec(
        "divide",
        "divide",
        "Divide the first integer by the second, with quotient and remainder.",
        (("a", "The integer to divide."), ("b", "The integer to divide by; not 0.")),
    ),
)

SYNONYMS: Mapping[Operation, tuple[str, ...]] = {
    "add": ("add", "plus", "sum", "total"),
    "subtract": ("subtract", "minus", "difference", "reduce"),
    "multiply": ("multiply", "times", "product", "scale"),
    "divide": ("divide", "quotient", "split", "ratio"),
}
"""The names a tool may have; the first is the embedded job's own."""
PARAMETERS: tuple[tuple[str, str], ...] = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n"))

_DESCRIPTIONS: Mapping[Operation, tuple[str, ...]] = {
    "add": ("Add two integers.", "Add two numbers.", "Sum of two integers.", "Add the second integer to the first."),
    "subtract": (
        "Subtract the second integer from the first.",
        "Subtract two numbers.",
        "Difference of two integers.",
        "Subtract two integers.",
    ),
    "multiply": ("Multiply two integers.", "Multiply two numbers.", "Product of two integers."),
    "divide": (
        "Divide the first integer by the second, with quotient and remainder.",
        "Divide two numbers.",
        "Quotient of two integers.",
        "Divide the first integer by the second.",
    ),
}
_PARAMETER_TEXTS = (
    ("The first integer.", "The second integer."),
    ("The first number.", "The second number."),
    ("First.", "Second."),
)


def draw_toolset(rng: random.Random, canonical: float) -> tuple[ToolSpec, ...]:
    """For a demonstration: the embedded job's own tools with probability `canonical`, else others that must be read."""
    if rng.random() < canonical:
        return CANONICAL
    return reordered(rng) if rng.random() < 0.25 else renamed(rng, held_out=False)


def is_held_out(names: Collection[str]) -> bool:
    """Whether demonstrations never show these four names together: a third of the sets without any of the job's own."""
    own = {tool.name for tool in CANONICAL}
    return not own & set(names) and zlib.crc32(" ".join(sorted(names)).encode()) % 3 == 0


def renamed(rng: random.Random, *, held_out: bool) -> tuple[ToolSpec, ...]:
    """The four operations in random order under other names, with random descriptions; either held-out names or not."""
    while True:
        names = {operation: rng.choice(SYNONYMS[operation]) for operation in OPERATIONS}
        if is_held_out(names.values()) == held_out:
            break
    parameters = rng.choice(PARAMETERS)
    tools = []
    for operation in rng.sample(OPERATIONS, len(OPERATIONS)):
        first, second = zip(parameters, rng.choice(_PARAMETER_TEXTS), strict=True)
        tools.append(ToolSpec(operation, names[operation], rng.choice(_DESCRIPTIONS[operation]), (first, second)))
    return tuple(tools)


def reordered(rng: random.Random) -> tuple[ToolSpec, ...]:
    """The embedded job's own tools in another order."""
    return tuple(rng.sample(CANONICAL, len(CANONICAL)))
