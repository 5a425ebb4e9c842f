"""Assess a training before it begins: score made-up episodes with its rewards, summarize k episodes
per row from the untrained model, and name the road to a trained one that fits them.

Made-up episodes are asked about before any model is loaded: gold answers, however they may be
written, nonsense, and what a model writes in its first steps, on which a reward that raises would
end a run.

Not covered: what an honest reward of a made-up episode would be (a wrong number is no error);
rewards that look at the state of an environment; reward models; whether the road arrives.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from statistics import fmean, median

from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import RUNNABLE, AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn, copies_result
from toolgrpo.evaluation.grading import MADE_UP, Grader, grade
from toolgrpo.learning.advantages import is_dead
from toolgrpo.rewards.gold import GoldEpisode, as_answer, as_boxed_answer, as_program, as_result_and_answer
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.rollout.row_parts import offered_tools
from toolgrpo.tools.base import ToolProvider

_ENOUGH = 8  # episodes or calls, to say something of all such
_REHEARSED = 3  # rows
# Of a road. Measured, in small settings (recipes/README.md), is _MIXED: with one group of eight reinforcement taught nothing.
_SOLVED = 0.95  # of the episodes
_MIXED = 0.2  # of the groups
_UNTAUGHT = (AttemptStatus.UNCLOSED, AttemptStatus.INVALID_JSON)  # whoever knows the form of calls does not write so
_BROKEN = 0.5  # of the calls, or of the episodes that call
_LIMITS = {StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL}

WRITINGS: Mapping[str, GoldEpisode] = {
    "alone": as_answer,
    "in a box": as_boxed_answer,
    "after a tool's result": as_result_and_answer,
    "as a program": as_program,
}
"""How a gold answer may be written down."""


def nonsense(row: Row) -> list[Message]:
    return [{"role": "assistant", "content": "I would rather talk about the weather."}]


def score_made_up(
    rows: Sequence[Row],
    write: GoldEpisode,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None,
    threshold: float,
) -> RolloutBatch:
    """Return these rows graded, each with the episode that `write` makes of it."""
    episodes = tuple(Scored(row, _episode(write(row))) for row in rows)
    return grade(RolloutBatch(episodes=episodes), rewards, weights, threshold=threshold)


def rehearse(
    rows: Iterable[Row],
    tools: ToolProvider | None,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None = None,
    *,
    by_agent: bool = False,
) -> None:
    """Open the tools of one episode and close them; then ask each reward about made-up episodes.

    Those of an agent bring a reward, as it would return one.

    Raises what they would raise in a training, or after it.
    """
    chosen = list(islice(rows, _REHEARSED))
    given = 0.0 if by_agent else asyncio.run(_opened(offered_tools(tools, chosen[0]), chosen[0]))
    chosen = (chosen * _REHEARSED)[:_REHEARSED]  # a list of one is no test of lengths
    answer = str(chosen[0].get("answer", "an answer"))
    answers = (answer, ""), ("", ": its answer is empty, as that of a real one may be")
    made = [_episode([{"role": "assistant", "content": text}], how=how) for text, how in answers]
    episodes = (
        Scored(row, replace(one, reward=given)) for row, one in zip(chosen, (*made, _failed_call()), strict=True)
    )
    grade(RolloutBatch(episodes=tuple(episodes), mode="heldout"), rewards, weights, threshold=1.0)


async def _opened(tools: ToolProvider | None, row: Row) -> float | None:
    """Open one episode's tools, which resets an environment, and return the reward it gives then."""
    if tools is None:
        return None
    async with tools.session(row) as session:
        return await session.reward()


def _episode(messages: Sequence[Message], turn: Turn | None = None, how: str = "") -> Trajectory:
    ledger = Ledger([0])
    ledger.sampled([0], [0.0])
    ledger.say(*messages)
    ledger.turn(turn or Turn(0, 1, messages[-1]["content"], None))
    return ledger.finish(StopReason.FINISHED, metadata={MADE_UP: f"an episode that toolgrpo made up{how}"})


def _failed_call() -> Trajectory:
    """Return an episode that calls a tool that does not exist."""
    name, arguments, error = "no_such_tool", {"a": 1}, "Error: there is no tool named 'no_such_tool'"
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": error},
    )
    attempt = CallAttempt(AttemptStatus.OK, f'{{"name": "{name}", "arguments": {{"a": 1}}}}', name, arguments)
    result = ToolResult(error, name, ToolErrorKind.UNKNOWN_TOOL)
    return _episode(
        messages, Turn(0, 1, "", None, attempts=(attempt,), results=(result,)), ": it calls no tool that there is"
    )


