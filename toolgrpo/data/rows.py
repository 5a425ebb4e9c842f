"""Rows, and the checks that find bad ones.

Invariants of a checked row:

* `prompt` is a non-empty list of messages that ends with something for the model to answer;
* `answer`, where the data has answers, is non-empty text (numbers are written out);
* `tools` and `hidden_tools`, where there are such columns, are lists of tool names or None;
* `user_turns`, where there is such a column, is a list of texts that say something, or None;
* `success_measure`, where there is such a column, names one of `MEASURES` or is None;
* every other column is as it was; none has a name that the trainer gives a meaning of its own;
* every name and value can be written as JSON in UTF-8, of at most `_DEEPEST` levels.

No bad row is skipped silently: it raises, or is handed to `on_bad_row`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.episode.trajectory import joined_text
from toolgrpo.errors import DataError
from toolgrpo.support.shipped_files import nearest, nearest_is

Row = dict[str, Any]
Convert = Callable[[Mapping[str, Any]], Row]
OnBadRow = Callable[[DataError], None]

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONVERSATIONS = ("prompt", "completion", "messages", "tools")  # columns

_LISTS = ("tools", "hidden_tools", "user_turns")  # columns

# What TRL or toolgrpo pass to rewards under these names, or drop from rows that have them.
RESERVED = (
    "prompts",
    "completion",
    "completions",
    "completion_ids",
    "trajectories",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
IMAGE_COLUMNS = ("image", "images")  # of TRL's jobs with models that see

_NUMBER = re.compile(r"-?\d+")
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""")
_DEEPEST = 100  # levels of lists and objects in a column
_REASONS = 10  # that are told in full
_RANGES = 100  # of rows that are named for one reason
_NO_PROMPT = "it has no 'prompt'"
_OTHER_NAMES_OF_PROMPT = ("question", "query", "instruction", "problem", "input", "prompts", "messages", "text")


def success(messages: Sequence[Mapping[str, Any]], answer: str) -> bool:
    """Return whether an episode did the task: the last tool response is the answer, and the final message says the same number."""
    if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
        return False
    responses = [message for message in messages if message.get("role") == "tool"]
    said = _NUMBER.findall(str(messages[-1].get("content") or ""))
    return bool(responses) and str(responses[-1].get("content")).strip() == answer and said[-1:] == [answer]


Measure = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], bool]
MEASURES: dict[str, Measure] = {"arithmetic": lambda messages, row: success(messages, row["answer"])}


def measure_of(row: Mapping[str, Any]) -> Measure | None:
    """Return `measure(messages after the prompt, row)` of success that this row brings; None where its reward decides."""
    name = row.get("success_measure")
    if name is None:
        return None
    if name not in MEASURES:
        raise DataError(
            f"a row asks for the success measure {name!r}, but there is only {', '.join(MEASURES)}; leave the column "
            f"`success_measure` out (an episode then succeeds if its reward reaches the threshold), or rename it"
        )
    return MEASURES[name]


class NoPromptColumn(DataError):
    """The first row has no column `prompt`: a matter of the whole file rather than of a row."""


class RowError(ValueError):
    """Fault of a row, without its place."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its source has it, or what kept the source from reading it."""

    where: str  # file and line
    columns: Mapping[str, Any] | None
    problem: str = ""


def unfilled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the None that Arrow puts for keys which objects of other rows have."""
    return {name: _without_none(value) if name in _CONVERSATIONS else value for name, value in row.items()}


def of_cells(cells: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of a CSV file with the messages and the lists that its cells hold as JSON."""
    row: dict[str, Any] = dict(cells)
    for name in row.keys() & {*_CONVERSATIONS, *_LISTS}:
        read = _as_json(row[name])
        is_messages = isinstance(read, list) and read and all(isinstance(one, dict) and "role" in one for one in read)
        if is_messages or (name in _LISTS and (read is None or isinstance(read, list))):
            row[name] = read
    return row


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


