"""A readable table of the episodes of one rollout: what was asked, which tools ran,
how it ended, what it was worth.

Pure functions; `trackers.py` sends the table to where a person looks at it.

Not covered: tokens and log-probabilities, which the recording has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.trajectory import Trajectory

_LONGEST_TEXT = 1000
_LONGEST_CONVERSATION = 4000


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode, short enough to read."""

    step: int
    episode: int
    reward: float | None  # None: dropped
    success: str  # yes, no, or ? where nobody asked
    stop: str
    turns: int
    tools: str  # each call with its arguments and result, in order
    failed_calls: int
    prompt: str  # its last message
    answer: str  # the last thing the model said
    rewards: str  # of each reward function
    conversation: str  # turn by turn: thought, said, called, answered

    def values(self) -> list[Any]:
        return list(asdict(self).values())


COLUMNS = [field.name for field in fields(EpisodeRow)]


def episode_rows(batch: RolloutBatch) -> list[EpisodeRow]:
    """Return one row per episode of a graded batch, in order."""
    table = []
    for i, (episode, total) in enumerate(zip(batch.episodes, batch.totals, strict=True)):
        trajectory = episode.trajectory
        said = [message for message in trajectory.messages if message.get("role") == "assistant"]
        table.append(
            EpisodeRow(
                step=batch.step,
                episode=int(trajectory.metadata.get("episode", i)),
                reward=total,
                success={True: "yes", False: "no"}.get(episode.success, "?"),  # type: ignore[arg-type]
                stop=str(trajectory.stop_reason),
                turns=len(trajectory.turns),
                tools=_short("\n".join(_calls(trajectory))),
                failed_calls=sum(not result.ok for result in trajectory.results),
                prompt=_short(_last_text(episode.row["prompt"])),
                answer=_short(str(said[-1].get("content") or "")) if said else "",
                rewards=", ".join(f"{name} {_number(value)}" for name, value in episode.rewards.items())
                + ("" if episode.drop is None else _short(f" (dropped, {episode.drop})")),
                conversation=_short("\n".join(_conversation(trajectory)), _LONGEST_CONVERSATION),
            )
        )
    return table


def as_markdown(rows: Sequence[EpisodeRow]) -> str:
    """Render the table for trackers that know text only."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _calls(trajectory: Trajectory) -> list[str]:
    return [
        f"{call.name or '?'}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())}) -> {call.result}"
        for call in trajectory.calls
        if call.result is not None
    ]


def _conversation(trajectory: Trajectory) -> Iterator[str]:
    """Yield the lines of an episode, a heading for each turn."""
    for number, turn in enumerate(trajectory.turns, start=1):
        yield f"turn {number}" + ("" if turn.closed else ", cut by a limit")
        if turn.reasoning:
            yield f"thinks: {turn.reasoning}"
        if turn.content:
            yield f"says: {turn.content}"
        for place, attempt in enumerate(turn.attempts):
            arguments = ", ".join(f"{name}={value!r}" for name, value in (attempt.arguments or {}).items())
            yield "calls: " + (f"{attempt.name}({arguments})" if attempt.arguments is not None else attempt.raw)
            if place < len(turn.results):
                result = turn.results[place]
                yield f"result{'' if result.error is None else f' ({result.error})'}: {result.content}"
        if turn.user is not None:
            yield f"user: {turn.user}"
    yield f"ended: {trajectory.stop_reason}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _last_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1].get("content") or "") if prompt else ""


def _short(text: str, longest: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
