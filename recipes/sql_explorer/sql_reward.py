"""What an episode earns whose question has one short answer in a database. Only that answer has to be known.

    1.0   the last message says the answer, and a query of the episode showed it
    0.3   a short result of a query showed the answer
    0.1   a query ran
    0.0   the last message is no sentence for a person: empty, a call, marked up, copied, or a list to choose from

Each earns what it says only with a sentence at the end, right or wrong: paid without one, it teaches to go on for ever. A
query that has the answer in its own text shows nothing. 1.0 is a success; without the steps on the way:
`--reward_function_name only_said`. Other weights are two lines of your own:

    from sql_reward import earned
    def reward_func(**kwargs): return earned(**kwargs, ran=0.0, found=0.5)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from toolgrpo.episode.trajectory import Message, Trajectory
from toolgrpo.rewards import calls, final_answer
from toolgrpo.rewards.numerals import all_numbers

MARKUP = re.compile(r"[<>{}\[\]|`\\]|\*\*|\w\(|^\s*(?:[#*-]\s|\w+:\s*$)", re.MULTILINE)
FEWEST_WORDS = 2  # of a sentence, besides those of the answer and of the names of columns
LONG = 4  # words of a result that is copied rather than said
SHORT = 6  # values of a result that somebody would look through
UNITS = (1, 100)  # a result in cents shows an answer in euros

_MONTHS = re.findall(r"\w+", "january february march april may june july august september october november december")
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<!\d)(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)(?!\d)",
        r"(?<!\d)(?P<day>\d\d?)\.(?P<month>\d\d?)\.(?P<year>\d{4})(?!\d)",
        rf"(?<!\d)(?P<day>\d\d?)(?:st|nd|rd|th)? (?:of )?{_MONTH},? (?P<year>\d{{4}})(?!\d)",
        rf"\b{_MONTH} (?P<day>\d\d?)(?:st|nd|rd|th)?,? (?P<year>\d{{4}})(?!\d)",
    )
)


def reward_func(**kwargs: Any) -> list[float]:
    return earned(**kwargs)


def only_said(**kwargs: Any) -> list[float]:
    return earned(**kwargs, ran=0.0, found=0.0)


def earned(
    completions: Sequence[Sequence[Message]],
    prompts: Sequence[Sequence[Message]],
    answer: Sequence[str],
    trajectories: Sequence[Trajectory],
    ran: float = 0.1,
    found: float = 0.3,
    said: float = 1.0,
    **kwargs: Any,
) -> list[float]:
    earned = []
    for completion, prompt, right, trajectory in zip(completions, prompts, answer, trajectories, strict=True):
        question = next(str(message["content"]) for message in reversed(prompt) if message["role"] == "user")
        told = [str(message["content"]) for message in completion if message["role"] == "tool"]
        episode = _Episode(final_answer(completion), question, right, told, list(_shown_by(trajectory)))
        reached = [0.0]
        if episode.ends_with_a_sentence():
            reached += [ran] if episode.results else []
            reached += [found] if any(one.is_short and episode.is_shown_in(one) for one in episode.results) else []
            reached += [said] if episode.is_said() else []
        earned.append(max(reached))
    return earned


@dataclass(frozen=True)
class Result:
    """What a query showed: its text, the line with the names of the columns, and the rows."""

    sql: str
    columns: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def is_short(self) -> bool:
        return sum(map(len, self.rows)) <= SHORT

    def beside(self, name: str) -> set[str]:
        """Return the values of the columns that have this name in a row."""
        columns = list(zip(*self.rows, strict=False))
        return {value for column in columns if _normal(name) in map(_normal, column) for value in column}


def _shown_by(trajectory: Trajectory) -> Iterator[Result]:
    for call in calls(trajectory):
        if call.name == "query" and call.ok and call.result:
            columns, *rows = call.result.splitlines()
            yield Result(str(call.arguments.get("sql")), columns, tuple(tuple(row.split(" | ")) for row in rows))


@dataclass(frozen=True)
class _Episode:
    final: str
    question: str
    answer: str
    told: list[str]  # what tools answered, errors too
    results: list[Result]

    def ends_with_a_sentence(self) -> bool:
        columns = " ".join(one.columns for one in self.results)
        own_words = _words(self.final) - _words(self.answer) - _words(columns)
        final = " ".join(self.final.split())
        copied = any(len(text.split()) > LONG and " ".join(text.split()) in final for text in self.told)
        return len(own_words) >= FEWEST_WORDS and not copied and not MARKUP.search(self.final) and not self._is_list()

    def is_said(self) -> bool:
        """Return whether the answer, and nothing else that could be it, is said, and was seen."""
        if not any(map(self.is_shown_in, self.results)):
            return False
        if _dates(self.answer):
            return self._new_dates() == _dates(self.answer)
        if _number(self.answer) is not None:
            numbers = self._new_numbers()
            return bool(numbers) and all(self._is_right(number) for number in numbers)
        others = {value for one in self.results for value in one.beside(self.answer)}
        return _holds(self.final, self.answer) and not self._named(others)

    def is_shown_in(self, result: Result) -> bool:
        values = {value for row in result.rows for value in row}
        if _dates(self.answer):
            return any(_dates(self.answer) & _dates(value) for value in values) and self.answer not in result.sql
        if _number(self.answer) is not None:
            told = all_numbers(result.sql)
            seen = [number for number in map(_number, values) if number is not None]
            units = UNITS if "." in self.answer else UNITS[:1]
            shown = any(self._is_right(number / unit) for number in seen for unit in units)
            return shown and not any(map(self._is_right, told))
        return self._names_it(values) and not _holds(result.sql, self.answer)

    def _is_right(self, number: Fraction) -> bool:
        """Return whether a number is the answer, rounded as it is."""
        decimals = len(self.answer.partition(".")[2])
        return abs(number - Fraction(self.answer)) <= (Fraction(1, 2 * 10**decimals) if decimals else 0)

    def _is_list(self) -> bool:
        if _dates(self.answer):
            return len(self._new_dates()) > 1
        if _number(self.answer) is not None:
            return len(self._new_numbers()) > 1
        return len(self._named({value for one in self.results for row in one.rows for value in row})) > 1

    def _new_numbers(self) -> set[Fraction]:
        return set(all_numbers(self.final)) - set(all_numbers(self.question))

    def _new_dates(self) -> set[tuple[int, int, int]]:
        return _dates(self.final) - _dates(self.question)

    def _names_it(self, values: set[str]) -> bool:
        return any(_normal(value) == _normal(self.answer) for value in values)

    def _named(self, values: set[str]) -> set[str]:
        """Return the values besides the answer that are words, and that the last message names and the question does not."""
        words = {_normal(value) for value in values if _words(value)} - {_normal(self.answer)}
        return {value for value in words if _holds(self.final, value) and not _holds(self.question, value)}


def _words(text: str) -> set[str]:
    return {word.casefold() for word in re.findall(r"[^\W\d_]+", text)}


def _number(text: str) -> Fraction | None:
    return Fraction(text) if re.fullmatch(r"-?\d{1,300}(?:\.\d{1,300})?", text) else None


def _dates(text: str) -> set[tuple[int, int, int]]:
    found = [match.groupdict() for pattern in _DATES for match in pattern.finditer(text)]
    return {(int(one["year"]), _month(one["month"]), int(one["day"])) for one in found}


def _month(text: str) -> int:
    return int(text) if text.isdigit() else _MONTHS.index(text.casefold()) + 1


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold().replace("&", " and ")))


def _holds(text: str, words: str) -> bool:
    """Return whether a text has words as a whole, whatever their case and punctuation."""
    return f" {_normal(words)} " in f" {_normal(text)} "