class BadRows:
    """Counts bad rows and keeps the first few: pass `bad_rows.add` as `on_bad_row`."""

    def __init__(self, keep: int = 5) -> None:
        self.count = 0
        self.first: list[DataError] = []
        self._keep = keep

    def add(self, error: DataError) -> None:
        self.count += 1
        if len(self.first) < self._keep:
            self.first.append(error)

    def summary(self) -> str:
        """Return one line for the number of skipped rows, and one for each of the first few."""
        if not self.count:
            return "no bad rows"
        more = self.count - len(self.first)
        lines = [f"{self.count} bad {'row was' if self.count == 1 else 'rows were'} skipped:"]
        lines += [f"  {error}" for error in self.first]
        return "\n".join(lines + ([f"  and {more} more"] if more else []))


def raise_bad_row(error: DataError) -> None:
    if isinstance(error, NoPromptColumn):
        raise error
    raise DataError(f"{error}. Fix the row, or skip such rows with --skip_bad_rows.") from error.__cause__


def good_rows(raw_rows: Iterable[RawRow], convert: Convert, on_bad_row: OnBadRow) -> Iterator[Row]:
    """Yield the rows in the form that training wants; each bad one goes to `on_bad_row`."""
    with_answer: bool | None = None
    for index, raw in enumerate(raw_rows):
        try:
            if raw.columns is None:
                raise RowError(raw.problem)
            row = check_row(convert(raw.columns))
            if with_answer is None:
                with_answer = "answer" in row
            elif with_answer and "answer" not in row:
                raise RowError(f"it has no 'answer', although the rows before it have one{nearest_is('answer', row)}")
            elif not with_answer and "answer" in row:
                raise RowError("it has an 'answer', although the rows before it have none")
        except RowError as problem:
            columns = raw.columns or {}
            if index == 0 and columns and "prompt" not in columns and str(problem).startswith(_NO_PROMPT):
                on_bad_row(NoPromptColumn(f"{raw.where}: {problem}. If no row has one, {prompt_advice(columns)}"))
            else:
                on_bad_row(DataError(f"{raw.where}: {problem}"))
        else:
            yield row


