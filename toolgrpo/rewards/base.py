"""One reward: a user's or built-in function behind checks, callable the way TRL calls rewards.

Invariants:

* A call returns exactly one finite float per completion, or raises; None and `DropEpisode` stand
  for an episode that is not scored (unscored.py). What the function returns is never repaired: a
  wrong length, NaN or a failure is a `RewardError` that names the file, the function and the row.
* The function gets only the arguments it asks for; one that it needs and nobody has is an error
  that lists what there is.
* A failure of the world (`WorldError`, say a sandbox that cannot start) passes through as it is and
  is never a score.
* Whatever the function does but Ctrl-C is an error of this tree: it exits, raises a bare
  BaseException, or returns objects that raise when they are read or shown. How it is watched while
  it runs: running.py, and what is kept for others: process_state.py.

This package knows no torch, TRL or vLLM.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.drops import DropEpisode
from toolgrpo.errors import ConfigError, PluginError, RewardError, WorldError
from toolgrpo.rewards.running import Oversight, line_of
from toolgrpo.rewards.unscored import Score, ask, only_rows
from toolgrpo.rewards.withdrawal import RewardWithdrawn
from toolgrpo.trajectory import Message

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""`reward_func(completions, answer, **kwargs) -> list[float]`, plain or async."""

_GIVEN = ("prompts", "completions", "completion_ids", "trajectories", "trainer_state", "log_extra", "log_metric")
"""What every call has, besides the columns of the data."""

