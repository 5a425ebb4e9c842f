"""One reward: a user's or built-in function behind checks, callable the way TRL calls rewards.

Invariants:

* A call returns exactly one plain finite float per completion, or raises; None and `DropEpisode` stand for an episode
  that is not scored. What the function returns is never repaired: a wrong length, NaN or a failure is
  a `RewardError` that names the file, the function, and the row where it can be seen.
* The function gets only the arguments it asks for, and no episode that a tool or an environment has dropped. If it
  raises `DropEpisode` over a batch, it is asked again about each episode alone: only those it means are dropped.
* An infrastructure failure (`InfrastructureError`, say a sandbox that cannot start) passes through and is never a score.

The deadline is in guard.py; where rewards come from, in `__init__.py`. This package knows no torch, TRL or vLLM.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.episode.trajectory import Message, Trajectory
from toolgrpo.errors import ConfigError, PluginError, RewardError
from toolgrpo.rewards.guard import RewardGuard, finite, listed, short
from toolgrpo.support.shipped_files import nearest_is

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""`reward_func(completions, answer, **kwargs) -> list[float]`, plain or async."""

Score = float | None | DropEpisode
"""What an episode is worth to one reward; None: it does not score it."""

_SAME = {"prompt": "prompts", "solution": "answer"}
"""Names of rewards written for TRL, where the data has no such column: the column goes to `prompts`, the answer is one."""

_GIVEN = ("prompts", "completions", "completion_ids", "trajectories", "trainer_state", "log_extra", "log_metric")
"""What every call has, besides the columns of the data."""

CALL_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call")
"""What opens a call in the text of most chat templates. No message has one: calls stand in `tool_calls`."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

row_name: ContextVar[Callable[[int], str]] = ContextVar("row_name", default="row {}".format)
"""How an error names the row of the episode at a place of what a reward was asked: by file and line where they are known."""


@contextmanager
def rows_named(name: Callable[[int], str]) -> Iterator[None]:
    """Let errors of the rewards that are asked meanwhile name rows so."""
    token = row_name.set(name)
    try:
        yield
    finally:
        row_name.reset(token)


@dataclass(frozen=True)
class Reward:
    """A checked reward function. `source` says where it is from, for logs and errors.

    `gold(row)` gives the messages of an episode that earns full marks, where an answer alone can.
    `refused(rows)` says which rows it cannot score, by number, and why. `say` tells a person of a call that runs long.
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
        """Return the name under which TRL logs the reward."""
        return self.name

    def __call__(self, *, completions: Sequence[list[Message]], **arguments: Any) -> list[Score]:
        """Return one score per completion; `arguments` are what TRL passes: prompts, ids, trajectories, every column."""
        n = len(completions)
        available = {"completions": completions, **arguments}
        available = {name: available[ours] for name, ours in _SAME.items() if ours in available} | available
        if self.marker is not None and (log_metric := arguments.get("log_metric")) is not None:
            log_metric(f"rewards/{self.name}/looks_for_marker", 1.0)  # for the doctor
        trajectories = arguments.get("trajectories") or [None] * n
        live = [row for row in range(n) if getattr(trajectories[row], "dropped", None) is None]
        scores: list[Score] = [None] * n
        for row, score in zip(live, self._ask(available, live, n) if live else (), strict=True):
            scores[row] = score
        return scores

    def _ask(self, of_batch: Mapping[str, Any], rows: Sequence[int], n: int) -> list[Score]:
        """Return the scores of these episodes of a batch of n."""
        available = only_rows(of_batch, rows, n)
        given = arguments_for(self._signature, available, self._where())
        given = {name: _own(value, len(rows), name) for name, value in given.items()}
        guard, name_of = RewardGuard(self._where(), self.source, self.timeout_s, self.say), row_name.get()
        try:
            with rows_named(lambda place: name_of(rows[place])):
                return guard.ask(
                    lambda: self.function(**given),
                    lambda returned: self._checked(returned, available, len(rows)),
                    lambda error: _place(error, available | given, len(rows)),
                )
        except DropEpisode as drop:
            if len(rows) == 1:
                return [drop]
        return [score for row in rows for score in self._ask(of_batch, [row], n)]  # one by one

    @property
    def is_async(self) -> bool:
        """Return whether the function only waits, so that others can be asked meanwhile."""
        inner = _innermost(self.function)
        return any(map(inspect.iscoroutinefunction, (inner, getattr(type(inner), "__call__", None))))  # noqa: B004

    @property
    def marker(self) -> str | None:
        """Return the marker of a call that the function's file has in its text, if it has one."""
        code = None if self.source == "built in" else _code_of(self.function)
        if code is not None:
            linecache.checkcache(code.co_filename)  # it may have been edited
        text = "" if code is None else "".join(linecache.getlines(code.co_filename))
        return next((marker for marker in CALL_MARKERS if marker in text), None)

    def reads_marker_in_vain(self, scores: Collection[Any]) -> str | None:
        """Return what to say of these scores if all are equal and the function's file looks for a marker of calls."""
        marker = self.marker
        if marker is None or len(set(scores)) != 1:
            return None
        return (
            f"{self.name}: every episode scores {next(iter(scores))}, and its file looks for {marker}, which no message "
            f"has: calls are in `tool_calls`, and in toolgrpo.rewards.calls(trajectory)"
        )

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise RewardError if the function needs an argument that neither the trainer nor these columns give."""
        there = {*_GIVEN, *columns}
        check_has(self._signature, there | {name for name, ours in _SAME.items() if ours in there}, self._where())

    def _checked(self, returned: Any, available: Mapping[str, Any], n: int) -> list[Score]:
        values = listed(returned)
        if values is None:
            raise RewardError(
                f"{self._where()} returned {short(returned)}; it must return a list of {n} numbers, one per completion"
            )
        if len(values) != n:
            raise RewardError(
                f"{self._where()} returned {len(values)} rewards for {n} completions; it must return one per completion"
            )
        return [self._score(value, place, available) for place, value in enumerate(values)]

    def _score(self, value: Any, place: int, available: Mapping[str, Any]) -> Score:
        if value is None or isinstance(value, DropEpisode):
            return value
        number = finite(value)
        if number is None:
            raise RewardError(
                f"{self._where()} returned {short(value)} for {row_name.get()(place)}{_prompt_end(place, available)}; every reward "
                f"must be a finite number (at most 3.4e+38). Where nothing can be scored, return None or raise DropEpisode."
            )
        return number

    def _where(self) -> str:
        return f"reward {self.name} ({self.source})" if self.source else f"reward {self.name}"


def arguments_for(signature: inspect.Signature, available: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the arguments that a function asks for; `what` names it in an error."""
    check_has(signature, available, what)
    if takes_all(signature):
        return dict(available)
    return {name: available[name] for name in signature.parameters if name in available}