def rows_and_reasons(refused: Mapping[int, str], place: Callable[[int], str]) -> str:
    """Return every row that is refused, those of one reason together; `place` says where a row stands."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for number, why in sorted(refused.items()):
        by_reason[why].append(place(number))
    told = [f"{_ranges(places)}: {why}" for why, places in list(by_reason.items())[:_REASONS]]
    others = [place for places in list(by_reason.values())[_REASONS:] for place in places]
    return "; ".join([*told, *([f"{_ranges(others)}: for other reasons"] if others else [])])


def _ranges(places: Sequence[str]) -> str:
    """Return places that differ in their last number as that text with its numbers: `rows.jsonl, line 1 to 4, 7`."""
    numbers: defaultdict[tuple[str, str], list[list[int]]] = defaultdict(list)
    for place in places:
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", place)
        before, number, after = found.groups() if found else (place, "-1", "")
        ranges = numbers[before, after]
        if ranges and int(number) == ranges[-1][1] + 1:
            ranges[-1][1] += 1
        else:
            ranges.append([int(number)] * 2)
    said = []
    for (before, after), ranges in numbers.items():
        shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges if first >= 0]
        more = [f"and {len(shown) - _RANGES} more"] if len(shown) > _RANGES else []
        said.append(before + ", ".join([*shown[:_RANGES], *more]) + after)
    return ", ".join(said)


def prompt_advice(columns: Mapping[str, Any]) -> str:
    """Return what to do about rows without a prompt, which have these columns."""
    if isinstance(columns.get("messages"), list):
        return (
            "these look like conversations: train on them with `toolgrpo sft`, or keep the messages before the last answer "
            "as 'prompt'"
        )
    return f"rename {_most_like_a_prompt(columns)} to 'prompt'"


def _most_like_a_prompt(columns: Mapping[str, Any]) -> str:
    """Return the column that is most likely the prompt under another name, quoted."""
    lower = {column.lower(): column for column in columns}
    other = next((lower[name] for name in _OTHER_NAMES_OF_PROMPT if name in lower), None)
    other = other or next(iter(nearest("prompt", columns, alike=0.7)), None)
    return "the column that holds it" if other is None else repr(other)


def check_row(columns: Mapping[str, Any]) -> Row:
    """Check a row; return it with its prompt as messages and its answer as text."""
    row = dict(columns)
    for name, value in row.items():
        _check_column(name, value)
    if "prompt" not in row:
        raise RowError(f"{_NO_PROMPT}; its columns are {', '.join(map(str, row)) or '(none)'}")
    row["prompt"] = _messages(row["prompt"])
    if "answer" in row:
        row["answer"] = _answer(row["answer"])
    for column, which in (("tools", "those that the row is offered"), ("hidden_tools", "callable, and not shown")):
        names = row.get(column)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise RowError(
                f"the column '{column}' must be a list of names of loaded tools ({which}), not {_name(names)}"
            )
    if isinstance(row.get("expected_tools"), str):  # of a CSV file
        row["expected_tools"] = _as_json(row["expected_tools"])
    if "enable_thinking" in row:
        row["enable_thinking"] = _flag(row["enable_thinking"], "enable_thinking")
    _check_user_turns(row.get("user_turns"))
    try:
        measure_of(row)
    except DataError as error:
        raise RowError(str(error)) from error
    for name in RESERVED:
        if name in row:
            raise RowError(f"the column name {name!r} is taken by the trainer; rename the column")
    for name in IMAGE_COLUMNS:
        if name in row:
            raise RowError(
                f"it has a column {name!r}, and episodes are text: no model would see it; leave it out, or rename it"
            )
    return row


def with_opening(row: Row, system_prompt: str | None, examples: Sequence[Row] = ()) -> Row:
    """Return the row with a system message and worked examples before its own messages.

    A system message of its own stays.
    """
    if not (system_prompt or examples):
        return row
    prompt = row["prompt"]
    own = [message for message in prompt[:1] if message["role"] in ("system", "developer")]
    system = own or ([{"role": "system", "content": system_prompt}] if system_prompt else [])
    return {**row, "prompt": [*system, *examples, *prompt[len(own) :]]}


def check_examples(examples: Any) -> list[Row]:
    """Check worked examples, which begin with the user and end with the assistant."""
    messages = [_message(message, number) for number, message in enumerate(examples, start=1)]
    if messages and (messages[0]["role"] != "user" or messages[-1]["role"] != "assistant"):
        raise RowError("worked examples must begin with a user message and end with an assistant message")
    return messages


def fault_of_prompt(prompt: Any) -> str | None:
    """Return what is wrong with a prompt whose table stays as it is: a list that stands as text is not read there."""
    try:
        messages = _messages(prompt)
    except RowError as error:
        return str(error)
    if isinstance(prompt, str):
        as_text = messages[0]["content"] != prompt
    else:
        as_text = any(isinstance(one.get("tool_calls"), str) for one in prompt)
    return "a list in the prompt is written as JSON text; read it with json.loads before" if as_text else None


def _messages(prompt: Any) -> list[Row]:
    if isinstance(prompt, str) and _MESSAGES_AS_TEXT.match(prompt):
        prompt = _as_json(prompt)
        if isinstance(prompt, str):
            raise RowError(
                "the prompt is a list of messages written as text, as pandas writes one into a CSV file; save the rows as "
                "JSON lines or Parquet, or the list as JSON"
            )
    if isinstance(prompt, str):
        _check_text(prompt, "the prompt")
        if not prompt.strip():
            raise RowError("the prompt is empty")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise RowError(f"the prompt must be text or a list of messages, not {_name(prompt)}")
    if not prompt:
        raise RowError("the prompt is an empty list of messages")
    messages = [_message(message, number) for number, message in enumerate(prompt, start=1)]
    if messages[-1]["role"] == "assistant":
        raise RowError("the prompt ends with an assistant message; the model would have nothing to answer")
    return messages


def _message(message: Any, number: int) -> Row:
    if not isinstance(message, Mapping):
        raise RowError(f"message {number} of the prompt must have a role and content; it is {_name(message)}")
    kept = {key: value for key, value in message.items() if value is not None}  # Arrow fills absent keys with None
    role = kept.get("role")
    if role not in ROLES:
        raise RowError(f"message {number} of the prompt has the role {role!r}; it must be one of {', '.join(ROLES)}")
    if isinstance(kept.get("tool_calls"), str):
        kept["tool_calls"] = _as_json(kept["tool_calls"])
    if not _are_calls(kept.get("tool_calls") or []):
        raise RowError(
            f"the tool_calls of message {number} of the prompt must be a list of calls, not {_name(kept['tool_calls'])}"
        )
    content = kept.setdefault("content", "" if kept.get("tool_calls") else None)
    if isinstance(content, list):
        content = kept["content"] = joined_text(content)
    if not isinstance(content, str):
        raise RowError(f"the content of message {number} of the prompt must be text, not {_name(content)}")
    _check_text(content, f"message {number} of the prompt")
    return kept


def _are_calls(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def _answer(answer: Any) -> str:
    if isinstance(answer, str):
        _check_text(answer, "the answer")
        if not answer.strip():
            raise RowError("the answer is empty")
        return answer
    if isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer)):
        return str(answer)
    raise RowError(
        f"the answer must be text or a number, not {_name(answer)}; put other values into their own columns, "
        f"which rewards get by name"
    )


def _as_json(text: str) -> Any:
    """Return what a cell says as JSON, None for an empty one; one that is no JSON as it is."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return text


