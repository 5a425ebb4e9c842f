"""Turns as a response template describes them: regions of text that patterns open and close.

A response template (transformers 5.13 and later; TRL has one for many chat templates, and tokenizers may carry one) says
for each field of a message how it opens and closes, which parser reads what stands between, and how name and arguments
are made of that. Its patterns and parsers are transformers' own here. The walk is not, because transformers' parser gives
a message where this package needs attempts:

* A control token is only ever found by its id: text that spells one is marked (`TextGuard`) before a pattern sees it.
* Every attempt is kept. An opening token that the opening pattern does not match, a call that nothing closes or that
  another opening cuts off, and a body that the parser refuses (`turn_reader.py`) are attempts with a status.
* What stands before the end of thinking that the prompt opened is thinking.
* Nothing raises, and nothing takes long. A pattern goes over a turn once, not once for each region; what that costs only
  the template's author can know, so all patterns of a turn share one second of processor time (`regex_budget.py`).

Two things a pattern may say that matter here, both in the `regex` package: one that begins with `\\G` is tried where the
region begins and nowhere else, and what stands before `\\K` is left in the region.

Not covered: a call that begins with text, not with a control token, is an attempt only where the opening pattern matches.
Where a template gives no opening for thinking, a turn that was cut while it thought is read as content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]  # it ships no types; transformers compiles its patterns with it

from toolgrpo.chat.attempts import (
    CallForm,
    Marker,
    Segment,
    is_call,
    json_attempts,
    load_json,
    nameless,
    unclosed,
    unreadable,
    xml_attempt,
)
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.encoding import TextGuard, is_guarded, unguarded
from toolgrpo.chat.transformers_seam import ResponseTemplate, process_field
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.support.regex_budget import RegexBudget

CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "thinking", "reasoning")


# What a call holds: its body, read by a content parser of transformers, as attempts with a status.
#
# Content parsers and transforms are transformers' own. They give a value or raise; here every attempt is kept:
#
# * A call without a name, a body that the parser refuses and text between the arguments that belongs to none are attempts
#   that say what is wrong, with the form a call should have.
# * What no record could hold (NaN, infinite numbers, half a character, very deep nesting) is refused.
# * JSON between the markers of a family that writes another form, with a name and arguments in it, can mean only one thing.
#
# A body that no content parser of transformers can read is read by a function of `call_bodies.py`, which the form names.

_MOST_WORK = 10**8  # strings of a body times its length: transformers puts each back with a pass over all of it
_LONGEST_DETAIL = 200


class CallReader:
    """Reads calls as the field of a response template says."""

    def __init__(self, field: Any, form: CallForm) -> None:
        self.field = field
        self.form = form
        self._named = "name" in field.open_re.groupindex  # the opening says the name
        self._delimiters = {text for pair in field.content_args.get("string_delims", ()) for text in pair}
        inline = field.content == "xml-inline"
        self._tags = regex.compile(field.content_args["tag_pattern"], regex.DOTALL) if inline else None

    def attempts(self, raw: str, captures: Mapping[str, str], body: str, budget: RegexBudget) -> list[CallAttempt]:
        """Return what a call that was opened and closed as it should be holds; some templates print a list of calls.

        `captures` and `body` are guarded text, as the patterns found them; `raw` is what was written.
        """
        name = unguarded(captures.get("name", ""))
        if self._named and name[:1] in ("", "{", "["):
            return self._in_json(raw) or [nameless(raw, self.form)]
        if self.form.body is not None:
            return self._in_json(raw) or self.form.body(raw, name, body)
        if not self._named and self.field.content == "json" and raw.lstrip()[:1] == "<":
            return [xml_attempt(raw, self.form)]
        try:
            self._check(body, budget)
            if name and self.field.content == "json" and not body.strip():
                body = "{}"  # nothing behind a name: no arguments
            value = process_field(body, self.field, captures)
            if is_guarded(body, *captures.values()):
                value = unguarded(value)
            return json_attempts(raw, value, self.form) or [nameless(raw, self.form)]
        except KeyError:
            return [nameless(raw, self.form)]
        except (ValueError, TypeError, RecursionError, TimeoutError) as error:
            why = str(error.__cause__ or error)[:_LONGEST_DETAIL] or type(error).__name__
            return [unreadable(raw, why, self.form, name or None)]

    def _in_json(self, raw: str) -> list[CallAttempt]:
        """Calls that are spelled as JSON although the family writes them otherwise; none if a part of it cannot be read."""
        if raw.lstrip()[:1] not in ("{", "["):
            return []
        try:
            value = load_json(raw)
            if not all(map(is_call, value if isinstance(value, list) else [value])):
                return []
            attempts = json_attempts(raw, value, self.form)
        except (ValueError, RecursionError):
            return []
        return attempts if all(attempt.status is AttemptStatus.OK for attempt in attempts) else []

    def _check(self, body: str, budget: RegexBudget) -> None:
        """Raise if transformers' parser would drop a part of this body, or take long over it."""
        if self._delimiters and len(body) * sum(map(body.count, self._delimiters)) > _MOST_WORK:
            raise ValueError("there are too many strings in it")
        pattern = self._tags
        if pattern is None:
            return
        position = 0
        tags = budget.spend(lambda left_s: [tag.span() for tag in pattern.finditer(body, timeout=left_s)])
        for start, end in [*tags, (len(body), len(body))]:
            between = unguarded(body[position:start]).strip()
            if between and between not in self.form.between:
                raise ValueError(f"{between[:60]!r} is no argument")
            position = end


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of a turn: its field, where its text and its body begin, and what the opening says.

    The body of a call begins where its opening ends; its text, where the token that opens it ends.
    """

    field: Any = None  # a ResponseTemplateField; None is what stands between the fields that have an opening
    begin: int = 0
    start: int = 0
    captures: Mapping[str, str] | None = None  # None: its opening is not as the template describes it


@dataclass(frozen=True, slots=True)
class _Border:
    place: int
    following: _Region
    closes: bool = True  # the region that ends here is closed, not cut off
    all_thinking: bool = False  # all that was said so far was thinking


class TurnReader:
    """Takes the turns of one family apart, as its response template says."""

    def __init__(
        self,
        template: ResponseTemplate,
        markers: Sequence[str],
        ends: Sequence[str],
        form: CallForm,
        lead: str = "",
    ) -> None:
        fields = template.fields
        self.markers = tuple(markers)
        self.guard = TextGuard(markers)
        self.lead = lead  # how the prompt has begun the turn: patterns want to see it
        self.end = ends[0]  # the token that ends a turn with calls: patterns may want to see it
        self.call = CallReader(fields[CALLS], form)
        self.reasoning = next((fields[name] for name in REASONING if name in fields), None)
        # An opening that only looks ahead, for the end of thinking, opens nothing: the prompt has.
        self.opening = [f for f in fields.values() if f.open_re and not f.open_re.pattern.startswith("(?=")]
        self.thinking = self._thinking()
        # The field of what stands in no other, and what separates its pieces where it repeats.
        self.implicit: str | None = template.implicit
        content = fields.get(CONTENT)
        repeats = content is not None and content.repeats
        self.joint = content.join if repeats and content.join is not None else "" if self.implicit else "\n"
        self.separator = content.close_re if repeats and content.open_re is None else None
        # The end of thinking where nothing has opened it: if a prompt may have, all that stands before it is thinking.
        prompted = bool(self.thinking) or self.reasoning not in self.opening
        self.thinking_end = self.reasoning.close_re if self.reasoning and self.implicit and prompted else None
        # Whatever begins a call cuts an open one off. Where the opening pattern matches all of that, it is looked for alone.
        self.opener = regex.compile("|".join(map(regex.escape, form.opening))) if form.opening else None
        self.opens_all = all(map(fields[CALLS].open_re.fullmatch, form.opening))

    def _thinking(self) -> tuple[str, ...]:
        """Return how a prompt may end that has already opened the model's thinking."""
        if self.reasoning is None or self.reasoning not in self.opening:
            return ()
        texts = (*(self.reasoning.open_literals or ()), *self.markers)
        return tuple({text.rstrip(): None for text in texts if self.reasoning.open_re.fullmatch(text)})

    def read(self, segments: Iterable[Segment], *, closed: bool, thinking: bool) -> ParsedTurn:
        """Read one turn without its end-of-turn token; `thinking` says that the prompt opened thinking."""
        text = "".join(part.text if isinstance(part, Marker) else self.guard.text(part) for part in segments)
        return _TurnWalk(self, self.lead + text, closed).turn(_Region(self.reasoning) if thinking else _Region())

    def region(self, field: Any, opening: Any, text: str) -> _Region:
        """Return the region that this match of the field's opening begins."""
        said = {name: value for name, value in opening.groupdict().items() if value is not None}
        begin = start = opening.end()
        if field is self.call.field and self.opener is not None:
            token = self.opener.match(text, opening.start())
            begin = token.end() if token is not None else start
        return _Region(field, begin, start, said)


