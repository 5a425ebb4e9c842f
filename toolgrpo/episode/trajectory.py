"""One finished episode: its tokens, messages, turns and calls, immutable.

Invariants:

* `len(ids) == len(mask) == len(logprobs)`, always.
* A log-probability that was not given is `None`, never 0. Context tokens have none.
* An episode of one training sequence is its prompt and its ids. One of several has all of them in
  its row, one after the other (`toolgrpo/episode/segments.py`), and `segments` gives each by itself.

A trajectory is written by a `Ledger` (`toolgrpo/episode/token_ledger.py`); its calls are those of
`toolgrpo/episode/tool_calls.py`. Not covered: what the tokens mean (`toolgrpo.chat`), and who sampled them
(`toolgrpo.engines`). This module imports nothing heavier than the standard library.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.segments import Row, Segment, SegmentStart, check_starts, cut_at_starts, lay_out
from toolgrpo.episode.tool_calls import READABLE, AttemptStatus, Call, CallAttempt, ToolErrorKind, ToolResult

Message = dict[str, Any]
"""One chat message in the OpenAI form: role, content, and for assistants `tool_calls`,
`reasoning_content`.
"""


def with_observation(messages: Sequence[Message], observation: str) -> list[Message]:
    """Append the first observation of an environment to the last message of a prompt."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{joined_text(last.get('content')) or ''}{observation}"}]


def joined_text(content: Any) -> Any:
    """Return the content of a message whose parts are all text as one text; any other as it is."""
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return content
    return "".join(str(part.get("text") or "") for part in content)