def _flag(value: Any, column: str) -> bool | None:
    read = _as_json(value.lower()) if isinstance(value, str) else value
    read = bool(read) if read in (0, 1) else read
    if read is not None and not isinstance(read, bool):
        raise RowError(f"the column {column!r} must be true, false or empty, not {value!r}")
    return read


def _check_user_turns(texts: Any) -> None:
    if texts is None:
        return
    if not isinstance(texts, list):
        raise RowError(
            f"the column 'user_turns' must be a list of the user's messages after the prompt, not {_name(texts)}"
        )
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str) or not text.strip():
            raise RowError(f"entry {number} of the column 'user_turns' must be text, not {_name(text)}")
        _check_text(text, f"entry {number} of the column 'user_turns'")


def _check_column(name: Any, value: Any) -> None:
    """Raise RowError for a column that cannot be written down, whatever it is for."""
    if not isinstance(name, str):
        raise RowError(f"the column name {name!r} must be text, not {_name(name)}")
    _check_text(name, f"the column name {name!r}")
    if value is None or isinstance(value, float | bool):
        return
    if isinstance(value, str):
        _check_text(value, _column(name))
        return
    try:
        if _depth(value) > _DEEPEST:
            raise RecursionError
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{_column(name)} has a broken character in it (a lone surrogate)") from error
    except RecursionError as error:
        raise RowError(f"{_column(name)} is nested too deeply; at most {_DEEPEST} levels are accepted") from error
    except (ValueError, TypeError) as error:  # an integer of too many digits, keys that are no text
        raise RowError(f"{_column(name)} cannot be written as JSON: {str(error)[:100]}") from error
    if name != "answer" and _has_long_integer(value):
        raise RowError(f"{_column(name)} holds an integer of more than 64 bits; write it as text")


def _has_long_integer(value: Any) -> bool:
    if isinstance(value, int):
        return not -(2**63) <= value < 2**64
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_long_integer, inner))


def _depth(value: Any, limit: int = _DEEPEST + 1) -> int:
    """Return how many levels of lists and objects a value has, counted up to a limit."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None or limit == 0:
        return 0
    return 1 + max((_depth(one, limit - 1) for one in inner if isinstance(one, dict | list)), default=0)


def _column(name: str) -> str:
    return f"the {name}" if name in ("prompt", "answer") else f"the column {name!r}"


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{what} has a broken character at position {error.start} (a lone surrogate)") from error


def _name(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def row_key(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a name for a row that stays the same in every selection and order of the data: a digest of its prompt.

    Values that a data set filled up with None are no part of it.
    """
    if not isinstance(prompt, str):
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