class _Completion(list[Any]):
    """The messages of an episode, which a reward for texts would find nothing in."""

    def __contains__(self, searched: object) -> bool:
        if isinstance(searched, str):
            raise TypeError(
                "a completion is a list of messages; its text is final_answer(completion), of toolgrpo.rewards"
            )
        return super().__contains__(searched)


def _own(value: Any, n: int, name: str) -> Any:
    """Return a copy for each episode: siblings have one row, others read it too, and a reward may use up what it is given."""
    if name == "trajectories" or not isinstance(value, list) or len(value) != n:
        return value
    copies = [deepcopy(one) for one in value]
    return [_Completion(one) if isinstance(one, list) else one for one in copies] if name == "completions" else copies


def check_has(signature: inspect.Signature, available: Collection[str], what: str) -> None:
    """Raise RewardError if a function needs an argument that nobody will give."""
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC and name not in available
    ]
    if missing:
        raise RewardError(
            f"{what} asks for {', '.join(map(repr, missing))}, which the data does not have"
            f"{nearest_is(missing[0], available)}. There is: {', '.join(sorted(available))}. Rename the argument, add the column, or give it a default."
        )


def watched(rewards: Any, timeout_s: float | None = None, say: Callable[[str], None] | None = None) -> Any:
    """Return the same rewards, plain functions checked too, with a deadline for each call; reward models stay as they are."""
    if isinstance(rewards, Sequence) and not isinstance(rewards, str):
        return [watched(reward, timeout_s, say) for reward in rewards]
    if not callable(rewards) or hasattr(rewards, "parameters"):
        return rewards
    reward = rewards if isinstance(rewards, Reward) else _plain(rewards)
    return replace(reward, timeout_s=reward.timeout_s or timeout_s, say=say or reward.say)


def _plain(function: Callable[..., Any]) -> Reward:
    inner = _innermost(function)
    code = getattr(inner, "__code__", None)
    return Reward(function, getattr(inner, "__name__", type(inner).__name__), code.co_filename if code else "")


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _code_of(function: Any) -> CodeType | None:
    function = inspect.unwrap(_innermost(function))
    code: CodeType | None = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code


def only_rows(arguments: Mapping[str, Any], rows: Sequence[int], n: int) -> dict[str, Any]:
    """Return the arguments of a reward for some of n episodes: every column has one value for each."""
    return {
        name: [value[row] for row in rows] if isinstance(value, (list, tuple)) and len(value) == n else value
        for name, value in arguments.items()
    }


def source_text(reward: Any) -> str:
    """Return where the function of a reward stands, `FILE:LINE`; of a reward model its class."""
    function = _innermost(reward.function if isinstance(reward, Reward) else reward)
    if not callable(function) or hasattr(function, "parameters"):
        return type(function).__name__
    code = _code_of(function)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(function).__name__
    built_in = isinstance(reward, Reward) and reward.source == "built in"
    return f"built in, {place}" if built_in else place


def _checked_signature(function: RewardFunction, name: str, source: str) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"{source}: the arguments of {name} cannot be read ({error}); write it as a plain function"
        ) from error
    is_positional = any(p.kind is p.POSITIONAL_ONLY for p in signature.parameters.values())
    if is_positional or not ("completions" in signature.parameters or takes_all(signature)):
        raise PluginError(
            f"{source}: {name}{signature} cannot be called as a reward: it must take `completions` by name, as in "
            f"`def {name}(completions, answer, **kwargs) -> list[float]`"
        )
    return signature


def takes_all(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _place(error: BaseException, available: Mapping[str, Any], n: int) -> str:
    """Return at which row a function failed, if that can be seen: a variable then holds the row's messages or episode."""
    held = {
        id(one): place
        for name in ("completions", "trajectories")
        for place, one in enumerate(available.get(name) or ())
        if isinstance(one, list | Trajectory)
    }
    place = 0 if n == 1 else None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = {held[id(value)] for value in frame.f_locals.values() if id(value) in held}
        place = found.pop() if len(found) == 1 else place
    return "" if place is None else f" at {row_name.get()(place)}{_prompt_end(place, available)}"


def _prompt_end(row: int, available: Mapping[str, Any]) -> str:
    """Return the end of the row's prompt, so that a person finds it in the data."""
    prompts = available.get("prompts")
    if not prompts or row >= len(prompts):
        return ""
    prompt = prompts[row]
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
    text = " ".join(text.split())
    return f" (prompt {text if len(text) <= 80 else text[:77] + '...'!r})"
