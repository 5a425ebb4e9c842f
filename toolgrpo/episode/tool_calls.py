"""One tool call, from the text that the model wrote to what came back.

A format's parser makes a `CallAttempt`, the tools a `ToolResult`; a `Call` is both, as a reader of an episode sees them.

Not covered: how calls are written (`toolgrpo.chat`), how they are run (`toolgrpo.tools`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class AttemptStatus(StrEnum):
    """Outcome of one tool call that the model tried to write."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    XML = "xml"  # in XML tags where JSON belongs; not run unless `unmarked_calls` is `accept`
    UNMARKED = "unmarked"  # without the markers of a call; it has a name and arguments, and is not run
    ACCEPTED = "accepted"  # the same, and run (`unmarked_calls: accept`)


RUNNABLE = frozenset({AttemptStatus.OK, AttemptStatus.ACCEPTED})
"""Of these calls the tools are asked; all others are answered with what is wrong with them."""
READABLE = RUNNABLE | {AttemptStatus.UNKNOWN_TOOL, AttemptStatus.BAD_ARGUMENTS}
"""These calls stand there as calls, whatever became of them."""
WITHOUT_MARKERS = frozenset({AttemptStatus.UNMARKED, AttemptStatus.ACCEPTED})


class ToolErrorKind(StrEnum):
    """Why a tool call has no good result."""

    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    UNMARKED = "unmarked"
    XML = "xml"
    RAISED = "raised"  # the tool raised an exception
    TIMEOUT = "timeout"  # the tool overran its deadline
    DIED = "died"  # the process of the tool went away
    BAD_RESULT = "bad_result"  # the result could not be rendered as text
    LIMIT = "limit"  # the episode's budget of calls is used up
    DROPPED = "dropped"  # the tool raised DropEpisode, which ends the episode


INFRASTRUCTURE_CAUSES = (ToolErrorKind.TIMEOUT, ToolErrorKind.DIED)
NO_NAME = "unnamed"
"""The name in metrics of the tool of a call whose name could not be read."""
NO_TOOL = "unknown"
"""The name in metrics of all tools that models make up: there may be any number of them."""


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """One tool call as the model wrote it, well formed or not."""

    status: AttemptStatus
    raw: str  # the text between the markers, exactly as decoded
    name: str | None = None
    arguments: Mapping[str, Any] | None = None
    detail: str = ""  # for a malformed attempt: what is wrong, in words a model can learn from
    call_id: str | None = None  # as the model wrote it, for a family whose results name the call they answer

    def answered(self, result: ToolResult) -> CallAttempt:
        """Return the same attempt as the tools judged it: a call that they refuse does not stay runnable."""
        refused = {
            ToolErrorKind.UNKNOWN_TOOL: AttemptStatus.UNKNOWN_TOOL,
            ToolErrorKind.BAD_ARGUMENTS: AttemptStatus.BAD_ARGUMENTS,
        }
        if self.status not in RUNNABLE or result.error not in refused:
            return self
        return replace(self, status=refused[result.error], detail=result.content)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call attempt."""

    content: str  # the text the model sees
    name: str | None = None
    error: ToolErrorKind | None = None
    started_s: float = 0.0  # seconds since the episode began
    duration_s: float = 0.0
    left_out: int = 0  # characters of the result that were cut out of the text
    cached: bool = False
    ends_episode: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def truncated(self) -> bool:
        return self.left_out > 0

    @property
    def tool(self) -> str:
        """Return the name of the tool in metrics."""
        return NO_TOOL if self.error is ToolErrorKind.UNKNOWN_TOOL else self.name or NO_NAME


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as a reader of an episode sees it: the attempt, and what came back.

    `result` is None if the episode ended before the call was answered.
    """

    turn: int
    name: str | None
    arguments: Mapping[str, Any]
    status: AttemptStatus
    result: str | None
    error: ToolErrorKind | None
    duration_s: float = 0.0

    @classmethod
    def of(cls, turn: int, attempt: CallAttempt, result: ToolResult | None) -> Call:
        return cls(
            turn=turn,
            name=attempt.name,
            arguments=attempt.arguments or {},
            status=attempt.status,
            result=None if result is None else result.content,
            error=None if result is None else result.error,
            duration_s=0.0 if result is None else result.duration_s,
        )

    @property
    def ok(self) -> bool:
        """Well formed, answered, and without an error."""
        return self.status in RUNNABLE and self.result is not None and self.error is None


_ELIDED = re.compile(
    r'("name": )(?:\.\.\.|"\.\.\.")|\{(?:\.\.\.|"key": "value")\}|(NAME)(?=\[ARGS\]|<｜tool▁sep｜>|<\|channel\|>)'
)


def written(form: str, name: str | None, arguments: Mapping[str, Any] | None) -> str:
    """Return a text with this call wherever it shows the form of one: a model copies what it is shown, dots too."""

    def said(found: re.Match[str]) -> str:
        if found[2]:
            return name or found[2]
        shown = name if found[1] else dict(arguments or {})
        return (found[1] or "") + json.dumps(shown, ensure_ascii=False, default=str)

    return _ELIDED.sub(said, form)
