"""Turns as a response template describes them: regions of text that patterns open and close.

A response template (transformers 5.13 and later; tokenizers may carry one) says for each field of a message how it opens
and closes, which parser reads what stands between, and how name and arguments are made of that. Its patterns and parsers
are transformers' own here. The walk is not, because transformers' parser gives a message where this package needs
attempts:

* A control token is only ever found by its id: text that spells one is marked (`Guard`) before a pattern sees it.
* Every attempt is kept. An opening token that the opening pattern does not match, a call that nothing closes or that
  another opening cuts off, a body that the parser refuses and text between the arguments that belongs to none are
  attempts with a status.
* What stands before the end of thinking that the prompt opened is thinking.
* Nothing raises, and nothing takes long. A pattern goes over a turn once, not once for each region; what that costs only
  the template's author can know, so all patterns of a turn share `LIMIT_S` of processor time.

Not covered: a call that begins with text, not with a control token, is an attempt only where the opening pattern matches.
Where a template gives no opening for thinking, a turn that was cut while it thought is read as content.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]  # it ships no types; transformers compiles its patterns with it
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.encoding import MARK, Guard, unguarded
from toolgrpo.chat.reading import Marker, Segment, attempt_from, malformed, unclosed
from toolgrpo.trajectory import AttemptStatus, CallAttempt

__all__ = ["CALLS", "CONTENT", "LIMIT_S", "REASONING", "CallForm", "Regions"]

CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "thinking", "reasoning")
LIMIT_S = 1.0  # of processor time for the patterns of one turn; most need a thousandth of it
_MOST_WORK = 10**8  # strings of a body times its length: transformers puts each back with a pass over all of it
_LONGEST_DETAIL = 200


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call as the model's own chat template prints it."""

    text: str
    closing: str
    between: frozenset[str]  # what stands around the arguments, where a pattern finds each of them


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of a turn: its field, where it begins, where its opening ends, and what the opening says."""

    field: Any = None  # a ResponseTemplateField; None is what stands between the fields that have an opening
    begin: int = 0
    start: int = 0
    captures: Mapping[str, str] | None = None  # None: its opening is not as the template describes it


@dataclass(frozen=True, slots=True)
class _Border:
    """Where one region ends and another begins."""

    place: int
    following: _Region
    closes: bool = True  # the region that ends here is closed, not cut off
    all_thinking: bool = False  # all that was said so far was thinking


class Regions:
    """A `Reader` of a response template."""

    def __init__(self, template: ResponseTemplate, control: Sequence[str], end: str, form: CallForm) -> None:
        fields = template.fields
        self.markers = tuple(control)
        self.form = form
        self.guard = Guard(control)
        self.implicit: str | None = template.implicit
        self.calls = fields[CALLS]
        self.reasoning = next((fields[name] for name in REASONING if name in fields), None)
        # What anything can begin, such as a look ahead for the end of thinking, opens nothing by itself.
        self.opening = [f for f in fields.values() if f.open_re and not f.open_re.fullmatch(MARK, partial=True)]
        openers = [token for token in control if self.calls.open_re.fullmatch(token, partial=True)]
        self.opener = regex.compile("|".join(map(re.escape, openers))) if openers else None
        self.end = end  # the token that ends a turn with calls: patterns may want to see it
        self.delimiters = {text for pair in self.calls.content_args.get("string_delims", ()) for text in pair}
        inline = self.calls.content == "xml-inline"
        self.tags = regex.compile(self.calls.content_args["tag_pattern"], regex.DOTALL) if inline else None
        self.thinking = self._thinking()

    def _thinking(self) -> str | None:
        """How a prompt ends that has already opened the model's thinking."""
        if self.reasoning is None or self.reasoning not in self.opening:
            return None
        texts = (*(self.reasoning.open_literals or ()), *self.markers)
        opening = next((text for text in texts if self.reasoning.open_re.fullmatch(text)), None)
        return None if opening is None else str(opening).rstrip()

    def read(self, segments: Iterable[Segment], *, closed: bool, thinking: bool) -> ParsedTurn:
        text = "".join(part.text if isinstance(part, Marker) else self.guard.text(part) for part in segments)
        return _Walk(self, text, closed).turn(_Region(self.reasoning) if thinking else _Region())

    def attempts(self, raw: str, captures: Mapping[str, str], body: str, limit_s: float) -> list[CallAttempt]:
        """What a call that was opened and closed as it should be holds; some templates print a list of calls."""
        try:
            self._check(body, limit_s)
            value = unguarded(process_field(body, self.calls, captures))
            calls = value if isinstance(value, list) else [value]
            return [self._attempt(raw, call) for call in calls] or [self._nameless(raw)]
        except KeyError:
            return [self._nameless(raw)]
        except (ValueError, TypeError, RecursionError, TimeoutError) as error:
            why = str(error.__cause__ or error)[:_LONGEST_DETAIL] or type(error).__name__
            return [self.unreadable(raw, why, unguarded(captures.get("name")))]

    def unreadable(self, raw: str, why: str, name: str | None = None) -> CallAttempt:
        detail = f"the call cannot be read: {why}; a call is {self.form.text}"
        return malformed(AttemptStatus.INVALID_JSON, raw, detail, name)

    def _nameless(self, raw: str) -> CallAttempt:
        return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; a call is {self.form.text}")

    def _attempt(self, raw: str, call: Any) -> CallAttempt:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            return self._nameless(raw)
        arguments = function.get("arguments", {})
        attempt = attempt_from(raw, name, {} if arguments is None else arguments)
        if attempt.status is AttemptStatus.OK:
            json.dumps(attempt.arguments, allow_nan=False)  # transformers' JSON takes NaN, which is a ValueError here
        return attempt

    def _check(self, body: str, limit_s: float) -> None:
        """Raise if transformers' parser would drop a part of this body, or take long over it."""
        if len(body) * sum(map(body.count, self.delimiters)) > _MOST_WORK:
            raise ValueError("there are too many strings in it")
        if self.tags is None:
            return
        position = 0
        tags = [(tag.start(), tag.end()) for tag in self.tags.finditer(body, timeout=limit_s)]
        for start, end in [*tags, (len(body), len(body))]:
            between = unguarded(body[position:start]).strip()
            if between and between not in self.form.between:
                raise ValueError(f"{between[:60]!r} is no argument")
            position = end