@dataclass(frozen=True, slots=True)
class Untrained:
    """The facts about n rows with k episodes each."""

    n: int
    k: int
    episodes: int
    callers: int  # episodes with a well-formed call
    cut: int  # those of them that a limit ends, though they make no call again
    calls: int
    malformed: Counter[str]  # calls that could not be run, by cause
    failed: Counter[str]  # calls that ran and failed, by cause
    stops: Counter[str]
    rewards: tuple[float, ...]
    live: float  # share of the groups whose rewards differ
    mixed: int  # groups in which some episodes succeed and some fail
    pass_1: float
    pass_k: float
    copied: int  # episodes that end with a copy of their last result
    never: Mapping[str, int]  # tasks of which no episode succeeds, and how many there were, beside others that do

    @property
    def calling(self) -> float:
        """Return the share of episodes with a well-formed call."""
        return self.callers / self.episodes


def untrained_facts(batch: RolloutBatch, k: int) -> Untrained:
    """Summarize a batch in which the k episodes of a row are adjacent."""
    groups = [batch.episodes[start : start + k] for start in range(0, len(batch), k)]
    attempts = [attempt for trajectory in batch.trajectories for attempt in trajectory.attempts]
    results = [result for trajectory in batch.trajectories for result in trajectory.results]
    malformed = Counter(a.status.value for a in attempts if a.status not in RUNNABLE)
    callers = [t for t in batch.trajectories if any(one.status in RUNNABLE for one in t.attempts)]
    solved = [sum(bool(one.success) for one in group) for group in groups]
    return Untrained(
        n=len(groups),
        k=k,
        episodes=len(batch),
        callers=len(callers),
        calls=len(attempts),
        malformed=malformed,
        failed=Counter(r.error.value for r in results if r.error is not None and r.error.value not in malformed),
        cut=sum(t.stop_reason in _LIMITS and not _repeats(t) for t in callers),
        stops=Counter(t.stop_reason.value for t in batch.trajectories),
        rewards=tuple(total for total in batch.totals if total is not None),
        live=fmean(not is_dead([episode.total for episode in group]) for group in groups),
        mixed=sum(len({bool(one.success) for one in group if one.drop is None}) == 2 for group in groups),
        pass_1=fmean(batch.successes),
        pass_k=fmean(n > 0 for n, group in zip(solved, groups, strict=True) if any(one.drop is None for one in group)),
        copied=sum(copies_result(trajectory.messages) for trajectory in batch.trajectories),
        never=_never_solved(batch.episodes),
    )


def _repeats(trajectory: Trajectory) -> bool:
    """Return whether a call is made again, be it one that failed: a higher limit would not help."""
    made = [(attempt.name, repr(attempt.arguments)) for attempt in trajectory.attempts]
    return len(set(made)) < len(made)


def _never_solved(episodes: Sequence[Scored]) -> dict[str, int]:
    """Return the tasks (of the rows' column `task`) without a success; none where nothing succeeds at all."""
    asked, solved = Counter[str](), Counter[str]()
    for episode in episodes:
        task = episode.row.get("task")
        if task is not None and episode.drop is None:
            asked[str(task)] += 1
            solved[str(task)] += bool(episode.success)
    return {task: n for task, n in asked.items() if n >= _ENOUGH and not solved[task]} if solved.total() else {}


class Road(StrEnum):
    """A way to a trained model, for the first in this order whose condition holds."""

    LEAVE = "leave it"  # nearly every episode succeeds
    REINFORCE = "reinforce"  # in a fifth of the groups or more some episodes succeed and some fail
    MEND = "fix tools, prompt or limits"  # half of the calls go wrong in one way, or a limit cuts half of what calls
    SHOW = "show worked calls"  # else; its own rare successes may be such, where nobody can write any


def road_of(facts: Untrained) -> Road:
    """Return the road that fits, by successes: groups that differ only in what they earn on the way may learn that alone."""
    if facts.pass_1 >= _SOLVED:
        return Road.LEAVE
    if facts.mixed >= _MIXED * facts.n:
        return Road.REINFORCE
    if main_cause(facts) is not None or facts.cut >= max(_ENOUGH, _BROKEN * facts.callers):
        return Road.MEND
    return Road.SHOW


def main_cause(facts: Untrained) -> str | None:
    """Return what is wrong with half of the calls, unless their form has yet to be shown."""
    wrong = (facts.malformed + facts.failed).most_common()
    return next(
        (cause for cause, count in wrong if cause not in _UNTAUGHT and count >= max(_ENOUGH, _BROKEN * facts.calls)),
        None,
    )


def spread(values: Sequence[float]) -> str:
    """Describe a distribution."""
    p95 = sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
    return f"median {median(values):.0f}, 95 % within {p95:.0f}, longest {max(values):.0f}"
