"""`gold_calls`: how near an episode's tool calls are to those that its row names.

ToolRL's reward (arXiv 2504.13958), from 0 to 1:

    names + sum over pairs (argument names + equal values)
    ------------------------------------------------------
               1 + sum over gold calls (1 + arguments)

`names` is the intersection of the tools called and the gold ones over their union, both with
repetitions. A pair is a call and a gold call of one tool; its argument names are intersection over
union, its equal values a count. Two things differ from ToolRL's own code: the pairs are those that
are worth most in sum, not the first that fit, and values are compared as what they mean ("3", 3 and
3.0 are one, and so is text with other case or outer space). Order does not matter.

A row with an empty list wants no call. A row without `gold_calls` (None) is not scored.

Not covered: a gold argument that is null. Columns of tables fill the arguments that a row lacks
with null, so these are taken for absent; write the calls as JSON text to keep columns apart.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from toolgrpo.episode.tool_calls import READABLE, CallAttempt
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.rewards.base import row_name

_MOST_CALLS = 200  # of one episode; those after it count as calls of no tool
_WHOLE = re.compile(r"[-+]?\d+")
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
_FORM = '[{"name": "add", "arguments": {"a": 1, "b": 2}}]'


@dataclass(frozen=True, slots=True)
class GoldCall:
    """One call in the form in which calls are compared."""

    name: str | None  # None: it could not be read
    arguments: Mapping[str, Any]


def gold_calls(trajectories: Sequence[Trajectory], gold_calls: Sequence[Any], **_: Any) -> list[float | None]:
    """Return how near the calls of each episode are to the gold ones of its row."""
    return [
        None if gold is None else _score(made_calls(trajectory.attempts), listed_calls(gold, row))
        for row, (trajectory, gold) in enumerate(zip(trajectories, gold_calls, strict=True))
    ]


def _score(made: Sequence[GoldCall], gold: Sequence[GoldCall]) -> float:
    if not gold:
        return 0.0 if made else 1.0
    called, wanted = Counter(call.name for call in made), Counter(call.name for call in gold)
    names = (called & wanted).total() / (called | wanted).total()
    by_tool: defaultdict[str | None, list[GoldCall]] = defaultdict(list)
    for call in made:
        by_tool[call.name].append(call)
    pairs = sum(
        best_total([[_likeness(own, other) for own in by_tool[tool]] for other in gold if other.name == tool])
        for tool in wanted
    )
    return (names + pairs) / (1 + sum(1 + len(call.arguments) for call in gold))


def _likeness(made: GoldCall, gold: GoldCall) -> float:
    given, wanted = set(made.arguments), set(gold.arguments)
    names = len(given & wanted) / len(given | wanted) if given | wanted else 1.0
    return names + sum(bool(made.arguments[name] == gold.arguments[name]) for name in given & wanted)


def made_calls(attempts: Sequence[CallAttempt]) -> list[GoldCall]:
    """Return the calls that were tried; those that cannot be read are calls of no tool."""
    calls: list[GoldCall] = []
    for attempt in attempts:
        readable = attempt.status in READABLE and len(calls) < _MOST_CALLS
        calls.append(GoldCall(attempt.name, _normal(attempt.arguments or {})) if readable else GoldCall(None, {}))
    return calls


def listed_calls(value: Any, row: int) -> list[GoldCall]:
    """Return the calls that a row names; `row` is its place, for the error."""
    try:
        return _listed(value)
    except _UNREADABLE as error:
        raise RewardError(
            f"reward gold_calls: the column gold_calls of {row_name.get()(row)} {_why(error)}; fix the row"
        ) from error


def rows_refused(rows: Any) -> dict[int, str]:
    """Return which rows of a data set name calls that cannot be read, and why."""
    refused = {}
    for number, gold in enumerate(rows["gold_calls"] if "gold_calls" in rows.column_names else ()):
        try:
            _listed(gold or ())
        except _UNREADABLE as error:
            refused[number] = f"the column gold_calls {_why(error)}"
    return refused


def _listed(value: Any) -> list[GoldCall]:
    found = []
    for call in json.loads(value) if isinstance(value, str) else value:
        arguments = call.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        given = {name: item for name, item in arguments.items() if item is not None}
        found.append(GoldCall(_text(call["name"]), _normal(given)))
    return found


def _why(error: Exception) -> str:
    return f"cannot be read as a list of calls such as {_FORM} ({type(error).__name__}: {error})"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"a name must be text, got {value!r}")
    return value


def _normal(value: Any) -> Any:
    """Return a value in the form in which it is compared."""
    if isinstance(value, Mapping):
        # a table fills keys with None
        return {str(key): _normal(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return _number(value)
    text = " ".join(str(value).split()).casefold()
    if text in ("true", "false"):
        return text == "true"
    if re.match(r"[-+]?0\d", text):  # a code, such as 007
        return text
    try:
        return (
            _number((int if _WHOLE.fullmatch(text) else float)(text)) if len(text) <= 40 and "_" not in text else text
        )
    except ValueError:
        return text


def _number(value: float) -> Any:
    """Return a number that is equal to other ways to write it; one that is none is its name."""
    try:
        as_float = float(value)
    except OverflowError:
        return str(value)
    if as_float != as_float:
        return "nan"
    # Whole numbers exactly; of others what survives the files that rows are kept in. Apart from true, which Python takes for 1.
    return ("number", int(value) if as_float.is_integer() else float(f"{as_float:.12g}"))


def best_total(worth: Sequence[Sequence[float]]) -> float:
    """Return the largest sum of `worth[i][j]` over pairings of rows with columns; none is below 0.

    Exact, by the Hungarian method with potentials, in a time that grows with the square of the shorter
    list times the longer. scipy's `linear_sum_assignment` is the oracle of the tests; it is no dependency
    of a run.
    """
    if not worth or not worth[0]:
        return 0.0
    if len(worth) > len(worth[0]):
        worth = list(zip(*worth, strict=True))
    n, m = len(worth), len(worth[0])
    row_potential, column_potential = [0.0] * (n + 1), [0.0] * (m + 1)
    row_of = [0] * (m + 1)  # column -> its row, both from 1; 0: none
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        least, came_from, done = [inf] * (m + 1), [0] * (m + 1), [False] * (m + 1)
        while row_of[column]:
            done[column] = True
            current, step, next_column = row_of[column], inf, 0
            for j in range(1, m + 1):
                if done[j]:
                    continue
                cost = -worth[current - 1][j - 1] - row_potential[current] - column_potential[j]
                if cost < least[j]:
                    least[j], came_from[j] = cost, column
                if least[j] < step:
                    step, next_column = least[j], j
            for j in range(m + 1):
                if done[j]:
                    row_potential[row_of[j]] += step
                    column_potential[j] -= step
                else:
                    least[j] -= step
            column = next_column
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    return sum(worth[row_of[j] - 1][j - 1] for j in range(1, m + 1) if row_of[j])
