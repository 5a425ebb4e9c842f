"""The tools that nano's demonstrations are shown with: the four of the embedded job, and many others like them.

A toolset is a list of schemas in the OpenAI form, with the operation that each stands for. Half of the demonstrations see
the embedded job's own schemas (a test holds them equal to tools_funcs/math_tools.py); the others see shuffled schemas
under other names, descriptions and parameter names, drawn at random. There a name says nothing about what a tool does; it
would have to be read in the description, which nano does not learn in its minute (docs/nano.md has the figures).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.data.arithmetic import OPERATIONS, Operation

__all__ = ["CANONICAL", "NAMES", "PARAMETERS", "ToolSpec", "draw_toolset", "renamed", "reordered"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as a model sees it, and what it does."""

    operation: Operation
    name: str
    description: str
    parameters: tuple[tuple[str, str], tuple[str, str]]  # (name, description), in call order
    returns: str = "integer"

    @property
    def schema(self) -> dict[str, Any]:
        properties = {name: {"type": "integer", "description": text} for name, text in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
                "return": {"type": self.returns},
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
        returns="string",
    ),
)

NAMES: tuple[str, ...] = (
    "calc", "compute", "apply", "run", "tool", "op", "combine", "join", "alpha", "beta", "gamma", "delta", "red", "green",
    "blue", "north", "south", "east", "west", "solve", "work", "find", "get", "make", "do", "sum", "plus", "minus", "times",
    "product", "difference", "quotient", *OPERATIONS,
)  # fmt: skip
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
    """The embedded job's own tools with probability `canonical`, else others that must be read to be used."""
    if rng.random() < canonical:
        return CANONICAL
    if rng.random() < 0.25:
        return reordered(rng)
    names = rng.sample(NAMES, len(OPERATIONS))
    return renamed(names, rng)


def renamed(names: Sequence[str], rng: random.Random) -> tuple[ToolSpec, ...]:
    """The four operations in random order under these names, with random descriptions."""
    parameters = rng.choice(PARAMETERS)
    operations = rng.sample(OPERATIONS, len(OPERATIONS))
    tools = []
    for operation, name in zip(operations, names, strict=True):
        texts = rng.choice(_PARAMETER_TEXTS)
        described = tuple(zip(parameters, texts, strict=True))
        tools.append(ToolSpec(operation, name, rng.choice(_DESCRIPTIONS[operation]), (described[0], described[1])))
    return tuple(tools)


def reordered(rng: random.Random) -> tuple[ToolSpec, ...]:
    """The embedded job's own tools in another order."""
    return tuple(rng.sample(CANONICAL, len(CANONICAL)))
