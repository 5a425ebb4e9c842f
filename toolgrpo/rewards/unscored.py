"""Episodes that a reward does not score: those dropped before, and those it drops itself.

Invariants: a reward is never asked about an episode that a tool or an environment has dropped; one
that raises `DropEpisode` over a batch is asked again about each episode alone, so that only those
it means are dropped; every other failure stays one.

Not covered: a reward that compares episodes with each other sees one at a time then. It should
return `DropEpisode(reason)` in its list instead, in place of a number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from toolgrpo.drops import DropEpisode
from toolgrpo.errors import RewardError

Score = float | None | DropEpisode
"""What an episode is worth to one reward; None: it does not score it."""

_notes: ContextVar[dict[int, DropEpisode] | None] = ContextVar("dropped_by_rewards", default=None)


@contextmanager
def noted_drops() -> Iterator[dict[int, DropEpisode]]:
    """Collect what rewards drop in this block, by the place of the episode in what they are asked."""
    notes: dict[int, DropEpisode] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def as_trl_takes_them(scores: Any) -> Any:
    """Return the scores with None for those that were dropped, and note these."""
    if not any(isinstance(score, DropEpisode) for score in scores):
        return scores
    notes = _notes.get()
    for row, score in enumerate(scores):
        if notes is not None and isinstance(score, DropEpisode):
            notes.setdefault(row, score)
    return [None if isinstance(score, DropEpisode) else score for score in scores]


def ask(reward: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> Any:
    """Return what a reward says of a batch; None for the episodes that it is not asked about."""
    rows, n = _live(arguments)
    if len(rows) < n:
        return _spread(n, rows, ask(reward, only_rows(arguments, rows, n), what) if rows else [], what)
    try:
        return reward(**arguments)
    except DropEpisode as drop:
        if n == 1:
            return [drop]
    alone = [ask(reward, only_rows(arguments, [row], n), what) for row in range(n)]
    return _spread(n, rows, [_one(scores, what) for scores in alone], what)


async def ask_async(reward: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any], what: str) -> Any:
    """Do as `ask` with a reward that is awaited."""
    rows, n = _live(arguments)
    if len(rows) < n:
        return _spread(n, rows, await ask_async(reward, only_rows(arguments, rows, n), what) if rows else [], what)
    try:
        return await reward(**arguments)
    except DropEpisode as drop:
        if n == 1:
            return [drop]
    alone = [await ask_async(reward, only_rows(arguments, [row], n), what) for row in range(n)]
    return _spread(n, rows, [_one(scores, what) for scores in alone], what)


def only_rows(arguments: Mapping[str, Any], rows: Sequence[int], n: int) -> dict[str, Any]:
    """Return the arguments of a reward for some of n episodes: every column has one value for each."""
    return {
        name: [value[row] for row in rows] if isinstance(value, (list, tuple)) and len(value) == n else value
        for name, value in arguments.items()
    }


def _live(arguments: Mapping[str, Any]) -> tuple[list[int], int]:
    """Return which episodes were not dropped before, and how many there are."""
    n = len(arguments["completions"])
    trajectories = arguments.get("trajectories") or [None] * n
    return [row for row, one in enumerate(trajectories) if getattr(one, "dropped", None) is None], n


def _spread(n: int, rows: Sequence[int], scores: Sequence[Score], what: str) -> list[Score]:
    if len(scores) != len(rows):
        raise RewardError(f"{what} returned {len(scores)} rewards for {len(rows)} completions; it must return one each")
    spread: list[Score] = [None] * n
    for row, score in zip(rows, scores, strict=True):
        spread[row] = score
    return spread


def _one(scores: Sequence[Score], what: str) -> Score:
    if len(scores) != 1:
        raise RewardError(f"{what} returned {len(scores)} rewards for one completion; it must return one")
    return scores[0]
