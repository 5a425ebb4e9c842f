"""The real nano looks the names of its tools up in their schemas: other orders, other names, never shown together before.

A model that knew the names by heart would get none of the held-out ones; one that guessed among what it knows, a third.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.nano.demonstrations import draw_training_problem, render, render_tools
from recipes.nano.toolsets import CANONICAL, ToolSpec, renamed, reordered
from toolgrpo.models import NANO

Draw = Callable[[random.Random], tuple[ToolSpec, ...]]
N = 96


@pytest.mark.parametrize(
    ("draw", "least"),
    [(lambda rng: CANONICAL, 0.95), (reordered, 0.95), (lambda rng: renamed(rng, held_out=True), 0.5)],
    ids=["own", "another order", "held-out names"],
)
def test_the_name_of_the_right_tool_is_read_in_its_schema(draw: Draw, least: float) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(NANO), AutoModelForCausalLM.from_pretrained(NANO)
    rng, right = random.Random(0), 0
    for _ in range(N):
        tools, problem = draw(rng), draw_training_problem(rng, 1)
        operation = problem.steps[0].operation
        name = next(tool.name for tool in tools if tool.operation == operation)
        question = render([{"role": "user", "content": problem.question}])
        text = f"{render_tools(tools)}{question}<|im_start|>assistant\n<think>\n{operation}: "
        with torch.no_grad():
            said = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1].argmax()
        right += tokenizer.decode([said]) == name
    assert right >= least * N, f"{right} of {N} names"
