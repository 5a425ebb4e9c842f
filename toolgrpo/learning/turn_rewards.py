"""Rewards by turn: the built-in ones, and a user's function behind checks.

    gold_call    1/n for each of the row's n gold calls, in the turn that makes it first: name and arguments
    environment  what the environment's `step_reward()` gave after the turn

`gold_call` adds up to at most 1 over an episode, so it pays for no further turn as such.

`turn_reward_func(trajectories, **columns)` returns for each trajectory a list with one finite number
for each of its turns. Every column of the data arrives as a list under its name, if the function
asks for it. What it returns is never repaired: a wrong length, NaN or a failure is a `RewardError`
that names the file, the function, the episode and the turn.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolgrpo.errors import PluginError, RewardError
from toolgrpo.plugin_files import import_file
from toolgrpo.rewards.base import arguments_for, check_has, takes_all
from toolgrpo.rewards.gold_calls import listed_calls, made_calls
from toolgrpo.rewards.guard import RewardGuard, finite, listed, short
from toolgrpo.rollout.batch import Row
from toolgrpo.trajectory import Trajectory, Turn

_FUNCTION = "turn_reward_func"
_EXAMPLE = f"def {_FUNCTION}(trajectories, **kwargs): return [[0.0] * len(t.turns) for t in trajectories]"

logger = logging.getLogger(__name__)


def gold_call(trajectories: Sequence[Trajectory], gold_calls: Sequence[Any], **_: Any) -> list[list[float]]:
    """Pay for each gold call of the row once, in the turn that makes it first; a row without any pays nothing."""
    found = []
    for row, (trajectory, gold) in enumerate(zip(trajectories, gold_calls, strict=True)):
        wanted = [] if gold is None else listed_calls(gold, row)
        n = len(wanted)
        of_turns = []
        for turn in trajectory.turns:
            hits = 0
            for call in made_calls(turn.attempts):
                if call in wanted:
                    wanted.remove(call)
                    hits += 1
            of_turns.append(hits / n if n else 0.0)
        found.append(of_turns)
    return found


def environment(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
    """Return what each episode's environment gave after each turn with calls; other turns have 0."""
    return [
        [_given(turn, place, number) for place, turn in enumerate(one.turns)] for number, one in enumerate(trajectories)
    ]


def _given(turn: Turn, place: int, episode: int) -> float:
    if turn.reward is None and turn.results:
        raise RewardError(
            f"the turn reward `environment` has nothing for turn {place + 1} of episode {episode}: its environment gives "
            f"no reward by step. Use --environment with a class that has `step_reward()`, or another --turn_reward"
        )
    return turn.reward or 0.0


BUILT_IN_TURN_REWARDS: dict[str, Callable[..., list[list[float]]]] = {
    "gold_call": gold_call,
    "environment": environment,
}


@dataclass(frozen=True)
class TurnReward:
    """A checked function. `source` says where it is from; `timeout_s` is the config's `reward_timeout`."""

    function: Callable[..., Any]
    name: str
    source: str
    timeout_s: float | None = None
    _signature: inspect.Signature = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise PluginError(
                f"{self.source}: {self.name} must be a function, as in `{_EXAMPLE}`; it is a {type(self.function).__name__}"
            )
        signature = inspect.signature(self.function)
        if "trajectories" not in signature.parameters and not takes_all(signature):
            raise PluginError(f"{self.source}: {self.name} must take `trajectories` by name, as in `{_EXAMPLE}`")
        object.__setattr__(self, "_signature", signature)

    def __call__(self, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        """Return one number for each turn of each trajectory; `rows` are those that they came from."""
        given = self._arguments(rows, trajectories)
        guard = RewardGuard(self._where(), self.source, self.timeout_s, logger.warning)
        return guard.ask(lambda: self.function(**given), lambda returned: self._checked(returned, trajectories))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise RewardError if the function needs an argument that neither the trainer nor the data has."""
        check_has(self._signature, {"trajectories", *columns}, self._where())

    def _arguments(self, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        names = dict.fromkeys(name for row in rows for name in row)
        columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        return arguments_for(self._signature, {**columns, "trajectories": list(trajectories)}, self._where())

    def _checked(self, returned: Any, trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        lists = listed(returned)
        if lists is None:
            raise RewardError(
                f"{self._where()} returned a {type(returned).__name__}; it must return a list with one list of numbers for "
                f"each of the {len(trajectories)} trajectories"
            )
        if len(lists) != len(trajectories):
            raise RewardError(
                f"{self._where()} returned {len(lists)} lists for {len(trajectories)} trajectories; it must return one for each"
            )
        return [
            self._numbers(of, number, len(one.turns))
            for number, (of, one) in enumerate(zip(lists, trajectories, strict=True))
        ]

    def _numbers(self, returned: Any, episode: int, n_turns: int) -> tuple[float, ...]:
        values = listed(returned)
        if values is None or len(values) != n_turns:
            got = f"a {type(returned).__name__}" if values is None else f"{len(values)} numbers"
            raise RewardError(
                f"{self._where()} returned {got} for episode {episode}, which has {n_turns} turns; it must return one "
                f"number for each turn, also for one without a call"
            )
        return tuple(self._number(value, episode, turn) for turn, value in enumerate(values))

    def _number(self, value: Any, episode: int, turn: int) -> float:
        number = finite(value)
        if number is None:
            raise RewardError(
                f"{self._where()} returned {short(value)} for turn {turn + 1} of episode {episode}; every reward of a "
                f"turn must be a finite number. For nothing to say, give 0"
            )
        return number

    def _where(self) -> str:
        return f"turn reward {self.name} ({self.source})"


def get_turn_reward(name: str, timeout_s: float | None = None) -> TurnReward:
    """Return a built-in reward by turn."""
    return TurnReward(BUILT_IN_TURN_REWARDS[name], name, "built in", timeout_s)


def load_turn_reward(path: str | Path, timeout_s: float | None = None) -> TurnReward:
    """Load `turn_reward_func` of a Python file, which may import its neighbours; `FILE.py:NAME` names another function."""
    text = str(path)
    file, _, name = (
        text.rpartition(":") if text.rpartition(":")[2].isidentifier() and ".py:" in text else (text, "", "")
    )
    name = name or _FUNCTION
    module = import_file(Path(file))
    if not hasattr(module, name):
        raise PluginError(f"{file} has no {name}. Write one, e.g. `{_EXAMPLE}`")
    return TurnReward(getattr(module, name), f"{Path(file).stem}.{name}", file, timeout_s)


@dataclass(frozen=True)
class TurnRewards:
    """All rewards by turn of a run, with their weights. A dropped episode is not asked about: its turns have 0."""

    sources: tuple[TurnReward, ...] = ()
    weights: tuple[float, ...] = ()

    def __call__(self, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        """Return the weighted sum for each turn of each trajectory."""
        found = [(0.0,) * len(one.turns) for one in trajectories]
        asked = [place for place, one in enumerate(trajectories) if one.dropped is None]
        for source, weight in zip(self.sources, self.weights, strict=True) if asked else ():
            given = source([rows[place] for place in asked], [trajectories[place] for place in asked])
            for place, of in zip(asked, given, strict=True):
                found[place] = tuple(sum_ + weight * value for sum_, value in zip(found[place], of, strict=True))
        return found
