"""Tools files and questions for `unseen_tools.py`: the tools that nano was taught, and others of their family.

A tool takes two integers and is one line of Python; a row names the tools that it is offered, so one file holds many sets of
tools. Everything is drawn from a seed.
"""

from __future__ import annotations

import json
import keyword
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.nano.toolsets import CANONICAL, PARAMETERS, SYNONYMS, ToolSpec, is_held_out
from toolgrpo.data.arithmetic import OPERATIONS, arithmetic_rows

__all__ = ["NEW", "Suite", "Tool", "conversations", "in_files", "invented", "questions", "suites", "synonyms", "write"]

Row = dict[str, Any]
OFFERED = 4  # tools a row
OTHER_PARAMETERS = (("p", "q"), ("u", "v"), ("k", "w"), ("one", "other"))  # never shown in any training here


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of two integers; `python` says what it gives, of `left` and `right`."""

    name: str
    python: str
    description: str
    parameters: tuple[str, str]
    swapped: bool = False  # the right one stands first in its signature
    told: tuple[str, str] = ("The first integer.", "The second integer.")  # of its parameters

    @property
    def source(self) -> str:
        left, right = self.parameters
        lines = [f"        {name}: {told}\n" for name, told in zip(self.parameters, self.told, strict=True)]
        signature = (right, left) if self.swapped else (left, right)
        body = self.python.replace("left", "{0}").replace("right", "{1}").format(left, right)
        return (
            f"def {self.name}({signature[0]}: int, {signature[1]}: int) -> int:\n"
            f'    """{self.description}\n\n    Args:\n'
            f"{''.join(reversed(lines) if self.swapped else lines)}"
            f'    """\n    return {body}\n'
        )

    def __call__(self, left: int, right: int) -> int:
        return int(
            eval(self.python, {}, {"left": left, "right": right})
        )  # of this file's own table or of drawn numbers


_PYTHON = {"add": "left + right", "subtract": "left - right", "multiply": "left * right", "divide": "left // right"}
_TOLD = {tool.operation: tool.description for tool in CANONICAL}
_UNHEARD = {"add": "combine", "subtract": "deduct", "multiply": "magnify", "divide": "apportion"}
_NEW = {
    "remainder": "left % right",
    "maximum": "max(left, right)",
    "minimum": "min(left, right)",
    "hypotenuse": "round((left**2 + right**2) ** 0.5)",
    "mean": "(left + right) // 2",
    "distance": "abs(left - right)",
    "perimeter": "2 * (left + right)",
    "concatenation": "left * 1000 + right",
}
NEW = tuple(
    Tool(name, python, f"The {name} of two integers.", OTHER_PARAMETERS[number % len(OTHER_PARAMETERS)])
    for number, (name, python) in enumerate(_NEW.items())
)


def synonyms(seed: int) -> list[Tool]:
    """Return every name that nano's demonstrations have for the four operations, each with parameters of its own."""
    rng = random.Random(f"synonyms {seed}")
    made = [
        Tool(name, _PYTHON[operation], _TOLD[operation], rng.choice(PARAMETERS))
        for operation, names in SYNONYMS.items()
        for name in names
    ]
    return rng.sample(made, len(made))


def invented(n: int, seed: int, *, held_out: bool = False) -> list[Tool]:
    """Return tools under names that mean nothing, and that no other tool could be called in place of.

    A fifth of the names, and all of their parameters' names, are held out: no training here shows them.
    """
    rng = random.Random(f"invented {seed} {held_out}")
    names: dict[str, None] = {}
    while len(names) < n:
        name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
        if (zlib.crc32(name.encode()) % 5 == 0) == held_out and not keyword.iskeyword(name):
            names[name] = None
    return [
        Tool(
            name,
            f"{rng.randint(1, 9)} * left + {rng.randint(1, 9)} * right + {rng.randint(0, 99)}",
            f"The {name} of two integers.",
            rng.choice(OTHER_PARAMETERS if held_out else PARAMETERS),
        )
        for name in names
    ]


def sets_of_names(n: int, seed: str, wanted: Callable[[Sequence[str]], bool]) -> list[list[str]]:
    """Return sets of a name for each operation."""
    rng = random.Random(f"sets {seed}")
    found: list[list[str]] = []
    while len(found) < n:
        names = [rng.choice(SYNONYMS[operation]) for operation in OPERATIONS]
        if wanted(names):
            found.append(names)
    return found


