"""Thinking through whole episodes, for every family that thinks: what was thought stays in the ledger, whatever the
template would hide from later turns, and `enable_thinking` of the row reaches the prompt and every bridge."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_samples import calling, printed_turn, thinking_markers
from tests.support.real_tokenizers import format_of
from toolgrpo.chat import tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.testing import ScriptedEngine, ScriptedTools, run_episode

pytestmark = pytest.mark.contract

NAMES = ("real-qwen3", "qwen3", "qwen3_5_think", "qwen3_8", "glm4moe", "nemotron_3_ultra", "gemma4_v5", "lfm2_2_5")
QUESTION = {"role": "user", "content": "q"}
THOUGHTS = ("first I look", "then I look again", "now I know")


def says(chat: TemplateFormat, turn: int, request: SampleRequest) -> list[int]:
    """A turn that thinks and then calls, or answers in the end; thinking that the prompt has opened is only closed."""
    opening, closing = thinking_markers(chat)
    opened = chat.parse(chat.encode("x"), before=request.ids).reasoning == "x"
    thought = chat.encode(("" if opened else opening) + THOUGHTS[turn] + closing)
    if turn == 2:
        return [*thought, *chat.encode("done"), chat.stop_ids[-2 if chat.family.end_opens_results else 0]]
    called = calling(("look_up", {"key": f"k{turn}"}))
    printed = printed_turn(chat, [QUESTION], called, [tool_message("look_up", "r")], []).said
    opens = chat.encode(chat.family.form.call.opening[0])[0]
    return [*thought, *printed[printed.index(opens) :]]


def play(tokenizer: Any, chat: TemplateFormat, enable_thinking: bool | None) -> tuple[Trajectory, list[list[int]]]:
    engine = ScriptedEngine(lambda request, number: says(chat, number, request), max_model_len=100_000)
    tools = ScriptedTools({"look_up": lambda key: f"found {key}"})
    options: dict[str, Any] = {"enable_thinking": enable_thinking, "max_completion_length": 50_000}
    trajectory = run_episode(engine, tools, chat=chat, tokenizer=tokenizer, **options)
    return trajectory, [list(request.ids) for request in engine.requests]


@pytest.mark.parametrize("value", [None, False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_thought_stays_and_the_rows_choice_reaches_every_bridge(name: str, value: bool | None) -> None:
    tokenizer, chat = format_of(name)
    trajectory, asked = play(tokenizer, chat, value)
    assert trajectory.stop_reason is StopReason.FINISHED
    assert [turn.reasoning for turn in trajectory.turns] == list(THOUGHTS)
    assert [attempt.arguments for attempt in trajectory.attempts] == [{"key": "k0"}, {"key": "k1"}]
    whole = [*trajectory.prompt_ids, *trajectory.ids]
    for ids, turn in zip(asked, trajectory.turns, strict=True):
        assert whole[: len(ids)] == ids, "what the engine was asked is the ledger"
        assert len(trajectory.prompt_ids) + turn.start == len(ids)
        assert set(trajectory.mask[turn.start : turn.end]) == {1}
    text = tokenizer.decode(whole, skip_special_tokens=False)
    assert all(text.count(thought) == 1 for thought in THOUGHTS)
    assert asked[0] == chat.prompt([QUESTION], ScriptedTools({"look_up": str}).schemas, enable_thinking=value)
    for turn, following in zip(trajectory.turns, asked[1:], strict=False):
        result = [tool_message("look_up", turn.results[0].content)]
        end = len(trajectory.prompt_ids) + turn.end
        assert following[end:] == chat.bridge(following[:end], result, enable_thinking=value)
