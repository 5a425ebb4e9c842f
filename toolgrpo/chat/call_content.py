"""What a call holds: its body, read by a content parser of transformers, as attempts with a status.

Content parsers and transforms are transformers' own. They give a value or raise; here every attempt is kept:

* A call without a name, a body that the parser refuses and text between the arguments that belongs to none are attempts
  that say what is wrong, with the form a call should have.
* What no record could hold (NaN, infinite numbers, half a character, very deep nesting) is refused.
* JSON between the markers of a family that writes another form, with a name and arguments in it, can mean only one thing.

A body that no content parser of transformers can read is read by a function of `call_bodies.py`, which the form names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex  # type: ignore[import-untyped]  # it ships no types; transformers compiles its patterns with it

from toolgrpo.calls import AttemptStatus, CallAttempt
from toolgrpo.chat.attempts import CallForm, load_json, nameless, unreadable
from toolgrpo.chat.encoding import is_guarded, unguarded
from toolgrpo.chat.objects import is_call, json_attempts
from toolgrpo.chat.transformers_seam import process_field
from toolgrpo.regex_budget import RegexBudget

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
