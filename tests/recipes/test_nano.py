"""What nano is taught (the right text, with tools it has to read, and habits only where they are wanted), and how.

And that the real nano reads: it looks the names of its tools up in their schemas. A model that knew the names by heart would
get none of the held-out ones; one that guessed among what it knows, a third.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_training_chat_template

from recipes.nano.demonstrations import Habits, demonstrate, draw_training_problem, render, render_tools
from recipes.nano.tokenizer import CONTROL_TOKENS, build_tokenizer
from recipes.nano.toolsets import CANONICAL, ToolSpec, draw_toolset, is_held_out, renamed, reordered
from recipes.nano.training import SupervisedLoss, collate, orthogonalised, train
from toolgrpo.data.arithmetic import OPERATIONS
from toolgrpo.data.rows import success
from toolgrpo.models import NANO
from toolgrpo.sft.encoder import Example
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
        print_ = partial(tokenizer.apply_chat_template, tools=schemas, tokenize=False)
        whole = print_(messages, chat_template=qwen3_training_chat_template)
        assert whole == render_tools(tools) + render(messages)
        prompt = print_(messages[:1], add_generation_prompt=True)
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
        assert is_held_out(names) and not names & own


def test_control_tokens_are_single_ids_and_digits_stand_alone(tokenizer: Any) -> None:
    assert all(len(tokenizer.encode(token)) == 1 for token in CONTROL_TOKENS)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("4096")] == ["4", "0", "9", "6"]


@pytest.mark.parametrize(
    ("draw", "least"),
    [(lambda rng: CANONICAL, 0.95), (reordered, 0.95), (lambda rng: renamed(rng, held_out=True), 0.5)],
    ids=["own", "another order", "held-out names"],
)
def test_the_name_of_the_right_tool_is_read_in_its_schema(
    draw: Callable[[random.Random], tuple[ToolSpec, ...]], least: float
) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(NANO), AutoModelForCausalLM.from_pretrained(NANO)
    rng, right, n = random.Random(0), 0, 96
    for _ in range(n):
        tools, problem = draw(rng), draw_training_problem(rng, 1)
        operation = problem.steps[0].operation
        name = next(tool.name for tool in tools if tool.operation == operation)
        question = render([{"role": "user", "content": problem.question}])
        text = f"{render_tools(tools)}{question}<|im_start|>assistant\n<think>\n{operation}: "
        with torch.no_grad():
            said = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1].argmax()
        right += tokenizer.decode([said]) == name
    assert right >= least * n, f"{right} of {n} names"


# Supervised training: the mask, the shared prefix, the optimizer.

PREFIXES = [tuple(range(1, 21)), tuple(range(20, 0, -1))]  # long enough to be shared
TAILS = [
    *(Example((8, 9, 10, 11), (0, 0, 1, 1)), Example((9, 8), (0, 1))),
    *(Example((12, 13, 14), (0, 1, 1)), Example((15, 16), (0, 1))),
]
EXAMPLES = [
    Example(prefix + tail.ids, (0,) * len(prefix) + tail.mask)
    for prefix, tail in zip([PREFIXES[0], PREFIXES[0], PREFIXES[1], PREFIXES[1]], TAILS, strict=True)
]


@pytest.fixture
def model(tiny_qwen3: Any) -> Any:
    return tiny_qwen3(0)


def _gradients(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def _cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    """By transformers alone."""
    labels = batch.ids.masked_fill(~batch.loss_mask, -100)
    return model(input_ids=batch.ids, attention_mask=batch.attention_mask, labels=labels).loss


@pytest.mark.parametrize("examples", [EXAMPLES, TAILS], ids=["shared", "padded"])
def test_loss_and_gradients_are_those_of_transformers(model: Any, examples: list[Example]) -> None:
    batch = collate(examples, 0)
    expected_loss, expected = _gradients(model, _cross_entropy(model, batch))
    loss, gradients = _gradients(model, SupervisedLoss(model)(batch))
    torch.testing.assert_close(loss, expected_loss)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_shared_beginning_is_computed_once(model: Any) -> None:
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    SupervisedLoss(model)(collate(EXAMPLES, 0))
    assert seen == [sum(map(len, PREFIXES)) + sum(len(tail.ids) - 1 for tail in TAILS)]


def test_micro_batches_give_the_step_of_one_batch(model: Any) -> None:
    twin = copy.deepcopy(model)
    for each, steps in ((model, [[collate(TAILS, 0)]]), (twin, [[collate(TAILS[:1], 0), collate(TAILS[1:], 0)]])):
        train(each, torch.optim.SGD(each.parameters(), lr=0.1), steps, schedule=lambda step: 1.0)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), 5))
    assert values.min() > 0.3 and values.max() < 1.5