def questions(tools: Sequence[Tool], n: int, seed: str) -> list[Row]:
    """Return questions that name the tools which answer them: one call, or one and then another with its result."""
    rng = random.Random(f"questions {seed}")
    rows: dict[str, Row] = {}
    while len(rows) < n:
        offered = rng.sample(list(tools), min(OFFERED, len(tools)))
        needed = [rng.choice(offered) for _ in range(rng.choice((1, 1, 2)))]
        left, *others = (rng.randint(2, 99) for _ in range(len(needed) + 1))
        value, calls = left, []
        for tool, right in zip(needed, others, strict=True):
            calls.append({"tool": tool.name, "left": value, "right": right})
            value = tool(value, right)
        text = f"the {needed[0].name} of {left} and {others[0]}"
        text = f"What is {text}?" if len(needed) == 1 and rng.random() < 0.5 else f"Find {text}"
        text += "".join(
            f", then the {tool.name} of that and {right}" for tool, right in zip(needed[1:], others[1:], strict=True)
        )
        text = text if text.endswith("?") else f"{text}."
        if 0 <= value <= 999_999:
            rows[text] = {
                "prompt": [{"role": "user", "content": text}],
                "answer": str(value),
                "n_calls": len(needed),
                "success_measure": "arithmetic",
                "tools": [tool.name for tool in offered],
                "calls": calls,
            }
    return list(rows.values())


def conversations(tools: Sequence[Tool], rows: Sequence[Row], schemas: dict[str, Any]) -> list[Row]:
    """Return how each question is answered without a fault, for supervised training; the offered tools in any order."""
    by_name = {tool.name: tool for tool in tools}
    rng = random.Random("order")
    made = []
    for row in rows:
        messages = list(row["prompt"])
        for call in row["calls"]:
            tool = by_name[call["tool"]]
            arguments = dict(zip(tool.parameters, (call["left"], call["right"]), strict=True))
            function = {"name": tool.name, "arguments": arguments}
            messages += [
                {
                    "role": "assistant",
                    "reasoning_content": tool.name,
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "name": tool.name, "content": str(tool(call["left"], call["right"]))},
            ]
        messages.append(
            {"role": "assistant", "reasoning_content": "done", "content": f"The answer is {row['answer']}."}
        )
        made.append(
            {"messages": messages, "tools": [schemas[name] for name in rng.sample(row["tools"], len(row["tools"]))]}
        )
    return made


@dataclass(frozen=True, slots=True)
class Suite:
    """Tools, and the questions that are asked with them."""

    name: str
    about: str
    tools: tuple[Tool, ...]
    rows: tuple[Row, ...]


def _own(spec: ToolSpec) -> Tool:
    """A tool of the embedded job, as its file shows it."""
    (left, of_left), (right, of_right) = spec.parameters
    return Tool(spec.name, _PYTHON[spec.operation], spec.description, (left, right), told=(of_left, of_right))


def suites(n: int) -> list[Suite]:
    """Return what a model is measured on, from the tools it was taught to tools it never saw."""
    arithmetic = arithmetic_rows("heldout", n, seed=0)
    held_out = sets_of_names(n, "held out", is_held_out)
    other = [tool for tool in synonyms(7) if tool.name not in {own.name for own in CANONICAL}]
    own = [_own(spec) for spec in CANONICAL]
    moved = [
        replace(tool, parameters=OTHER_PARAMETERS[number], swapped=True) for number, tool in enumerate(reversed(own))
    ]
    unheard = [replace(tool, name=_UNHEARD[tool.name]) for tool in own]
    asked = [{**row, "success_measure": "arithmetic"} for row in arithmetic]
    sets = [{**row, "tools": names} for row, names in zip(asked, held_out, strict=True)]
    novel = invented(24, 0, held_out=True)
    return [
        Suite("seen", "the tools of the training", tuple(own), tuple(asked)),
        Suite("renamed", "sets of names that no demonstration showed together", tuple(other), tuple(sets)),
        Suite(
            "reordered",
            "its names, tools and parameters in another order, other parameter names",
            tuple(moved),
            tuple(asked),
        ),
        Suite("unheard", "the same operations under words it never read", tuple(unheard), tuple(asked)),
        Suite("new", "other operations, real words", NEW, tuple(questions(NEW, n, "new"))),
        Suite(
            "invented",
            "other operations, words that mean nothing",
            tuple(novel),
            tuple(questions(novel, n, "invented")),
        ),
    ]


def in_files(measured: Sequence[Suite]) -> list[tuple[str, list[Tool], list[Row]]]:
    """Return a name, tools and rows for as few tools files as hold them all: one name has one signature in a file."""
    files: list[tuple[str, dict[str, Tool], list[Row]]] = []
    for suite in measured:
        mine = {tool.name: tool for tool in suite.tools}
        found = next((one for one in files if not mine.keys() & one[1].keys()), None)
        if found is None:
            found = (suite.name, {}, [])
            files.append(found)
        found[1].update(mine)
        found[2].extend({"tools": list(mine), **row, "task": suite.name} for row in suite.rows)
    return [(name, list(tools.values()), rows) for name, tools, rows in files]


def write(folder: Path, name: str, tools: Sequence[Tool], rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write the tools file and the rows, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    plugin, data = folder / f"{name}_tools.py", folder / f"{name}.jsonl"
    exported = ", ".join(tool.name for tool in tools)
    plugin.write_text("\n\n".join([*(tool.source for tool in tools), f"TOOL_FUNCTIONS = [{exported}]\n"]))
    data.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "calls"}) + "\n" for row in rows))
    return plugin, data
