"""What a check found: one line for each thing that was looked at, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.text import Text

from toolgrpo.plain_text import plain


class Verdict(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAILURE = "failure"


_COLOURS = {Verdict.PASS: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One thing that was looked at; `do` says what helps, where something does."""

    verdict: Verdict
    what: str
    said: str
    do: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def shown(self) -> Text:
        line = Text(f"{self.verdict:<8} {self.what:<11} ", style="")
        line.stylize(_COLOURS[self.verdict], 0, len(self.verdict))
        return line.append(plain(self.said + (f". {self.do}" if self.do else "")).replace("\n", " "))

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "what": self.what,
            "said": self.said,
            "do": self.do,
            "numbers": dict(self.numbers),
        }


class CheckReport:
    """The lines in their order; `hear` gets each as soon as it is known."""

    def __init__(self, hear: Callable[[CheckLine], None]) -> None:
        self.lines: list[CheckLine] = []
        self._hear = hear

    def add(self, line: CheckLine) -> None:
        self.lines.append(line)
        self._hear(line)

    def passed(self, what: str, said: str, **numbers: Any) -> None:
        self.add(CheckLine(Verdict.PASS, what, said, numbers=numbers))

    def warned(self, what: str, said: str, do: str, **numbers: Any) -> None:
        self.add(CheckLine(Verdict.WARNING, what, said, do, numbers))

    def failed(self, what: str, said: str, do: str = "", **numbers: Any) -> None:
        self.add(CheckLine(Verdict.FAILURE, what, said, do, numbers))

    def count(self, verdict: Verdict) -> int:
        return sum(line.verdict is verdict for line in self.lines)

    @property
    def exit_code(self) -> int:
        return int(self.count(Verdict.FAILURE) > 0)

    def closing(self) -> str:
        counts = [(self.count(verdict), verdict) for verdict in (Verdict.FAILURE, Verdict.WARNING, Verdict.PASS)]
        named = {Verdict.FAILURE: "failed", Verdict.WARNING: "with a warning", Verdict.PASS: "passed"}
        return f"{len(self.lines)} checks: " + ", ".join(f"{n} {named[verdict]}" for n, verdict in counts if n)

    def as_json(self) -> str:
        whole = {
            "passed": self.exit_code == 0,
            "counts": {verdict.value: self.count(verdict) for verdict in Verdict},
            "checks": [line.as_json() for line in self.lines],
        }
        return json.dumps(whole, indent=2, default=str)
