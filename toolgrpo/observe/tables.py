"""A readable table of the episodes of one rollout: what was asked, which tools ran, how it ended, what it was worth.

Pure functions; `trackers.py` sends the table to where a person looks at it. Not covered: tokens and log-probabilities,
which the recording has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from toolgrpo.trajectory import Trajectory

__all__ = ["COLUMNS", "EpisodeRow", "as_markdown", "episode_rows"]

_LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode, short enough to read."""

    step: int
    episode: int
    reward: float
    stop: str
    turns: int
    tools: str  # each call with its arguments and result, in order
    failed_calls: int
    prompt: str  # its last message
    answer: str  # the last thing the model said
    rewards: str  # of each reward function

    def values(self) -> list[Any]:
        return list(asdict(self).values())


COLUMNS = [field.name for field in fields(EpisodeRow)]


def episode_rows(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    rewards_by_name: Mapping[str, Sequence[float]],
    *,
    step: int,
) -> list[EpisodeRow]:
    """One row an episode, in order."""
    table = []
    for i, (trajectory, reward, row) in enumerate(zip(trajectories, rewards, rows, strict=True)):
        said = [message for message in trajectory.messages if message.get("role") == "assistant"]
        table.append(
            EpisodeRow(
                step=step,
                episode=int(trajectory.metadata.get("episode", i)),
                reward=reward,
                stop=str(trajectory.stop_reason),
                turns=len(trajectory.turns),
                tools=_short("\n".join(_calls(trajectory))),
                failed_calls=sum(not result.ok for result in trajectory.results),
                prompt=_short(_last_text(row["prompt"])),
                answer=_short(str(said[-1].get("content") or "")) if said else "",
                rewards=", ".join(f"{name} {values[i]:g}" for name, values in rewards_by_name.items()),
            )
        )
    return table


def as_markdown(rows: Sequence[EpisodeRow]) -> str:
    """For trackers that know text only."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _calls(trajectory: Trajectory) -> list[str]:
    calls = []
    for turn in trajectory.turns:
        for attempt, result in zip(turn.attempts, turn.results, strict=False):  # the last turn's calls may not have run
            arguments = ", ".join(f"{k}={v!r}" for k, v in (attempt.arguments or {}).items())
            calls.append(f"{attempt.name or '?'}({arguments}) -> {result.content}")
    return calls


def _last_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1].get("content") or "") if prompt else ""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ..."


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
