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
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.errors import EngineError, PluginError
from toolgrpo.rollout import Episode, EpisodeRunner, RolloutBatch, Scheduler
from toolgrpo.rollout.scheduler import run_all
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedReply, ScriptedTools, scripted_runner

CALL = 'call add {"a": 1, "b": 2}'


def runner(engine: ScriptedEngine, tools: ScriptedTools | None = None, **limits: Any) -> EpisodeRunner:
    return scripted_runner(engine, tools or ScriptedTools({"add": lambda a, b: str(a + b)}), engine_retries=1, **limits)


def episodes(n: int) -> list[Episode]:
    return [Episode(messages=({"role": "user", "content": f"q{i}"},), row={"i": i}) for i in range(n)]


def number(request: SampleRequest) -> int:
    """Which episode a request belongs to, read out of its prompt."""
    return int(ByteChat.text(request.ids).split("user:q")[1].split("|")[0])


def run(clock: FakeClock, n: int, shared: EpisodeRunner, **options: Any) -> RolloutBatch:
    return clock.run(run_all(episodes(n), Scheduler(shared, **options)))


def test_one_trajectory_per_episode_in_input_order() -> None:
    engine = ScriptedEngine(lambda r, _: ScriptedReply(ByteChat.say(f"a{number(r)}"), delay_s=10.0 - number(r)))
    result = run(FakeClock(), 8, runner(engine))
    assert [t.messages[0]["content"] for t in result.trajectories] == [f"a{i}" for i in range(8)]
    assert not engine.is_open


def test_nobody_waits_for_a_slower_sibling() -> None:
    """Episode 0's tool takes 100 s; the others, with four turns of 1 s each, are done long before."""
    ends: dict[int, float] = {}
    clock = FakeClock()

    def script(request: SampleRequest, _: int) -> ScriptedReply:
        turns = ByteChat.text(request.ids).count(">tool:")
        slow = number(request) == 0
        done = turns == (1 if slow else 3)
        return ScriptedReply(ByteChat.say("end" if done else f"{CALL}"), delay_s=100.0 if slow else 1.0)

    shared = runner(ScriptedEngine(script))
    result = run(clock, 4, shared, on_done=lambda _, t: ends.setdefault(len(ends), clock()))
    assert [ends[i] for i in range(4)] == [4.0, 4.0, 4.0, 200.0]
    assert [t.stop_reason for t in result.trajectories] == [StopReason.FINISHED] * 4


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


def test_a_plugin_error_cancels_the_siblings_and_keeps_its_type() -> None:
    def broken(**_: Any) -> str:
        raise PluginError("my_tools.py: a bug")

    def script(request: SampleRequest, _: int) -> Any:
        return ByteChat.say(CALL) if number(request) == 1 else ScriptedReply(ByteChat.say("a"), stalls=True)

    engine = ScriptedEngine(script)
    with pytest.raises(PluginError, match="a bug"):
        run(FakeClock(), 4, runner(engine, ScriptedTools({"add": broken})))
    assert engine.cancelled == 3 and engine.open_requests == 0 and not engine.is_open


def test_cancelling_leaves_nothing_open() -> None:
    engine = ScriptedEngine(lambda r, _: ScriptedReply(ByteChat.say("a"), stalls=True))
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


def test_keyboard_interrupt_passes_through() -> None:
    def script(request: SampleRequest, _: int) -> Any:
        if number(request) == 3:
            raise KeyboardInterrupt
        return ScriptedReply(ByteChat.say("a"), stalls=True)

    engine = ScriptedEngine(script)
    with pytest.raises(KeyboardInterrupt):
        run(FakeClock(), 4, runner(engine))
    assert engine.open_requests == 0


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
        result = FakeClock().run(run_all(episodes(n), Scheduler(shared, max_concurrent=limit)))
    except EngineError:
        pass  # two faults in a row lost an episode: said so, nothing left open
    else:
        assert len(result.trajectories) == n
        for i, trajectory in enumerate(result.trajectories):
            assert f"user:q{i}|" in ByteChat.text(trajectory.prompt_ids)
            assert len(trajectory.ids) <= 200
            assert len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs)
            assert all((lp is not None) == bool(m) for lp, m in zip(trajectory.logprobs, trajectory.mask, strict=True))
    assert engine.open_requests == 0 and tools.open_sessions == 0


def test_a_source_adds_episodes_when_some_end() -> None:
    """What draws another group does: two more episodes for each of the first two, while the third is still running."""
    clock = FakeClock()
    engine = ScriptedEngine(
        lambda r, _: ScriptedReply(ByteChat.say("a"), delay_s=50.0 if number(r) == 2 else 1.0 + number(r))
    )
    ended: list[tuple[str, float]] = []

    async def main() -> None:
        async with Scheduler(runner(engine)) as scheduler:
            asked = {scheduler.submit(one): one for one in episodes(3)}
            while asked:
                for handle in (await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED))[0]:
                    name = asked.pop(handle).messages[0]["content"]
                    ended.append((name, clock()))
                    if name in ("q0", "q1"):
                        asked |= {scheduler.submit(more): more for more in episodes(5)[3:]}

    clock.run(main())
    times = [("q0", 1.0), ("q1", 2.0), ("q3", 5.0), ("q3", 6.0), ("q4", 6.0), ("q4", 7.0), ("q2", 50.0)]
    assert sorted(ended, key=lambda one: (one[1], one[0])) == times, "the slow one delayed nobody"
    assert not engine.is_open
