"""Turns in which thinking and calls stand between an opening and a closing marker.

Most families write so: Hermes (Qwen2.5, Qwen3), Qwen3.5 and Nemotron, GLM, Gemma 4, LFM2. They differ in the markers
and in what stands between those of a call, which `call_bodies.py` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.reading import Marker, Segment, as_text, unclosed
from toolgrpo.trajectory import CallAttempt

__all__ = ["Bracketed"]


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A `Reader`."""

    call: tuple[str, str]
    body: Callable[[Sequence[Segment]], list[CallAttempt]]
    think: tuple[str, str] = ("<think>", "</think>")
    inside: tuple[str, ...] = ()  # markers that only mean something inside a call
    silent: tuple[str, ...] = ()  # markers that say nothing
    think_label: str = ""  # what a family prints after the opening of its thinking, and means nothing by

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.call, *self.think, *self.inside, *self.silent)

    @property
    def thinking(self) -> str | None:
        return (self.think[0] + self.think_label).rstrip()

    def read(self, segments: Iterable[Segment], *, closed: bool, thinking: bool) -> ParsedTurn:
        turn = _Turn(self, thinking)
        for segment in segments:
            if not isinstance(segment, Marker) or segment.text not in self.silent:
                turn.take(segment)
        return turn.finish(closed)


class _Turn:
    """A turn, half read."""

    def __init__(self, form: Bracketed, thinking: bool) -> None:
        self.call, self.call_end = map(Marker, form.call)
        self.think, self.think_end = map(Marker, form.think)
        self.form = form
        self.thinking = thinking
        self.thoughts: list[Segment] | None = [] if thinking else None
        self.content: list[Segment] = []
        self.body: list[Segment] | None = None  # of the call that is open
        self.attempts: list[CallAttempt] = []

    def take(self, segment: Segment) -> None:
        if segment == self.think and self.body is None and not self.thinking:
            self.thoughts, self.thinking = self.thoughts or [], True
        elif segment == self.think_end and self.body is None and (self.thinking or self.thoughts is None):
            if self.thoughts is None:  # the prompt opened it: all that was said so far was thinking
                self.thoughts, self.content, self.attempts = self.content, [], []
            self.thinking = False
        elif self.thinking:
            assert self.thoughts is not None
            self.thoughts.append(segment)
        elif segment == self.call:
            self._cut_off()
            self.body = []
        elif segment == self.call_end and self.body is not None:
            self.attempts += self.form.body(self.body)
            self.body = None
        else:
            (self.content if self.body is None else self.body).append(segment)

    def finish(self, closed: bool) -> ParsedTurn:
        self._cut_off()
        said = as_text(self.content)
        if self.attempts or self.thoughts is not None:
            said = said.strip("\n")
        reasoning = None if self.thoughts is None else as_text(self.thoughts)
        if reasoning is not None:
            reasoning = reasoning.removeprefix(self.form.think_label).strip("\n")
        return ParsedTurn(said, reasoning, tuple(self.attempts), closed)

    def _cut_off(self) -> None:
        """A call that is open when something ends it has not been closed."""
        if self.body is not None:
            self.attempts.append(unclosed(as_text(self.body), self.call_end.text))
