"""Repeat a recorded episode: its tool calls, its rewards, or the whole episode with a model.

Invariant: the calls are made in their order, those of a turn at the same time, in one session of
the tools, as in the episode. An environment that speaks for the user hears the same answers.

Not covered: what depends on the time or on other episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.evaluation.grading import Grader, grade
from toolgrpo.rollout import RolloutBatch, RolloutBegan, Rollouts, Scored
from toolgrpo.rollout.batch import Row
from toolgrpo.rollout.row_parts import offered_tools
from toolgrpo.rollout.scheduler import run_all, run_blocking
from toolgrpo.tools.base import ToolProvider, speaks

Answer = ToolResult | str | None


@dataclass(frozen=True, slots=True)
class Again:
    """An answer that the model got: to a call, or from the user; what it was then, and what it is now."""

    turn: int
    call: CallAttempt | None  # None: what an environment said for the user, or None where it said no more
    then: Answer
    now: Answer

    @property
    def same(self) -> bool:
        return _seen(self.then) == _seen(self.now)


@dataclass(frozen=True, slots=True)
class SessionAgain:
    """All answers of an episode's tools, and the reward that its environment gives for them now."""

    answers: tuple[Again, ...]
    reward: float | None


def _seen(answer: Answer) -> object:
    return (answer.error, answer.content) if isinstance(answer, ToolResult) else answer


def calls_again(
    tools: ToolProvider,
    row: Row,
    trajectory: Trajectory,
    *,
    cut: Callable[[ToolResult], ToolResult] = lambda result: result,
) -> SessionAgain:
    """Make the calls again; `cut` makes long results as short as the model saw them."""

    async def run() -> SessionAgain:
        made: list[Again] = []
        offered = offered_tools(tools, row)
        if offered is None:
            return SessionAgain((), None)
        async with offered.session(row) as session:
            for number, turn in enumerate(trajectory.turns):
                pairs = [
                    (_made_again(attempt), result)
                    for attempt, result in zip(turn.attempts, turn.results, strict=False)
                    if result.error is not ToolErrorKind.LIMIT
                ]
                now = await session.call([attempt for attempt, _ in pairs]) if pairs else ()
                if now and not any(again.error is ToolErrorKind.DROPPED for again in now):
                    await session.after_turn()  # an environment may move on when it is asked
                made += [
                    Again(number, attempt, then, cut(again)) for (attempt, then), again in zip(pairs, now, strict=True)
                ]
                if speaks(offered) and turn.closed and not turn.attempts:
                    reply = await session.next_user_message(turn.content)
                    if turn.user is not None or trajectory.stop_reason is StopReason.FINISHED:  # else it was not told
                        made.append(Again(number, None, turn.user, reply))
            never_asked = (StopReason.DEADLINE, StopReason.ENGINE_FAILURE, StopReason.DROPPED)
            asked = trajectory.stop_reason not in never_asked
            return SessionAgain(tuple(made), await session.reward() if asked else trajectory.reward)

    return asyncio.run(run())


def rewards_again(
    row: Row,
    trajectory: Trajectory,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None,
    threshold: float,
) -> Scored:
    """Return the episode with what its rewards give for it now."""
    batch = RolloutBatch(episodes=(Scored(row, trajectory),))
    return grade(batch, rewards, weights, threshold=threshold).episodes[0]


def episode_again(rollouts: Rollouts, row: Row, options: SamplingOptions, seed: int) -> Trajectory:
    """Return a new episode of this row; the same seed draws the same one from the same weights."""
    episode = replace(rollouts.episode(row, 0), seed=seed)
    began = RolloutBegan(1, 0, "heldout", "replay")
    return run_blocking(run_all([episode], rollouts.scheduler(options, began))).trajectories[0]


def first_parting(then: Trajectory, now: Trajectory) -> int | None:
    """Return the index of the first token at which two episodes differ, or None."""
    for place, (old, new) in enumerate(zip(then.ids, now.ids, strict=False)):
        if old != new:
            return place
    return None if len(then.ids) == len(now.ids) else min(len(then.ids), len(now.ids))


def _made_again(attempt: CallAttempt) -> CallAttempt:
    """Return an attempt as the tools received it, before they refused it."""
    refused_by_tools = attempt.status in (AttemptStatus.UNKNOWN_TOOL, AttemptStatus.BAD_ARGUMENTS)
    well_read = attempt.name is not None and attempt.arguments is not None
    return replace(attempt, status=AttemptStatus.OK, detail="") if refused_by_tools and well_read else attempt
