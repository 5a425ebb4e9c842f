"""Which tokens the tool-output loss is on, and that its gradient is that of the loss written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chat_families import trl_tokenizer
from toolgrpo import ToolGRPOTrainer
from toolgrpo.calls import ToolErrorKind, ToolResult
from toolgrpo.chat import resolve_format
from toolgrpo.engines.base import SampleRequest
from toolgrpo.errors import ConfigError
from toolgrpo.rollout.tool_contents import content_spans
from toolgrpo.signal.tool_outputs import ToolOutputOptions, output_mask
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode, tiny_trainer
from toolgrpo.trajectory import Trajectory

TOOLS: dict[str, Callable[..., str | ToolResult]] = {
    "add": lambda a, b: str(a + b),
    "fetch": lambda page: f"the page {page}",
    "fails": lambda: ToolResult("Error: fails: no", "fails", ToolErrorKind.RAISED),
    "nothing": lambda: " ",
}
TURNS = [
    'call add {"a": 20, "b": 3}\ncall fetch {"page": "x0~"}',
    "call fails {}\ncall nothing {}",
    'call fetch {"page": "two"}',
    "done",
]


def episode(turns: list[str] = TURNS, **changes: Any) -> Trajectory:
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns])
    return run_episode(engine, ScriptedTools(TOOLS), find_outputs=True, **changes)


def texts(trajectory: Trajectory, mask: list[int]) -> list[str]:
    """Return the runs of marked tokens, as text."""
    runs: list[list[int]] = []
    before = 0
    for token, marked in zip(trajectory.ids, mask, strict=True):
        if marked:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = marked
    return [ByteChat.text(run) for run in runs]


def test_the_texts_of_good_results_and_nothing_else() -> None:
    one = episode()
    assert texts(one, output_mask(one, None)) == ["23", "the page x0~", "the page two"]
    assert texts(one, output_mask(one, ["fetch"])) == ["the page x0~", "the page two"]
    assert [output.tool for output in one.outputs] == ["add", "fetch", "fails", "fetch"]
    assert not any(marked and sampled for marked, sampled in zip(output_mask(one, None), one.mask, strict=True))
    assert Trajectory.from_record(json.loads(json.dumps(one.to_record()))) == one


def test_what_no_later_turn_reads_and_what_nobody_asked_for() -> None:
    cut = episode(max_completion_length=len(episode().ids) - 6)  # the last result is there, and no turn after it
    assert texts(cut, output_mask(cut, None)) == ["23", "the page x0~", "the page two"][: len(cut.turns) - 1]
    engine = ScriptedEngine([ByteChat.say(turn) for turn in TURNS])
    assert run_episode(engine, ScriptedTools(TOOLS)).outputs == ()


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "gemma4", "gptoss"])
@pytest.mark.parametrize("text", ["23", "x", "0", '{"a": [1, "~"]}', "after\n\nlines", "x" * 50, "é☃"])
def test_a_span_of_a_real_format_decodes_to_the_text(family: str, text: str) -> None:
    """Or to what the template makes of it: some write it as JSON."""
    tokenizer = trl_tokenizer(family)
    chat = resolve_format(tokenizer)
    messages = [{"role": "tool", "name": "add", "content": "first"}, {"role": "tool", "name": "add", "content": text}]
    ids = [*tokenizer.encode("asked"), chat.stop_ids[0]]
    bridge = chat.bridge(ids, messages)
    first, second = content_spans(bridge, messages, lambda others: chat.bridge(ids, others))
    assert first is not None and second is not None
    written = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    assert tokenizer.decode(bridge[slice(*first)]) == "first" and tokenizer.decode(bridge[slice(*second)]) in written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"echo_weight": -0.1}, "echo_weight must be between 0 and 1, got -0.1"),
        ({"echo_weight": float("nan")}, "got nan"),
        ({"echo_tools": ["add"]}, "echo_tools is given, but echo_weight is 0"),
    ],
)
def test_what_cannot_work_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolOutputOptions(**changes).check_tool_outputs()


def test_the_tools_must_be_there() -> None:
    with pytest.raises(ConfigError, match="echo_weight needs tools"):
        ToolOutputOptions(echo_weight=0.1).check_tools([])
    with pytest.raises(ConfigError, match="echo_tools names 'ad', which is no tool of this run: add"):
        ToolOutputOptions(echo_weight=0.1, echo_tools=["ad"]).check_tools(["add"])


class Seen(ToolGRPOTrainer):
    """Keeps every batch, and the gradient of the first optimizer step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), inputs]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        self.gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return super()._clip_grad_norm(model)


def script(request: SampleRequest, number: int) -> list[int]:
    answered = ">tool:" in ByteChat.text(request.ids)
    return ByteChat.say("end" if answered else f'call add {{"a": 1, "b": {10 ** (number % 3)}}}')


def all_alike(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.e2e
@pytest.mark.parametrize("prefix_sharing", ["off", "on"])
def test_the_gradient_is_that_of_the_loss_written_by_hand(tmp_path: Path, prefix_sharing: str) -> None:
    """All rewards are alike, so the tool-output loss is all there is."""
    trainer = tiny_trainer(
        tmp_path,
        all_alike,
        script,
        kind=Seen,
        parts={"tools": ScriptedTools({"add": lambda a, b: str(a + b)})},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=1e9,
        echo_weight=0.5,
        prefix_sharing=prefix_sharing,
    )
    trainer.train()
    model = trainer.model
    model.zero_grad()
    total, n_tokens = torch.zeros(()), 0
    for inputs in trainer.seen:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        logps = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        marked = inputs["output_mask"].bool()
        total = total - logps[:, -marked.shape[1] :][marked].sum()
        n_tokens += int(marked.sum())
        for row, row_marked in zip(inputs["completion_ids"], marked, strict=True):
            assert ByteChat.text(row[row_marked].tolist()) in ("2", "11", "101")
    (0.5 * total / n_tokens).backward()
    assert n_tokens == int(trainer.seen[0]["num_outputs_in_batch"]) and len(trainer.seen) == 2
    for ours, theirs in zip(model.parameters(), trainer.gradients, strict=True):
        assert torch.allclose(ours.grad, theirs, atol=1e-6)
    log = trainer.state.log_history[0]
    assert log["echo/loss"] == pytest.approx(float(total) / n_tokens, rel=0.2) and log["echo/tokens"] == n_tokens