class StopReason(StrEnum):
    """Why an episode ended; each has exactly one."""

    FINISHED = "finished"  # the model answered without calling a tool
    MAX_TURNS = "max_turns"
    MAX_USER_TURNS = "max_user_turns"  # the user would go on, and may not
    LENGTH = "length"  # max_completion_length was used up
    CONTEXT_FULL = "context_full"  # the engine's context window was used up, or `context` and no history fits
    DEADLINE = "deadline"
    STOP_TOOL = "stop_tool"  # a tool that ends the episode was called, or an environment said that it is over
    ENGINE_FAILURE = "engine_failure"
    DROPPED = "dropped"  # a tool or an environment raised DropEpisode


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: what was said, tried and came back, and where its tokens lie."""

    start: int  # index into Trajectory.ids of the first sampled token
    end: int  # one past the last sampled token
    content: str
    reasoning: str | None
    attempts: tuple[CallAttempt, ...] = ()
    results: tuple[ToolResult, ...] = ()
    closed: bool = True  # False: cut by a limit before its end-of-turn token
    duration_s: float = 0.0  # of the sampling
    started_s: float = 0.0  # when the engine was asked, in seconds since the episode began
    reward: float | None = None  # what a stateful environment gave after the turn's calls, if it gives one by step
    user: str | None = None  # what the user said to it, where the episode went on with that
    weights: tuple[int, int] | None = None  # the steps of the weights that its sampling began and ended with, if known

    def answered(self, results: Sequence[ToolResult]) -> Turn:
        """Return the turn with what came back, one result for each of its first attempts.

        Whether a tool exists and takes the arguments only shows here: an attempt that was read well
        and refused for one of the two gets the status that says so.
        """
        judged = [attempt.answered(result) for attempt, result in zip(self.attempts, results, strict=False)]
        return replace(self, attempts=(*judged, *self.attempts[len(judged) :]), results=tuple(results))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode.

    `ids` are the tokens after the prompt, with the prompts of later segments among them; `mask` is 1
    on those the model sampled.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    messages: tuple[Message, ...]  # after the prompt
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    started_s: float = 0.0
    duration_s: float = 0.0
    failure: str | None = None  # what went wrong, for ENGINE_FAILURE, and CONTEXT_FULL of a limited context
    reward: float | None = None  # given by a stateful environment, if it gives one
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dropped: Drop | None = None  # why it cannot be scored: a tool or an environment says so, or it had no room
    segment_starts: tuple[SegmentStart, ...] = ()  # where later segments begin; none where the episode is one sequence

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(
                f"a trajectory's ids, mask and logprobs must have one length; got {len(self.ids)}, {len(self.mask)}, {len(self.logprobs)}"
            )
        if self.segment_starts:
            check_starts(self.segment_starts, self.mask)

    @classmethod
    def of_segments(
        cls,
        segments: Sequence[Segment],
        *,
        messages: Sequence[Message],
        turns: Sequence[Turn],
        stop_reason: StopReason,
        **others: Any,
    ) -> Trajectory:
        """Return the episode of these segments, given in order of birth.

        Turns count tokens of the whole row; `segments.first_columns` says where in it the ids of
        each segment begin.
        """
        row = lay_out(segments)._asdict()
        return cls(**row, messages=tuple(messages), turns=tuple(turns), stop_reason=stop_reason, **others)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return every training sequence of the episode, in order of birth."""
        row = Row(self.prompt_ids, self.ids, self.mask, self.logprobs, self.segment_starts)
        ends = [*(at.start for at in self.segment_starts), len(self.ids)]
        found, start = [], 0
        for one, end in zip(cut_at_starts(row), ends, strict=True):
            drew = [turn.weights for turn in self.turns if turn.weights is not None and start <= turn.start < end]
            found.append(replace(one, weights=(drew[0][0], drew[-1][1]) if drew else None))
            start = end
        return tuple(found)

    @property
    def n_sampled(self) -> int:
        return sum(self.mask)

    @property
    def n_context(self) -> int:
        """Return the tokens that were added and not sampled; what is read again in a new segment is not added."""
        return len(self.mask) - sum(self.mask) - sum(at.n_prompt for at in self.segment_starts)

    @property
    def attempts(self) -> tuple[CallAttempt, ...]:
        return tuple(attempt for turn in self.turns for attempt in turn.attempts)

    @property
    def results(self) -> tuple[ToolResult, ...]:
        return tuple(result for turn in self.turns for result in turn.results)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return every call attempt with what came back, in order, malformed ones included."""
        return tuple(
            Call.of(number, attempt, turn.results[place] if place < len(turn.results) else None)
            for number, turn in enumerate(self.turns)
            for place, attempt in enumerate(turn.attempts)
        )

    @property
    def has_logprobs(self) -> bool:
        """Return whether every sampled token came with its log-probability."""
        return all(lp is not None for lp, m in zip(self.logprobs, self.mask, strict=True) if m)

    @property
    def ended_itself(self) -> bool:
        """Return whether the model, or a tool, ended it, and no limit did, an agent's own one neither."""
        # the last of several conversations of an agent, which overlap
        last = max(reversed(self.turns), key=lambda turn: turn.started_s, default=None)
        closed = last is None or last.closed
        return self.stop_reason in (StopReason.FINISHED, StopReason.STOP_TOOL) and closed

    def completion(self) -> list[Message]:
        """Return what a reward reads: a copy of the messages that ends with one of the assistant.

        That is an empty one where the episode ended before the model answered a tool or a user. So
        `completion[-1]["content"]` is the model's last text, and nobody is paid for a tool's words.
        """
        said = copy.deepcopy(list(self.messages))
        if not said or said[-1]["role"] != "assistant":
            said.append({"role": "assistant", "content": ""})
        return said

    def to_record(self, *, shared: bool = False) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_record` gives back an equal trajectory.

        Not by `asdict`, which copies every token for itself: recording would cost ten times as
        much. What can be changed is copied, unless the record may be `shared`: for whoever writes
        it down at once.
        """
        copied: Callable[[Any], Any] = (lambda value: value) if shared else _copied
        record = _fields(self)
        record["messages"] = copied(self.messages)
        record["metadata"] = copied(dict(self.metadata))
        record["turns"] = tuple(
            _fields(turn)
            | {
                "attempts": tuple(
                    _fields(attempt) | {"arguments": copied(attempt.arguments)} for attempt in turn.attempts
                ),
                "results": tuple(_fields(result) for result in turn.results),
            }
            for turn in self.turns
        )
        starts = tuple(_fields(start) for start in record.pop("segment_starts"))
        if starts:  # the record of an episode of one segment says nothing of them
            record["segment_starts"] = starts
        record["dropped"] = None if self.dropped is None else _fields(self.dropped)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Return the trajectory of a record, also after a round trip through JSON text.

        A record may hold more than a trajectory, as those that
        `toolgrpo.observe.recorder.read_episodes` gives.
        """
        turns = tuple(
            Turn(
                **{
                    **{name: value for name, value in turn.items() if name != "taken_over"},  # of older recordings
                    "weights": None if turn.get("weights") is None else tuple(turn["weights"]),
                    "attempts": tuple(
                        CallAttempt(**{**a, "status": AttemptStatus(a["status"])}) for a in turn["attempts"]
                    ),
                    "results": tuple(
                        ToolResult(**{**r, "error": None if r["error"] is None else ToolErrorKind(r["error"])})
                        for r in turn["results"]
                    ),
                }
            )
            for turn in record["turns"]
        )
        dropped = record.get("dropped")
        return cls(
            **{
                **{name: record[name] for name in cls.__dataclass_fields__ if name in record},
                "prompt_ids": tuple(record["prompt_ids"]),
                "ids": tuple(record["ids"]),
                "mask": tuple(record["mask"]),
                "logprobs": tuple(record["logprobs"]),
                "messages": tuple(record["messages"]),
                "turns": turns,
                "stop_reason": StopReason(record["stop_reason"]),
                "segment_starts": tuple(SegmentStart(**start) for start in record.get("segment_starts", ())),
                "dropped": dropped and Drop(DropCause(dropped["cause"]), dropped["reason"]),
            }
        )


def _copied(value: Any) -> Any:
    """Return a copy of what JSON can hold; anything else is shared."""
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value


def _fields(value: Trajectory | Turn | CallAttempt | ToolResult | SegmentStart | Drop) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


# Void turns: those with neither a call nor a final answer (SimpleTIR, arXiv 2509.02479).
#
# A turn of nothing, of reasoning alone, one that was cut before a call, or one whose calls cannot be
# read says nothing that anybody could go on from. An answer that copies a result with its tags says
# nothing of its own.


def is_void(turn: Turn) -> bool:
    """Return whether a turn has neither a call that could be read nor a final answer.

    A final answer is some text, said to its end, with no attempt at a call.
    """
    if turn.attempts:
        return not any(attempt.status in READABLE for attempt in turn.attempts)
    return not (turn.closed and turn.content.strip())


def is_void_record(turn: Mapping[str, Any]) -> bool:
    """Return the same of a turn as it is recorded."""
    if attempts := turn.get("attempts"):
        return not any(attempt.get("status") in READABLE for attempt in attempts)
    return not (turn.get("closed", True) and str(turn.get("content") or "").strip())


def has_void_turn(trajectory: Trajectory) -> bool:
    return any(map(is_void, trajectory.turns))


def copies_result(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an episode ends with a copy of its last result, in the tags of a result."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] != "tool":
        return False
    _, opened, said = str(messages[-1].get("content") or "").rpartition("<tool_response>")
    return bool(opened) and said.partition("</tool_response>")[0].strip() == str(messages[-2].get("content")).strip()


# Reading an episode, for those who write rewards: `toolgrpo.rewards` has these names.


def final_answer(completion: Sequence[Message]) -> str:
    """Return the text of the last message if it is the model's and calls no tool, else ""."""
    if not completion:
        return ""
    last = completion[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return ""
    _, end, said = str(last.get("content") or "").rpartition("</think>")
    return "" if not end and said.lstrip().startswith("<think>") else said.strip()  # thoughts that were cut off


def last_tool_response(completion: Sequence[Message]) -> str | None:
    """Return the text of the last tool message."""
    return next((str(message["content"]) for message in reversed(completion) if message["role"] == "tool"), None)


def tool_counts(completion: Sequence[Message]) -> Counter[str]:
    """Count tool messages by the name of their tool, without those that have none."""
    return Counter(
        str(message["name"]) for message in completion if message["role"] == "tool" and message.get("name") is not None
    )


def calls(trajectory: Trajectory) -> tuple[Call, ...]:
    """Return every call attempt of an episode with its status and result, in order, malformed ones too."""
    return trajectory.calls
