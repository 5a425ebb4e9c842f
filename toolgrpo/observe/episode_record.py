"""One episode as one record: for people first, ids and numbers last (docs/episodes.md)."""

from __future__ import annotations

from typing import Any

from toolgrpo.observe.records import SCHEMA, prompt_id, prompt_messages
from toolgrpo.rollout.batch import RolloutBatch, RolloutTimes, Row, Scored
from toolgrpo.trajectory import Trajectory

_FOR_PEOPLE = ("messages", "turns")
_NUMBERS = ("prompt_ids", "ids", "mask", "logprobs")


def batch_records(batch: RolloutBatch, first_number: int = 0) -> list[dict[str, Any]]:
    """Return a record of each episode.

    An episode without a number of its own gets one, from `first_number` on.
    """
    return [
        _record(batch, episode, _number(batch, place, first_number), group_number(batch, place, first_number), question)
        for place, (episode, question) in enumerate(zip(batch.episodes, _prompt_ids(batch), strict=True))
    ]


def group_number(batch: RolloutBatch, place: int, first_number: int = 0) -> int:
    """Return the number of the first episode of the group in which the one at this place is."""
    return _number(batch, place, first_number) - (batch.offset + place) % batch.group_size


def _number(batch: RolloutBatch, place: int, first_number: int) -> int:
    return int(batch.episodes[place].trajectory.metadata.get("episode", first_number + place))


def _prompt_ids(batch: RolloutBatch) -> list[str]:
    """Return the name of each episode's question, made once where several in a row have the same."""
    names: list[str] = []
    before: Row | None = None
    for episode in batch.episodes:
        if before is None or episode.row != before:
            before = episode.row
            row = {name: value for name, value in before.items() if name != "prompt"}
            names.append(prompt_id(before.get("prompt"), row))
        else:
            names.append(names[-1])
    return names


def _record(batch: RolloutBatch, episode: Scored, number: int, group: int, question: str) -> dict[str, Any]:
    trajectory = episode.trajectory
    row = {name: value for name, value in episode.row.items() if name != "prompt"}
    prompt = episode.row.get("prompt")
    whole = trajectory.to_record(shared=True)
    return {
        "schema": SCHEMA,
        "step": batch.step,
        "mode": batch.mode,
        "episode": number,
        "group": group,
        "prompt_id": question,
        "success": episode.success,
        "reward_given": episode.total,
        "rewards": dict(episode.rewards),
        "advantage": episode.advantage,
        **_of_turns(episode),
        **({} if episode.drop is None else {"drop": {"cause": episode.drop.cause, "reason": episode.drop.reason}}),
        **({} if episode.trained else {"trained": False}),
        "prompt": prompt_messages(prompt),
        **{name: whole.pop(name) for name in _FOR_PEOPLE},
        "row": row,
        **{name: value for name, value in whole.items() if name not in _NUMBERS},
        "weight_version": _weight_version(trajectory, batch.step),
        "timings": _timings(trajectory, batch.times),
        **{name: whole[name] for name in _NUMBERS},
    }


def _weight_version(trajectory: Trajectory, step: int) -> int:
    """Return the step whose weights drew the first token; that of the batch where no turn says it."""
    return next((turn.weights[0] for turn in trajectory.turns if turn.weights is not None), step)


def _timings(trajectory: Trajectory, times: RolloutTimes) -> dict[str, Any]:
    queued_s = max(0.0, trajectory.started_s - times.started_s) if times.started_s else 0.0
    return {
        "queued_s": round(queued_s, 4),
        "duration_s": round(trajectory.duration_s, 4),
        "rollout_s": round(times.duration_s, 4),
        "segments": segments(trajectory, queued_s),
    }


def segments(trajectory: Trajectory, queued_s: float) -> list[dict[str, Any]]:
    """Return where the time of an episode went, in seconds since its rollout began."""
    found: list[dict[str, Any]] = []
    if queued_s > 0:
        found.append({"what": "queued", "start_s": 0.0, "s": round(queued_s, 4)})
    for number, turn in enumerate(trajectory.turns):
        found.append(_segment("decoding", number, queued_s + turn.started_s, turn.duration_s))
        found.extend(
            {**_segment("tool", number, queued_s + result.started_s, result.duration_s), "name": result.name}
            for result in turn.results
            if result.duration_s > 0
        )
    return found


def _segment(what: str, turn: int, start_s: float, s: float) -> dict[str, Any]:
    return {"what": what, "turn": turn, "start_s": round(start_s, 4), "s": round(s, 4)}


def _of_turns(episode: Scored) -> dict[str, Any]:
    """Return what the turns were worth by themselves, and what they got, where anybody says so."""
    rewards, advantages = episode.turn_rewards, episode.turn_advantages
    return {
        **({} if rewards is None else {"turn_rewards": list(rewards)}),
        **({} if advantages is None else {"turn_advantages": list(advantages)}),
    }
