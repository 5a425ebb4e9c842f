"""The behaviour of an episode, locked: the order of its checks and the boundary of every limit.

If a change breaks a test here, it changes what users' runs do; change the test only if that is meant, and say so in the
changelog.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.dropped import DropCause
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import EngineError, FinalEngineError
from toolgrpo.evaluation.grading import grade
from toolgrpo.rewards import get_reward
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedReply, ScriptedTools, run_episode
from toolgrpo.tools.render import cut

pytestmark = pytest.mark.lock

CALL = 'call add {"a": 1, "b": 2}'
PROMPT = ByteChat().prompt([{"role": "user", "content": "q"}], [{"function": {"name": "add"}}])
BRIDGE = len(ByteChat().bridge([ByteChat.end], [{"role": "tool", "content": "3"}]))


def run(
    turns: Sequence[Any] | Callable[[SampleRequest, int], Any],
    *,
    tools: ScriptedTools | None = None,
    max_model_len: int = 4096,
    engine_retries: int = 0,
    clock: FakeClock | None = None,
    **limits: Any,
) -> tuple[Trajectory, ScriptedEngine]:
    script = turns if callable(turns) else [ByteChat.say(t) if isinstance(t, str) else t for t in turns]
    engine = ScriptedEngine(script, max_model_len=max_model_len)
    tools = tools if tools is not None else ScriptedTools({"add": lambda a, b: str(a + b)})
    clock = clock or FakeClock()
    return run_episode(engine, tools, engine_retries=engine_retries, clock=clock, **limits), engine


def test_the_engine_is_asked_for_exactly_the_ledger() -> None:
    trajectory, engine = run([CALL, "3"], max_completion_length=100)
    first, second = engine.requests
    assert list(first.ids) == PROMPT
    assert [r.max_tokens for r in engine.requests] == [100, 100 - (len(CALL) + 1) - BRIDGE], "what is left"
    assert tuple(second.ids) == trajectory.prompt_ids + trajectory.ids[: len(second.ids) - len(PROMPT)]
    assert ByteChat.text(trajectory.ids) == f"{CALL}|>tool:3|>3|"
    sampled = len(CALL) + 1
    assert trajectory.mask == (1,) * sampled + (0,) * BRIDGE + (1, 1)


@pytest.mark.parametrize("over", [0, 1, 50])
def test_a_prompt_that_fills_the_window_samples_nothing(over: int) -> None:
    trajectory, engine = run([], max_model_len=len(PROMPT) - over)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert trajectory.ids == () and engine.requests == []
    assert trajectory.dropped is not None and trajectory.dropped.cause is DropCause.NO_ROOM
    assert trajectory.dropped.reason.startswith(f"the prompt has {len(PROMPT)} tokens, and the context window ")


@pytest.mark.parametrize(("room", "dropped"), [(0, True), (1, False)])
def test_what_an_environment_says_first_takes_part_of_the_window(room: int, dropped: bool) -> None:
    """An episode that cannot say a word is never asked for its reward."""
    asked: list[object] = []
    tools = ScriptedTools({"add": lambda a, b: "3"}, observation=lambda row: "x" * 50, reward=asked.append)
    trajectory, _ = run(["3"], tools=tools, max_model_len=len(PROMPT) + 50 + room)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL and len(trajectory.ids) == room
    assert (trajectory.dropped is not None) is dropped and len(asked) == (not dropped)
    if trajectory.dropped is not None:
        assert f"the environment's reset returned has {len(PROMPT) + 50} tokens" in trajectory.dropped.reason


@pytest.mark.parametrize(
    ("said", "limits", "reason"),
    [
        ("12345", {"max_completion_length": 3}, StopReason.LENGTH),
        ("12", {"max_completion_length": 3}, StopReason.FINISHED),  # with its end it is exactly as long as allowed
        ("12345", {"max_model_len": len(PROMPT) + 3}, StopReason.CONTEXT_FULL),
        ("12345", {"max_model_len": len(PROMPT) + 3, "max_completion_length": 3}, StopReason.LENGTH),
        ("12345", {"max_turn_tokens": 3}, StopReason.LENGTH),
        ("12", {"max_turn_tokens": 3}, StopReason.FINISHED),
    ],
)
def test_the_tightest_limit_cuts_what_is_longer_than_it(said: str, limits: dict[str, Any], reason: StopReason) -> None:
    trajectory, engine = run([said], **limits)
    assert trajectory.stop_reason is reason and engine.requests[0].max_tokens == 3
    assert ByteChat.text(trajectory.ids) == f"{said}|"[:3]
    assert trajectory.turns[0].closed is (said == "12")


@pytest.mark.parametrize("max_turn_tokens", [None, len(CALL) + 2])
def test_calls_of_a_turn_that_was_cut_for_good_are_not_run(max_turn_tokens: int | None) -> None:
    """A cap as large as what is left does not count as the cap: then nothing is left for another turn."""
    tools = ScriptedTools({"add": lambda a, b: "3"})
    limits: dict[str, Any] = {"max_completion_length": len(CALL) + 2, "max_turn_tokens": max_turn_tokens}
    trajectory, _ = run([f"{CALL}\nmore"], tools=tools, **limits)
    assert trajectory.stop_reason is StopReason.LENGTH
    assert len(trajectory.attempts) == 1 and tools.calls == []


def test_a_turn_cut_by_its_cap_goes_on_if_it_holds_a_call() -> None:
    said = ByteChat.say(f"{CALL}\nand a lot more")
    trajectory, _ = run([said, "3"], max_turn_tokens=len(CALL) + 2)
    assert trajectory.stop_reason is StopReason.FINISHED
    assert ByteChat.text(trajectory.ids) == f"{CALL}\na|>tool:3|>3|"
    closing = len(CALL) + 2
    assert trajectory.mask[closing] == 0, "the close that was synthesised is context"


@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_the_last_turn_may_answer_but_its_calls_are_not_run(max_turns: int) -> None:
    tools = ScriptedTools({"add": lambda a, b: "3"})
    trajectory, _ = run([CALL] * max_turns, tools=tools, max_turns=max_turns)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert (len(trajectory.turns), len(tools.calls)) == (max_turns, max_turns - 1)


@pytest.mark.parametrize("turns", [[f"{CALL}\n{CALL}\n{CALL}"], [CALL] * 3], ids=["of a turn", "of the episode"])
@pytest.mark.parametrize("budget", [0, 1, 2])
def test_calls_over_the_budget_are_answered_with_an_error(budget: int, turns: list[str]) -> None:
    tools = ScriptedTools({"add": lambda a, b: "3"})
    trajectory, _ = run([*turns, "3"], tools=tools, max_tool_calls=budget)
    assert len(tools.calls) == budget
    assert [r.error for r in trajectory.results] == [None] * budget + [ToolErrorKind.LIMIT] * (3 - budget)
    assert trajectory.stop_reason is StopReason.FINISHED


@pytest.mark.parametrize(("max_tokens", "content"), [(6, "123456"), (5, "123\n[... 1 characters left out ...]\n56")])
def test_a_tool_result_is_cut_beyond_its_limit_not_at_it(max_tokens: int, content: str) -> None:
    tools = ScriptedTools({"add": lambda a, b: "123456"})
    trajectory, _ = run([CALL, "3"], tools=tools, max_tool_response_tokens=max_tokens)
    assert trajectory.results[0].truncated is (content != "123456")
    assert trajectory.messages[1]["content"] == content


def test_a_result_that_had_lost_its_middle_already_is_cut_with_one_notice_that_counts_all() -> None:
    shorter = cut("0123456789" * 10, 20)  # as a worker does it, long before tokens are counted
    tools = ScriptedTools({"add": lambda a, b: ToolResult(shorter.text, "add", left_out=shorter.left_out)})
    trajectory, _ = run([CALL, "3"], tools=tools, max_tool_response_tokens=8)
    assert trajectory.messages[1]["content"] == "0123\n[... 92 characters left out ...]\n6789"
    assert trajectory.results[0].left_out == 92
    trajectory, _ = run([CALL, "3"], tools=tools, max_tool_response_tokens=100)
    assert trajectory.messages[1]["content"] == shorter.text and trajectory.results[0].left_out == 80


def test_results_stand_in_call_order_malformed_ones_included() -> None:
    trajectory, _ = run(['call add {"a": 1, "b": 2}\ncall\ncall nope {}\ncall add {"a": 5, "b": 5}', "done"])
    assert [r.error for r in trajectory.results] == [None, ToolErrorKind.MISSING_NAME, ToolErrorKind.UNKNOWN_TOOL, None]
    assert [m["role"] for m in trajectory.messages] == ["assistant", "tool", "tool", "tool", "tool", "assistant"]


@pytest.mark.parametrize("room", [0, 1])
def test_a_bridge_that_leaves_no_room_is_not_added(room: int) -> None:
    turn = len(CALL) + 1
    trajectory, engine = run([CALL, "3"], max_completion_length=turn + BRIDGE + room)
    assert trajectory.stop_reason is StopReason.LENGTH and trajectory.results[0].content == "3"
    assert len(trajectory.ids) == turn + room * (BRIDGE + 1)
    assert [request.max_tokens for request in engine.requests[1:]] == [1] * room


@pytest.mark.parametrize(("delay_s", "late"), [(8.9, False), (10.0, True)])
def test_the_deadline_passes_while_sampling(delay_s: float, late: bool) -> None:
    trajectory, engine = run([ScriptedReply(ByteChat.say("3"), delay_s=delay_s)], deadline_s=9.0)
    assert trajectory.stop_reason is (StopReason.DEADLINE if late else StopReason.FINISHED)
    assert (trajectory.ids == ()) is late and engine.cancelled == late


def test_an_episode_that_has_ended_may_tidy_up_beyond_its_deadline() -> None:
    class SlowToClose(ScriptedTools):
        @asynccontextmanager
        async def session(self, row: Mapping[str, Any]) -> AsyncIterator[Any]:  # type: ignore[override]
            async with super().session(row) as opened:
                yield opened
                await asyncio.sleep(3.0)

    late = ScriptedReply(ByteChat.say("3"), delay_s=7.0)
    trajectory, _ = run([late], tools=SlowToClose({"add": str}), deadline_s=9.0)
    assert trajectory.stop_reason is StopReason.FINISHED


def test_the_deadline_passes_while_a_tool_runs() -> None:
    tools = ScriptedTools({"add": lambda a, b: "3"}, delay_s=10.0)
    trajectory, engine = run([CALL], tools=tools, deadline_s=9.0)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert len(trajectory.turns) == 1 and trajectory.results == ()
    assert tools.open_sessions == 0 and engine.open_requests == 0


def test_a_failed_request_is_tried_again_on_the_same_ledger() -> None:
    trajectory, engine = run([CALL, EngineError("gone"), EngineError("gone"), "3"], engine_retries=2)
    assert trajectory.stop_reason is StopReason.FINISHED
    assert engine.requests[1] == engine.requests[2] == engine.requests[3]


@pytest.mark.parametrize(
    ("failures", "retries"),
    [([EngineError("gone")] * 2, 1), ([FinalEngineError("gone")], 5)],
    ids=["for good", "and says that it is final"],
)
def test_an_engine_that_stays_gone_loses_the_episode_not_its_tokens(failures: list[Exception], retries: int) -> None:
    trajectory, engine = run([CALL, *failures], engine_retries=retries)
    assert trajectory.stop_reason is StopReason.ENGINE_FAILURE
    assert trajectory.failure == f"{type(failures[0]).__name__}: gone"
    assert ByteChat.text(trajectory.ids) == f"{CALL}|>tool:3|>" and len(engine.requests) == 1 + len(failures)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        *(([65, 256], [-0.5, number]) for number in (math.nan, math.inf, -math.inf, 10**400, "-1", None)),
        *(([token, 256], [-0.5, -0.5]) for token in (-1, 258, 10**9, 2**70)),
    ],
)
def test_an_engine_that_answers_what_no_model_gives_has_failed(ids: list[Any], logprobs: list[Any]) -> None:
    trajectory = run_episode(ScriptedEngine([ScriptedReply(ids, logprobs)]), vocabulary=258, clock=FakeClock())
    assert trajectory.stop_reason is StopReason.ENGINE_FAILURE and trajectory.ids == ()
    assert re.search(r"token_\w+\[\d\]", trajectory.failure or "")


STOPS = ScriptedTools({"add": lambda a, b: ToolResult("3", "add", ends_episode=True)})
ASKS = ScriptedTools({"add": lambda a, b: "3"}, user=lambda said: "is it 3?")
FIRST_CALL = len(PROMPT) + len(CALL) + 1  # tokens, with the turn's end
ENDINGS: dict[str, tuple[StopReason, list[Any], dict[str, Any]]] = {
    "length": (StopReason.LENGTH, [CALL], {"max_completion_length": len(CALL) + 1 + BRIDGE}),
    "window": (StopReason.CONTEXT_FULL, [CALL], {"max_model_len": FIRST_CALL + BRIDGE}),
    "deadline": (StopReason.DEADLINE, [CALL, ScriptedReply(ByteChat.say("3"), delay_s=9.0)], {"deadline_s": 5.0}),
    "engine": (StopReason.ENGINE_FAILURE, [CALL, EngineError("gone")], {}),
    "stop tool": (StopReason.STOP_TOOL, [CALL], {"tools": STOPS}),
    "user": (StopReason.ENGINE_FAILURE, [CALL, "one moment", EngineError("gone")], {"tools": ASKS}),
    "no turn": (StopReason.CONTEXT_FULL, [], {"max_model_len": len(PROMPT)}),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_reward_reads_what_the_model_said_last_and_nothing_where_it_was_cut(ending: str) -> None:
    """Nobody is paid for the words of a tool or a user; a recorded episode is read alike."""
    reason, turns, options = ENDINGS[ending]
    trajectory, _ = run(turns, **options)
    assert trajectory.stop_reason is reason
    assert [message["role"] for message in trajectory.messages[-1:]] != ["assistant"]
    assert ending != "stop tool" or trajectory.messages[-1]["content"] == "3", "the result that ends it is said"
    recorded = Trajectory.from_record(json.loads(json.dumps(trajectory.to_record())))
    for episode in (trajectory, recorded):
        assert episode.completion() == [*trajectory.messages, {"role": "assistant", "content": ""}]
    batch = RolloutBatch(episodes=(Scored({"prompt": "q", "answer": "3"}, replace(trajectory, dropped=None)),))
    by_hand = lambda completions, answer, **_: [float(answer[0] in completions[0][-1]["content"])]  # noqa: E731
    assert grade(batch, [by_hand, get_reward("exact_match")], threshold=1.0).totals == (0.0,)


def test_what_the_model_said_last_is_left_as_it_is() -> None:
    """Also a call that the last turn makes, which is not run."""
    cases: Any = (([CALL, "3"], {}), (["12345"], {"max_turn_tokens": 3}), ([CALL], {"max_turns": 1}))
    for turns, limits in cases:
        trajectory, _ = run(turns, **limits)
        assert trajectory.completion() == list(trajectory.messages)


def test_an_environment_speaks_first_and_gives_the_reward() -> None:
    tools = ScriptedTools({"add": lambda a, b: "3"}, observation=lambda row: " (seen)", reward=lambda row: 0.5)
    trajectory, _ = run(["3"], tools=tools)
    assert "user:q (seen)" in ByteChat.text(trajectory.prompt_ids)
    assert trajectory.reward == 0.5 and trajectory.metadata == {"observation": " (seen)"}, "for who reads the recording"


def test_without_tools_a_call_is_only_text() -> None:
    trajectory = run_episode(ScriptedEngine([ByteChat.say(CALL)]), clock=FakeClock())
    assert trajectory.stop_reason is StopReason.FINISHED and trajectory.attempts == ()
    assert trajectory.completion() == [{"role": "assistant", "content": CALL}], "a reward may look for it there"
