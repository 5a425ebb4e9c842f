"""Episodes made again: calls in one session, the same seed, the place where two part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.rollouts import scripted_rollouts
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.evaluation.replaying import SessionAgain, calls_again, episode_again, first_parting
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode
from toolgrpo.tools.base import AfterTurn

ADD = {"add": lambda a, b: str(a + b)}


def errors(again: SessionAgain) -> list[ToolErrorKind | None]:
    return [answer.now.error for answer in again.answers if isinstance(answer.now, ToolResult)]


def test_calls_are_made_in_one_session_and_refusals_again() -> None:
    turns = ['call add {"a": 1, "b": 2}', 'call nothing {"a": 1}', 'call add {"a": 5, "b": 5}', "end"]
    then = run_episode(ScriptedEngine([ByteChat.say(turn) for turn in turns]), ScriptedTools(ADD), max_tool_calls=2)
    rewards = iter([1.0, 2.0, 3.0])
    tools = ScriptedTools({"add": lambda a, b: str(a + b + 1)}, after_turn=lambda row: AfterTurn(next(rewards)))
    again = calls_again(tools, {"prompt": "q"}, then)
    assert tools.calls[0] == ("add", {"a": 1, "b": 2}) and tools.closed_sessions == 1
    assert [one.turn for one in again.answers] == [0, 1], "what was over the budget was never called"
    assert [one.same for one in again.answers] == [False, True]
    shown = (again.answers[0].then, again.answers[0].now)
    assert [one.content for one in shown if isinstance(one, ToolResult)] == ["3", "4"]
    assert next(rewards) == 3.0, "the environment moves on after the calls of both turns"
    assert errors(again) == [None, ToolErrorKind.UNKNOWN_TOOL]
    without = calls_again(ScriptedTools(ADD), {"prompt": "q", "tools": []}, then)
    assert set(errors(without)) == {ToolErrorKind.UNKNOWN_TOOL}, "this row is offered none"


@pytest.mark.parametrize("reason", [StopReason.DEADLINE, StopReason.FINISHED])
def test_an_environment_that_was_not_asked_is_not_asked_again(reason: StopReason) -> None:
    then = replace(run_episode(ScriptedEngine([ByteChat.say("end")]), ScriptedTools(ADD)), stop_reason=reason)
    again = calls_again(ScriptedTools(ADD, reward=lambda row: 1.0), {"prompt": "q"}, then)
    assert again.reward == (1.0 if reason is StopReason.FINISHED else then.reward)


def test_a_result_is_cut_as_it_was_before_it_is_compared() -> None:
    short = ToolResult("12 ... 89", "add", left_out=4)
    engine = ScriptedEngine([ByteChat.say('call add {"a": 1, "b": 2}'), ByteChat.say("end")])
    then = run_episode(engine, ScriptedTools({"add": lambda a, b: short}))
    long = ScriptedTools({"add": lambda a, b: "123456789"})
    (whole,) = calls_again(long, {}, then).answers
    (as_seen,) = calls_again(long, {}, then, cut=lambda result: short).answers
    assert not whole.same and as_seen.same


def test_the_same_seed_reaches_the_engine() -> None:
    seeds: list[int | None] = []

    def script(request: SampleRequest, number: int) -> list[int]:
        seeds.append(request.seed)
        return ByteChat.say('call add {"a": 1, "b": 2}' if len(seeds) % 2 else f"end {len(seeds)}")

    rollouts = scripted_rollouts(ScriptedEngine(script), ScriptedTools(ADD))
    first, second = (episode_again(rollouts, {"prompt": "q"}, SamplingOptions(), 42) for _ in range(2))
    rollouts.close()
    assert seeds == [42, 43, 42, 43]
    place = first_parting(first, second)
    assert place is not None and first.ids[:place] == second.ids[:place] and first.ids[place] != second.ids[place]
    assert first_parting(first, first) is None
    shorter = {name: getattr(first, name)[:-1] for name in ("ids", "mask", "logprobs")}
    assert first_parting(first, replace(first, **shorter)) == len(first.ids) - 1
