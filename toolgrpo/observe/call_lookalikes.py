"""Recognize calls that a model writes in another form than its own.

A model that never calls a tool often does call one, in the form of another family: in a code fence,
as a line of Python, with markers that are mere text to its tokenizer. Each turn that is no call is
looked at once, and counted under the first form that it has.

Not covered: whether the call would be a good one (`toolgrpo.chat.unmarked` asks that of the forms
that it can accept).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Trajectory

FORMS = {
    "markers": "markers that are plain text here, such as <tool_call>",
    "fenced_json": "JSON in a code fence",
    "json": "bare JSON",
    "react": "lines `Action:` and `Action Input:`",
    "python": "a call written in Python",
}
_LOOKED_AT = 20_000  # characters of a turn
_MARKERS = re.compile(
    r"</?tool_calls?>|<function[_=]|<function>|\[TOOL_CALLS\]|<\|python_tag\|>|<invoke\b|<\|tool[_▁]calls?"
    r"|<\|call\|>|<\|channel\|>commentary|<minimax:tool_call>|<arg_key>"
)
_NAME_KEY = re.compile(r'"(?:name|function|tool|tool_name)"\s*:')
_ARGUMENTS_KEY = re.compile(r'"(?:arguments|parameters|args|input)"\s*:')
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*\S", re.MULTILINE)
_ACTION_INPUT = re.compile(r"^[ \t]*Action Input:", re.MULTILINE)


def lookalike_form(text: str, tool_names: Collection[str] = ()) -> str | None:
    """Return the form (a key of `FORMS`) in which this text seems to call a tool, or None."""
    text = text[:_LOOKED_AT]
    if _MARKERS.search(text):
        return "markers"
    if "{" in text and _NAME_KEY.search(text) and _ARGUMENTS_KEY.search(text):
        return "fenced_json" if "```" in text else "json"
    if _ACTION.search(text) and _ACTION_INPUT.search(text):
        return "react"
    if any(f"{name}(" in text and _called(name, text) for name in tool_names):
        return "python"
    return None


def count_lookalikes(trajectories: Iterable[Trajectory], tool_names: Collection[str] = ()) -> Counter[str]:
    """Count by form the turns that look like a call and were not parsed as one."""
    forms = (
        lookalike_form(turn.content, tool_names)
        for trajectory in trajectories
        for turn in trajectory.turns
        if all(attempt.status is AttemptStatus.UNMARKED for attempt in turn.attempts)
    )
    return Counter(form for form in forms if form is not None)


def _called(name: str, text: str) -> bool:
    """Return whether a line begins with a call of this tool, or with an assignment of its result."""
    begins = rf"^[ \t]*(?:print\(|[A-Za-z_]\w*[ \t]*=[ \t]*)?(?:await[ \t]+|functions\.|tools\.)?{re.escape(name)}\("
    return re.search(begins, text, re.MULTILINE) is not None
