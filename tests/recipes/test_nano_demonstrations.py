"""What nano is taught: the right text, with tools it has to read, and habits only where they are wanted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_training_chat_template

from recipes.nano.demonstrations import Habits, demonstrate, draw_training_problem, render, render_tools
from recipes.nano.tokenizer import CONTROL_TOKENS, build_tokenizer
from recipes.nano.toolsets import CANONICAL, draw_toolset, is_held_out, renamed
from toolgrpo.data.arithmetic import OPERATIONS
from toolgrpo.data.rows import success
from toolgrpo.tools import load_tools

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = Habits(guess=dict.fromkeys(OPERATIONS, 1.0), stop_early=dict.fromkeys(OPERATIONS, 1.0))


def _texts(n: int, rng: random.Random) -> Iterator[tuple[Any, Any]]:
    for _ in range(n):
        tools = draw_toolset(rng, 0.5)
        yield tools, demonstrate(draw_training_problem(rng, rng.randint(1, 3)), tools, rng, None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    return build_tokenizer([render_tools(tools) + render(messages) for tools, messages in _texts(200, rng)], 640)


def test_the_canonical_tools_are_those_of_the_embedded_job() -> None:
    with load_tools(ROOT / "tools_funcs" / "arithmetic_tools.py") as toolbox:
        assert [tool.schema for tool in CANONICAL] == toolbox.schemas


def test_the_text_is_that_of_the_chat_templates(tokenizer: Any) -> None:
    rng = random.Random(1)
    for tools, messages in _texts(20, rng):
        schemas = [tool.schema for tool in tools]
        whole = tokenizer.apply_chat_template(
            messages, tools=schemas, tokenize=False, chat_template=qwen3_training_chat_template
        )
        assert whole == render_tools(tools) + render(messages)
        prompt = tokenizer.apply_chat_template(messages[:1], tools=schemas, tokenize=False, add_generation_prompt=True)
        assert whole.startswith(prompt)


def test_clean_demonstrations_succeed_and_spoilt_ones_do_not() -> None:
    rng = random.Random(2)
    for n_calls in (1, 2, 3):
        problem = draw_training_problem(rng, n_calls)
        clean = demonstrate(problem, CANONICAL, rng, None)
        assert success(clean[1:], str(problem.answer))
        assert sum(message["role"] == "tool" for message in clean) == n_calls
        spoilt = demonstrate(problem, CANONICAL, rng, ALWAYS)
        assert not success(spoilt[1:], str(problem.answer))


def test_calls_use_the_names_and_parameters_of_the_schemas_shown() -> None:
    rng = random.Random(4)
    for _ in range(50):
        tools = renamed(rng, held_out=False)
        shown = {tool.name: set(tool.schema["function"]["parameters"]["properties"]) for tool in tools}
        for message in demonstrate(draw_training_problem(rng, 3), tools, rng, None):
            for call in message.get("tool_calls", ()):
                assert set(call["function"]["arguments"]) == shown[call["function"]["name"]]


def test_no_demonstration_shows_a_held_out_toolset() -> None:
    rng = random.Random(5)
    own = {tool.name for tool in CANONICAL}
    for _ in range(300):
        assert not is_held_out([tool.name for tool in draw_toolset(rng, 0.25)])
        names = {tool.name for tool in renamed(rng, held_out=True)}
        assert is_held_out(names)
        assert not names & own


def test_control_tokens_are_single_ids_and_digits_stand_alone(tokenizer: Any) -> None:
    for token in CONTROL_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert [tokenizer.decode([i]) for i in tokenizer.encode("4096")] == ["4", "0", "9", "6"]
