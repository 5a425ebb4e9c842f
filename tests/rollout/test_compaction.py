"""Long episodes in a short window: what is dropped, what the engine is sent, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.segments import read_before
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.rollout.compaction import STUB, ContextLimit
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode

LONG = "r" * 100


def script(request: SampleRequest, number: int) -> list[int]:
    """Four calls, then an answer."""
    return ByteChat.say(f'call look {{"at": {number}}}' if number < 5 else "done")


def run(context: ContextLimit | None, engine: ScriptedEngine | None = None, **options: Any) -> Trajectory:
    tools = ScriptedTools({"look": lambda at: f"{at}{LONG}"})
    return run_episode(engine or ScriptedEngine(script), tools, context=context, **options)


def check_requests(engine: ScriptedEngine, done: Trajectory) -> None:
    """Every request is the prompt of its segment and the first of its ids."""
    asked = [tuple(request.ids) for request in engine.requests]
    assert asked == [read_before(done, turn.start) for turn in done.turns]


def texts(done: Trajectory) -> list[str]:
    return [ByteChat.text((*one.prompt_ids, *one.ids)) for one in done.segments]


def test_old_results_are_dropped_and_the_last_turns_stay() -> None:
    engine = ScriptedEngine(script)
    done = run(ContextLimit(max_tokens=520, keep_last_turns=2), engine)
    assert done.stop_reason is StopReason.FINISHED and len(done.turns) == 6
    check_requests(engine, done)
    first, second, *_ = texts(done)
    assert first.count(LONG) == 3, "the fourth result begins the second segment"
    calls = [f'call look {{"at": {at}}}|>tool:' for at in range(3)]
    assert f"{calls[0]}{STUB}|>{calls[1]}{STUB}|>{calls[2]}2{LONG}|" in second
    assert [one.parent for one in done.segments] == [None, 0, 1]
    assert done.segments[1].prompt_ids[: len(done.prompt_ids)] == done.prompt_ids, "what is kept is a shared prefix"
    assert all(len(one.prompt_ids) <= 520 for one in done.segments)
    assert next(message["content"] for message in done.messages if message["role"] == "tool") == f"0{LONG}", "rewards"


def test_an_episode_that_fits_is_what_it_was() -> None:
    whole, limited = ScriptedEngine(script), ScriptedEngine(script)
    assert run(ContextLimit(max_tokens=2000), limited).segments == run(None, whole).segments
    assert [r.ids for r in limited.requests] == [r.ids for r in whole.requests]


def test_what_is_repeated_does_not_count() -> None:
    context = ContextLimit(max_tokens=560, keep_last_turns=1)
    done = run(context)
    assert run(context, max_turns=len(done.turns)).stop_reason is StopReason.FINISHED
    n_added = done.n_sampled + done.n_context
    assert n_added < len(done.ids)
    again = run(context, max_completion_length=n_added)
    assert again.stop_reason is StopReason.FINISHED and again.ids == done.ids
    short = run(context, max_completion_length=n_added - 3)
    assert short.stop_reason is StopReason.LENGTH
    assert short.n_sampled + short.n_context <= n_added - 3


def test_a_window_too_small_for_a_turn_ends_the_episode_with_a_sentence() -> None:
    done = run(ContextLimit(max_tokens=80, keep_last_turns=1))
    assert done.stop_reason is StopReason.CONTEXT_FULL and done.n_sampled > 0
    assert done.failure is not None and "context allows 80 (max_tokens)" in done.failure


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[", "JSON"),
        ({"keep_last_turns": 1}, "needs max_tokens"),
        ({"max_tokens": 9, "window": 1}, "'window'"),
        ({"max_tokens": 0}, "max_tokens .*got 0"),
        ({"max_tokens": 9, "keep_last_turns": 1.5}, "keep_last_turns .*got 1.5"),
        ({"max_tokens": 9, "strategy": "forget"}, "got 'forget'"),
    ],
)
def test_what_is_no_limit_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContextLimit.parse(given)


def test_what_a_user_says_is_not_said_where_no_history_holds_it() -> None:
    row = {"user_turns": ["u" * 600]}
    done = run(ContextLimit(max_tokens=520), ScriptedEngine([ByteChat.say("answer")]), row=row)
    assert done.stop_reason is StopReason.CONTEXT_FULL
    assert [turn.user for turn in done.turns] == [None]
    assert done.messages[-1]["role"] == "assistant" and done.messages[-1]["content"] == "answer"


def test_a_limit_is_read_from_text_and_must_lie_below_the_window() -> None:
    limit = ContextLimit.parse('{"max_tokens": 99, "strategy": "drop_results"}')
    assert limit == ContextLimit(max_tokens=99) and ContextLimit.parse(None) is None
    limit.check_window(100)
    with pytest.raises(ConfigError, match="window of 99"):
        limit.check_window(99)


def test_what_a_user_says_may_begin_a_segment_and_is_never_dropped() -> None:
    def answers(request: SampleRequest, number: int) -> list[int]:
        return ByteChat.say(f'call look {{"at": {number}}}' if number < 3 else f"answer {number}")

    engine = ScriptedEngine(answers)
    row = {"user_turns": ["and now? " + "u" * 200, "thanks"]}
    done = run(ContextLimit(max_tokens=520, keep_last_turns=1), engine, row=row)
    assert done.stop_reason is StopReason.FINISHED
    check_requests(engine, done)
    assert [turn.user for turn in done.turns if turn.user] == row["user_turns"]
    last = texts(done)[-1]
    assert len(done.segments) > 1 and f"|>user:{row['user_turns'][0]}|>" in last and "|>user:thanks|>" in last