_LARGEST = 3.4e38  # of the 32-bit floats in which TRL keeps rewards
_SEARCH_S = 30.0  # for the row that fails
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Reward:
    """A checked reward function. `source` says where it is from, for logs and errors.

    `gold(row)` gives the messages of an episode that earns full marks, where an answer alone can.
    `refused(rows)` says which rows it cannot score, by number, and why.

    A call that takes longer than `timeout_s` is an error; one that takes long at all is spoken of
    with `say`.
    """

    function: RewardFunction
    name: str
    source: str
    timeout_s: float | None = None
    say: Callable[[str], None] = field(default=logger.warning, repr=False, compare=False)
    gold: Callable[[Mapping[str, Any]], list[Message]] | None = field(default=None, repr=False, compare=False)
    refused: Callable[[Any], dict[int, str]] | None = field(default=None, repr=False, compare=False)
    _signature: inspect.Signature = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise PluginError(
                f"{self.source}: {self.name} must be callable, as in `def {self.name}(completions, answer, **kwargs)`; "
                f"it is a {type(self.function).__name__}"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"reward_timeout must be a positive number of seconds, got {self.timeout_s}")
        object.__setattr__(self, "_signature", _checked_signature(self.function, self.name, self.source))

    @property
    def __name__(self) -> str:
        """What TRL logs the reward as."""
        return self.name

    def __call__(self, *, completions: Sequence[list[Message]], **arguments: Any) -> list[Score]:
        """Return one score per completion.

        `arguments` are what TRL passes: prompts, ids, trajectories, every column.
        """
        scores: list[Score] = ask(self._ask, {"completions": completions, **arguments}, self._where())
        return scores

    def _ask(self, *, completions: Sequence[list[Message]], **arguments: Any) -> list[Score]:
        available = {"completions": completions, **arguments}
        if "prompts" in available:
            available.setdefault("prompt", available["prompts"])  # a column of the data, which TRL passes as `prompts`
        given = self._select(available)
        oversight = Oversight(self._where(), self.source, self.timeout_s, self.say)
        try:
            returned = oversight.run(lambda: self.function(**given))
        except (WorldError, RewardError, DropEpisode, KeyboardInterrupt, RewardWithdrawn):
            raise
        except BaseException as error:  # a plugin may raise anything; it must not look like ours
            raise self._failure(error, oversight, given, available) from error
        try:
            return self._checked(returned, available)
        except (RewardError, KeyboardInterrupt):
            raise
        except BaseException as error:  # what it returned has code of its own
            raise RewardError(
                f"{self._where()} returned {_short(returned)}, which cannot be read as numbers: {_described(error)}"
            ) from error

    @property
    def is_async(self) -> bool:
        """Whether the function only waits, so that others can be asked meanwhile."""
        return inspect.iscoroutinefunction(self.function)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise RewardError if the function needs an argument that nobody will give.

        Arguments come from the trainer and from these columns.
        """
        self._check_has({*_GIVEN, *columns})

    def _select(self, available: Mapping[str, Any]) -> dict[str, Any]:
        parameters = self._signature.parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            given = dict(available)
        else:
            given = {
                parameter.name: available[parameter.name] for parameter in parameters if parameter.name in available
            }
        self._check_has(available)
        return given

    def _check_has(self, available: Collection[str]) -> None:
        missing = [
            parameter.name
            for parameter in self._signature.parameters.values()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in _VARIADIC
            and parameter.name not in available
        ]
        if missing:
            raise RewardError(
                f"{self._where()} asks for {', '.join(repr(name) for name in missing)}, which the data does not have. "
                f"There is: {', '.join(sorted(available))}. Rename the argument, add the column, or give it a default."
            )

    def _checked(self, returned: Any, available: Mapping[str, Any]) -> list[Score]:
        n = len(available["completions"])
        if hasattr(returned, "tolist"):  # numpy and torch
            returned = returned.tolist()
        if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Sequence):
            raise RewardError(
                f"{self._where()} returned {_short(returned)}; it must return a list of {n} numbers, one per completion"
            )
        if len(returned) != n:
            raise RewardError(
                f"{self._where()} returned {len(returned)} rewards for {n} completions; it must return one per completion"
            )
        return [self._number(value, row, available) for row, value in enumerate(returned)]

    def _number(self, value: Any, row: int, available: Mapping[str, Any]) -> Score:
        if value is None or isinstance(value, DropEpisode):
            return value
        if hasattr(value, "item"):  # a scalar of numpy or torch
            value = value.item()
        number = as_float(value)
        if number is None or not abs(number) <= _LARGEST:
            raise RewardError(
                f"{self._where()} returned {_short(value)} for row {row}{_prompt_end(row, available)}; every reward must be a "
                f"finite number (at most {_LARGEST:g}). Where nothing can be scored, return None or raise DropEpisode."
            )
        return number

    def _failure(
        self, error: BaseException, oversight: Oversight, given: Mapping[str, Any], available: Mapping[str, Any]
    ) -> RewardError:
        row = self._failing_row(oversight, given)
        frames = traceback.extract_tb(error.__traceback__)
        line = line_of([(frame.filename, frame.lineno) for frame in frames], self.source)
        which = f" at row {row}{_prompt_end(row, available)}" if row is not None else ""
        return RewardError(f"{self._where()} raised {_described(error)}{line}{which}. Mend the reward or the row.")

    def _failing_row(self, oversight: Oversight, given: Mapping[str, Any]) -> int | None:
        """Return the first row that fails alone, found by asking again, one row at a time.

        None where that takes too long.
        """
        n = len(given["completions"])
        deadline = time.monotonic() + _SEARCH_S
        for row in range(n):
            if time.monotonic() > deadline:
                return None
            alone = only_rows(given, [row], n)
            try:
                oversight.run(lambda alone=alone: self.function(**alone))  # type: ignore[misc]  # mypy cannot infer it
            except DropEpisode:
                continue
            except KeyboardInterrupt:
                raise
            except BaseException:  # the plugin's; this only finds where
                return row
        return None

    def _where(self) -> str:
        return f"reward {self.name} ({self.source})"


def _checked_signature(function: RewardFunction, name: str, source: str) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"{source}: the arguments of {name} cannot be read ({error}); write it as a plain function"
        ) from error
    parameters = signature.parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    positional_only = [p.name for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if positional_only or ("completions" not in parameters and not takes_all):
        raise PluginError(
            f"{source}: {name}{signature} cannot be called as a reward: it must take `completions` by name, as in "
            f"`def {name}(completions, answer, **kwargs) -> list[float]`"
        )
    return signature


def as_float(value: Any) -> float | None:
    """Return a real number as a float; None for anything else, and for what is too large."""
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return None


def _described(error: BaseException) -> str:
    """Describe an error in one line, also one that cannot say what it is."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        text = f"(its text raises {type(second).__name__})"
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"(its repr raises {type(error).__name__})"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _prompt_end(row: int, available: Mapping[str, Any]) -> str:
    """Return the end of the row's prompt, so that a person finds it in the data."""
    prompts = available.get("prompts")
    if not prompts or row >= len(prompts):
        return ""
    prompt = prompts[row]
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
    text = " ".join(text.split())
    return f" (prompt {text if len(text) <= 80 else text[:77] + '...'!r})"