class _TurnWalk:
    """A turn, half read."""

    def __init__(self, form: TurnReader, text: str, closed: bool) -> None:
        self.form = form
        self.text = text + form.end if closed else text
        self.length = len(text)
        self.closed = closed
        self.budget = RegexBudget()
        self.matches: dict[Any, Any] = {}  # for each pattern the first match that has not been passed
        self.content: list[str] = []
        self.outside: list[str] = []  # text that belongs to no field
        self.thoughts: list[str] | None = None
        self.attempts: list[CallAttempt] = []

    def turn(self, region: _Region) -> ParsedTurn:
        moved = True
        try:
            while (border := self._border(region)) is not None:
                following = border.following
                moved, stood = following.start > region.start, not moved
                if stood and not moved:
                    break  # an opening and a closing that match nothing, at the same place
                if border.all_thinking:
                    self.content, self.outside, self.attempts = [], [], []
                    region = _Region(self.form.reasoning)
                self._take(region, border.place, border.closes)
                region = following
            self._take(region, self.length, self.closed and getattr(region.field, "close_re", None) is None)
        except TimeoutError:
            rest = unguarded(self.text[region.begin : self.length])
            self.attempts.append(unreadable(rest, "it takes too long to read", self.form.call.form))
        apart = bool(self.attempts) or self.thoughts is not None
        said = self.form.joint.join(self.content)
        if not said and not apart:
            said = "".join(self.outside)
        thoughts = None if self.thoughts is None else "\n".join(filter(None, self.thoughts))
        bare = None if self.attempts or self.form.call.form.bare is None else self.form.call.form.bare(said)
        if bare is not None:
            return ParsedTurn(bare.content, thoughts, bare.attempts, self.closed)
        return ParsedTurn(said.strip("\n") if apart else said, thoughts, tuple(self.attempts), self.closed)

    def _take(self, region: _Region, stop: int, closed: bool) -> None:
        """Keep what a region holds."""
        form, body = self.form, self.text[region.start : stop]
        name = form.implicit if region.field is None else region.field.name
        if name == CALLS:
            raw = unguarded(self.text[region.begin : stop])
            if not closed:
                said = unguarded((region.captures or {}).get("name", ""))
                self.attempts.append(unclosed(raw, form.call.form, said or None))
            elif region.captures is None:
                self.attempts.append(unreadable(raw, "it does not begin as one", form.call.form))
            else:
                self.attempts += form.call.attempts(raw, region.captures, body, self.budget)
        elif form.reasoning is not None and name == form.reasoning.name:
            self.thoughts = [] if self.thoughts is None else self.thoughts
            self.thoughts.append(unguarded(body).strip("\n"))
        elif body:
            (self.content if name == CONTENT else self.outside).append(unguarded(body))

    def _border(self, region: _Region) -> _Border | None:
        """Return the first place where this region ends; None if it goes on to the end of the turn."""
        if region.field is None and region.start >= self.length:
            return None
        borders = self._openings(region.start) if region.field is None else self._closings(region)
        return min(borders, key=lambda border: border.place, default=None)

    def _openings(self, at: int) -> Iterator[_Border]:
        """Return where a field begins behind `at`, which lies in none; of several at one place the first counts."""
        form = self.form
        for field in form.opening:
            found = self._search(field.open_re, at)
            if found is not None:
                yield _Border(found.start(), form.region(field, found, self.text))
        if form.thinking_end is not None and self.thoughts is None:
            found = self._search(form.thinking_end, at)
            if found is not None:
                yield _Border(found.start(), _behind(found), all_thinking=True)
        found = self._search(form.separator, at)
        if found is not None:
            yield _Border(found.start(), _behind(found))
        if not form.opens_all:
            yield from self._cuts(at)

    def _closings(self, region: _Region) -> Iterator[_Border]:
        """Return where a field that is open ends, or is cut off."""
        form = self.form
        found = self._search(region.field.close_re, region.start)
        if found is not None:
            yield _Border(found.start(), _behind(found))
        if region.field is form.call.field:
            yield from self._cuts(region.start)

    def _cuts(self, at: int) -> Iterator[_Border]:
        """Return where something begins a call, as the template describes it or not."""
        form, field = self.form, self.form.call.field
        if form.opener is None:
            return
        found = self._search(field.open_re if form.opens_all else form.opener, at)
        if found is None:
            return
        opening = found if form.opens_all else self._match(field.open_re, found.start())
        broken = _Region(field, found.end(), found.end())
        following = broken if opening is None else form.region(field, opening, self.text)
        yield _Border(found.start(), following, closes=False)

    def _search(self, pattern: Any, at: int) -> Any:
        """Return the first match from `at` on; each pattern goes over the turn once."""
        if pattern is None:
            return None
        if pattern.pattern.startswith(r"\G"):
            return self._match(pattern, at)
        found = self.matches.get(pattern, self)
        if found is self or (found is not None and found.start() < at):
            found = self.budget.spend(lambda left_s: pattern.search(self.text, at, timeout=left_s))
            self.matches[pattern] = found
        return found

    def _match(self, pattern: Any, at: int) -> Any:
        return self.budget.spend(lambda left_s: pattern.match(self.text, at, timeout=left_s))


def _behind(closing: Any) -> _Region:
    """Return what follows a closing. Most patterns end with `\\s*`: that space is kept, because it may stand between two words."""
    spaced = closing.re.pattern.endswith(r"\s*")
    start = closing.start() + len(closing[0].rstrip()) if spaced else closing.end()
    return _Region(None, start, start)