class _Walk:
    """A turn, half read."""

    def __init__(self, form: Regions, text: str, closed: bool) -> None:
        self.form = form
        self.text = text + form.end if closed else text
        self.length = len(text)
        self.closed = closed
        self.started_s = time.process_time()
        self.matches: dict[Any, Any] = {}  # for each pattern the first match that has not been passed
        self.content: list[str] = []
        self.outside: list[str] = []  # text that belongs to no field
        self.thoughts: list[str] | None = None
        self.attempts: list[CallAttempt] = []

    def turn(self, region: _Region) -> ParsedTurn:
        try:
            while (border := self._border(region)) is not None:
                if border.all_thinking:
                    self.content, self.outside, self.attempts = [], [], []
                    region = _Region(self.form.reasoning)
                self._take(region, border.place, border.closes)
                region = border.following
            self._take(region, self.length, self.closed and getattr(region.field, "close_re", None) is None)
        except TimeoutError:
            rest = unguarded(self.text[region.begin : self.length])
            self.attempts.append(self.form.unreadable(rest, "it takes too long to read"))
        apart = bool(self.attempts) or self.thoughts is not None
        said = ("" if self.form.implicit else "\n").join(self.content)
        if not said and not apart:
            said = "".join(self.outside)
        thoughts = None if self.thoughts is None else "\n".join(text.strip("\n") for text in self.thoughts)
        return ParsedTurn(said.strip("\n") if apart else said, thoughts, tuple(self.attempts), self.closed)

    def _take(self, region: _Region, stop: int, closed: bool) -> None:
        """Keep what a region holds."""
        form, body = self.form, self.text[region.start : stop]
        name = form.implicit if region.field is None else region.field.name
        if region.field is form.calls:
            raw = unguarded(self.text[region.begin : stop])
            if not closed:
                self.attempts.append(unclosed(raw, form.form.closing, unguarded((region.captures or {}).get("name"))))
            elif region.captures is None:
                self.attempts.append(form.unreadable(raw, "it does not begin as one"))
            else:
                self.attempts += form.attempts(raw, region.captures, body, self._left_s())
        elif form.reasoning is not None and name == form.reasoning.name:
            self.thoughts = [*(self.thoughts or ()), unguarded(body)]
        elif body:
            (self.content if name == CONTENT else self.outside).append(unguarded(body))

    def _border(self, region: _Region) -> _Border | None:
        """The first place where this region ends; None if it goes on to the end of the turn."""
        form, at = self.form, region.start
        borders: list[_Border] = []
        if region.field is None:
            for field in form.opening:
                found = self._search(field.open_re, at)
                if found is not None and found.end() > found.start():
                    borders.append(_Border(found.start(), _region(field, found)))
            if form.reasoning is not None and form.implicit and self.thoughts is None:
                found = self._search(form.reasoning.close_re, at)
                if found is not None:
                    borders.append(_Border(found.start(), _Region(start=found.end()), all_thinking=True))
        else:
            found = self._search(region.field.close_re, at)
            if found is not None:
                borders.append(_Border(found.start(), _Region(begin=found.end(), start=found.end())))
        if form.opener is not None and region.field in (None, form.calls):
            found = self._search(form.opener, at)
            if found is not None:
                opening = form.calls.open_re.match(self.text, found.start(), timeout=self._left_s())
                broken = _Region(form.calls, found.start(), found.end())
                following = broken if opening is None else _region(form.calls, opening)
                borders.append(_Border(found.start(), following, closes=False))
        return min(borders, key=lambda border: border.place, default=None)

    def _search(self, pattern: Any, at: int) -> Any:
        """The first match from `at` on; each pattern goes over the turn once."""
        if pattern is None:
            return None
        found = self.matches.get(pattern, self)
        if found is self or (found is not None and found.start() < at):
            found = self.matches[pattern] = pattern.search(self.text, at, timeout=self._left_s())
        return found

    def _left_s(self) -> float:
        left_s = LIMIT_S - (time.process_time() - self.started_s)
        if left_s <= 0:
            raise TimeoutError
        return left_s


def _region(field: Any, opening: Any) -> _Region:
    said = {name: text for name, text in opening.groupdict().items() if text is not None}
    return _Region(field, opening.start(), opening.end(), said)
