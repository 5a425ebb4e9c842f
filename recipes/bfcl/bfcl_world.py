"""The world of one BFCL task: its simulated APIs, called with parsed arguments, and BFCL's own checker over them.

The checker (`multi_turn_checker`) runs all calls of the model in fresh instances beside those of the
reference, turn by turn, and compares the states and the results. It knows calls as texts, which it
evaluates as Python; here its code is given another executor for the model's calls, which takes name
and arguments. Only the reference's own calls, out of the package, are evaluated.

Not covered: BFCL's limit of 20 steps a turn; `--max_turns` bounds the whole conversation instead.
"""

from __future__ import annotations

import copy
import json
import types
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bfcl_eval.constants.executable_backend_config import STATELESS_CLASSES
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
from bfcl_tasks import Task, api_class

__all__ = ["Call", "Result", "World", "verdict"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its arguments, as the model's JSON had them."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What an API answered, in the words that BFCL compares."""

    text: str
    failed: bool


class World:
    """The APIs of one task, in the state that it begins with."""

    def __init__(self, task: Task) -> None:
        self.instances: dict[str, Any] = {}
        for name in task.entry["involved_classes"]:
            api = self.instances[name] = api_class(name)()
            if name not in STATELESS_CLASSES:
                start = copy.deepcopy(task.entry["initial_config"].get(name, {}))
                api._load_scenario(start, long_context=task.category == "long_context")

    def run(self, call: Call) -> Result:
        """Call a function of whichever API has it."""
        api = next(one for one in self.instances.values() if hasattr(one, call.name))
        try:
            value = getattr(api, call.name)(**copy.deepcopy(dict(call.arguments)))
        except Exception as error:  # a simulated API may raise anything for what a model gives it
            return Result(f"Error during execution: {error}", failed=True)
        return Result(_text(value), failed=False)


def verdict(task: Task, turns: Sequence[Sequence[Call]]) -> str | None:
    """Return None where the conversation is right by BFCL's checker, else what it says."""
    if len(turns) != len(task.gold):
        return f"ended in turn {len(turns)} of {len(task.gold)}"
    world, name = World(task), f"episode_{uuid.uuid4().hex}"

    def execute(func_call_list: list[Any], *args: Any, model_name: str, **kwargs: Any) -> tuple[list[str], Any]:
        if model_name == name:
            return [world.run(call).text for call in func_call_list], world.instances
        return multi_turn_utils.execute_multi_turn_func_call(  # type: ignore[no-any-return]
            func_call_list, *args, model_name=model_name, **kwargs
        )

    steps = [[[call] for call in turn] for turn in turns]
    own = {**vars(multi_turn_checker), "execute_multi_turn_func_call": execute}
    check = types.FunctionType(multi_turn_checker.multi_turn_checker.__code__, own)
    try:
        found = check(steps, [list(turn) for turn in task.gold], dict(task.entry), task.category, name)
    finally:
        for left in [key for key in vars(multi_turn_utils) if key.startswith(name)]:  # the reference's instances
            delattr(multi_turn_utils, left)
    return None if found["valid"] else str(found["error_message"])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            return str(value)
    return value if isinstance(value, str) else str(value)
