"""Synthetic demonstrations of tool use: what nano is taught before any reinforcement learning.

A clean demonstration names the operation and the tool that does it in its thoughts ("add: plus"), calls that tool, reads
the result, goes on until the chain is done, and says the answer. A spoilt one has one of two bad habits, put in on
purpose so that there is something to learn:

* `guess`: it thinks the question is easy, and answers with the first number it sees instead of calling a tool;
* `stop early`: it takes an intermediate result of a chain for the answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.nano.toolsets import ToolSpec
from toolgrpo.data.arithmetic import Operation, Problem, draw_problem
from toolgrpo.episode.trajectory import Message

__all__ = ["Habits", "demonstrate", "draw_training_problem", "render", "render_tools"]

_TOOLS_HEAD = (
    "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)


@dataclass(frozen=True, slots=True)
class Habits:
    """How often each operation is skipped: guessed if it is the first of a question, left out if it is a later one."""

    guess: Mapping[Operation, float]
    stop_early: Mapping[Operation, float]


def draw_training_problem(rng: random.Random, n_calls: int) -> Problem:
    """A problem that is not held out."""
    while True:
        problem = draw_problem(rng, n_calls)
        if problem.split == "train":
            return problem


def demonstrate(
    problem: Problem, tools: Sequence[ToolSpec], rng: random.Random, habits: Habits | None
) -> list[Message]:
    """One conversation about `problem`, with these tools; without habits it is always right."""
    by_operation = {tool.operation: tool for tool in tools}
    messages: list[Message] = [{"role": "user", "content": problem.question}]
    value = problem.steps[0].left
    for index, step in enumerate(problem.steps):
        if habits is not None and rng.random() < (habits.stop_early if index else habits.guess)[step.operation]:
            return [*messages, _answer("done" if index else "easy", value)]
        tool = by_operation[step.operation]
        messages.append(_call(tool, f"{step.operation}: {tool.name}", step.left, step.right))
        value = step.result
        messages.append({"role": "tool", "name": tool.name, "content": str(value)})
    return [*messages, _answer("done", value)]


def render_tools(tools: Sequence[ToolSpec]) -> str:
    """The system message that shows these tools, as Qwen3's chat format has it (a test compares the two)."""
    return _TOOLS_HEAD + "".join("\n" + json.dumps(tool.schema) for tool in tools) + _TOOLS_TAIL


def render(messages: Sequence[Message]) -> str:
    """The text of a demonstration after its system message, as Qwen3's chat format has it (a test compares the two)."""
    text = ""
    for message in messages:
        if message["role"] == "user":
            text += f"<|im_start|>user\n{message['content']}<|im_end|>\n"
        elif message["role"] == "tool":
            text += f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
        else:
            calls = "".join(_call_text(call) for call in message.get("tool_calls", ()))
            thoughts = message["reasoning_content"]
            text += f"<|im_start|>assistant\n<think>\n{thoughts}\n</think>\n\n{message['content']}{calls}<|im_end|>\n"
    return text


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = json.dumps(function["arguments"])
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _call(tool: ToolSpec, thoughts: str, left: int, right: int) -> Message:
    function = {"name": tool.name, "arguments": tool.arguments(left, right)}
    return {
        "role": "assistant",
        "reasoning_content": thoughts,
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _answer(thoughts: str, value: int) -> Message:
    return {"role": "assistant", "reasoning_content": thoughts, "content": f"The answer is {value}."}
