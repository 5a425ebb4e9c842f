from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rollouts import run_together
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.errors import EngineError, PluginError
from toolgrpo.rollout import Episode, EpisodeRunner, RolloutBatch, Scheduler
from toolgrpo.rollout.scheduler import run_all
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedReply, ScriptedTools, scripted_runner

CALL = 'call add {"a": 1, "b": 2}'
STALLS = ScriptedReply(ByteChat.say("a"), stalls=True)


def runner(engine: ScriptedEngine, tools: ScriptedTools | None = None, **limits: Any) -> EpisodeRunner:
    return scripted_runner(engine, tools or ScriptedTools({"add": lambda a, b: str(a + b)}), engine_retries=1, **limits)


def episodes(n: int) -> list[Episode]:
    return [Episode(messages=({"role": "user", "content": f"q{i}"},), row={"i": i}) for i in range(n)]


def number(request: SampleRequest) -> int:
    """Which episode a request belongs to, read out of its prompt."""
    return int(ByteChat.text(request.ids).split("user:q")[1].split("|")[0])


def run(clock: FakeClock, n: int, shared: EpisodeRunner, **options: Any) -> RolloutBatch:
    return clock.run(run_all(episodes(n), Scheduler(shared, **options)))


def test_nobody_waits_for_a_slower_sibling() -> None:
    """Episode 0 has two turns of 100 s each; the others, with four turns of 1 s each, are done long before."""
    ends: list[float] = []
    clock = FakeClock()

    def script(request: SampleRequest, _: int) -> ScriptedReply:
        slow = number(request) == 0
        done = ByteChat.text(request.ids).count(">tool:") == (1 if slow else 3)
        return ScriptedReply(ByteChat.say("end" if done else CALL), delay_s=100.0 if slow else 1.0)

    run(clock, 4, runner(ScriptedEngine(script)), on_done=lambda _, t: ends.append(clock()))
    assert ends == [4.0, 4.0, 4.0, 200.0]


@pytest.mark.parametrize("limit", [1, 3])
def test_bounded_concurrency(limit: int) -> None:
    engine = ScriptedEngine(lambda r, _: ScriptedReply(ByteChat.say("a"), delay_s=1.0))
    run(FakeClock(), 10, runner(engine), max_concurrent=limit)
    assert engine.most_open_requests == limit


def test_a_lost_episode_raises_after_its_siblings_ended_and_is_never_a_result() -> None:
    ended = []

    def script(request: SampleRequest, _: int) -> Any:
        if number(request) == 2:
            return EngineError("server gone")
        return ScriptedReply(ByteChat.say("a"), delay_s=50.0)

    with pytest.raises(EngineError, match=r"1 of 4 episodes could not be completed.*server gone"):
        run(FakeClock(), 4, runner(ScriptedEngine(script)), on_done=lambda _, t: ended.append(t))
    assert len(ended) == 4


@pytest.mark.parametrize("error", [PluginError("my_tools.py: a bug"), KeyboardInterrupt()], ids=["a bug", "Ctrl-C"])
def test_what_is_no_engines_fault_cancels_the_siblings_and_keeps_its_type(error: BaseException) -> None:
    def broken(**_: Any) -> str:
        raise error

    slow = ScriptedReply(ByteChat.say("a"), delay_s=50.0)
    engine = ScriptedEngine(lambda r, _: ByteChat.say(CALL) if number(r) == 1 else slow)
    with pytest.raises(type(error)):
        run(FakeClock(), 4, runner(engine, ScriptedTools({"add": broken})))
    assert engine.cancelled == 3 and engine.open_requests == 0 and not engine.is_open


def test_cancelling_leaves_nothing_open() -> None:
    engine = ScriptedEngine(lambda r, _: STALLS)
    tools = ScriptedTools({})

    async def main() -> None:
        task = asyncio.create_task(run_all(episodes(5), Scheduler(runner(engine, tools))))
        await asyncio.sleep(1.0)
        assert engine.open_requests == 5 and tools.open_sessions == 5
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    FakeClock().run(main())
    assert engine.cancelled == 5 and engine.open_requests == 0 and tools.open_sessions == 0 and not engine.is_open


def test_works_where_an_event_loop_already_runs() -> None:
    async def notebook() -> RolloutBatch:
        return run_together(episodes(2), runner(ScriptedEngine(lambda r, _: ByteChat.say("a"))))

    assert len(asyncio.run(notebook()).trajectories) == 2


def test_tool_waits_overlap_and_the_engine_is_idle_while_only_tools_run() -> None:
    clock = FakeClock()
    engine = ScriptedEngine(
        lambda r, _: ScriptedReply(ByteChat.say("end" if ">tool:" in ByteChat.text(r.ids) else CALL), delay_s=1.0)
    )
    result = run(clock, 3, runner(engine, ScriptedTools({"add": lambda a, b: "3"}, delay_s=6.0), clock=clock))
    assert result.times.duration_s == pytest.approx(8.0)
    assert result.times.engine_idle_s == pytest.approx(6.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 24), limit=st.one_of(st.none(), st.integers(1, 5)))
def test_chaos_accounts_for_every_episode(seed: int, n: int, limit: int | None) -> None:
    """Tools that hang, die and answer late, an engine that fails now and then, deadlines: one trajectory each, in order."""
    rng = random.Random(seed)

    def script(request: SampleRequest, _: int) -> Any:
        kind = rng.random()
        if kind < 0.1:
            return EngineError("a passing fault") if rng.random() < 0.5 else ScriptedReply([], stalls=True)
        text = rng.choice([CALL, f"{CALL}\n{CALL}", "call", "call x {", "end", "end", "x" * rng.randrange(300)])
        return ScriptedReply(ByteChat.say(text), delay_s=rng.random() * 5)

    def chaotic(**_: Any) -> ToolResult:
        return rng.choice([ToolResult("3", "add"), ToolResult("late", "add", ToolErrorKind.TIMEOUT)])

    engine = ScriptedEngine(script)
    tools = ScriptedTools({"add": chaotic}, delay_s=3.0)
    shared = runner(engine, tools, max_completion_length=200, deadline_s=20.0, max_turns=6)
    try:
        result = run(FakeClock(), n, shared, max_concurrent=limit)
    except EngineError:
        pass  # two faults in a row lost an episode: said so, nothing left open
    else:
        assert len(result.trajectories) == n
        for i, trajectory in enumerate(result.trajectories):
            assert f"user:q{i}|" in ByteChat.text(trajectory.prompt_ids)
            assert 200 >= len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs)
            assert all((lp is not None) == bool(m) for lp, m in zip(trajectory.logprobs, trajectory.mask, strict=True))
    assert engine.open_requests == 0 and tools.open_sessions == 0
