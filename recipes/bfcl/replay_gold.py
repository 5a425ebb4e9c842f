"""Play BFCL's own reference conversations through whole episodes, and count how many are found right.

    python recipes/bfcl/replay_gold.py            # all 800; every one must be right
    python recipes/bfcl/replay_gold.py 20         # every 20th

The calls are written as a model writes them, so names, schemas, the argument checks, the simulated
APIs, the users' turns and the checker are those of a training. A turn of the reference is as many
turns of the model as it has calls, and one that says it is done.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bfcl_tasks import CATEGORIES, Task, api_class, tasks
from bfcl_world import Call
from make_rows import row

from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import Toolbox, load_tools

ENVIRONMENT = Path(__file__).with_name("bfcl_environment.py")
_ROOM = 10_000_000  # tokens; a token is a byte here


def parsed(task: Task, written: str) -> Call:
    """Return a call of the reference, which BFCL writes as Python, with its arguments by name."""
    node = ast.parse(written, mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name), written
    name = node.func.id
    api = next(kind for kind in map(api_class, task.entry["involved_classes"]) if hasattr(kind, name))
    names = list(inspect.signature(getattr(api, name)).parameters)[1:]
    by_place = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    return Call(name, by_place | {str(one.arg): ast.literal_eval(one.value) for one in node.keywords})


def said(task: Task) -> Iterator[str]:
    """Yield what a model would say that does what the reference does."""
    for turn in task.gold:
        for call in (parsed(task, written) for written in turn):
            yield f"call {call.name} {json.dumps(call.arguments)}"
        yield "Done."


def play(task: Task, toolbox: Toolbox, turns: Sequence[str] | None = None, max_turns: int | None = None) -> Trajectory:
    """Return the episode of a task in which a model says this; the reference, where nothing is given."""
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns or said(task)], max_model_len=_ROOM)
    given = row(task)
    limits: dict[str, Any] = {"max_turns": max_turns, "max_tool_response_tokens": None, "max_completion_length": _ROOM}
    return run_episode(engine, toolbox, question=given["prompt"], row=given, **limits)


def main(every: int) -> int:
    right, played = Counter[str](), Counter[str]()
    with load_tools(ENVIRONMENT) as toolbox:
        for place, task in enumerate(tasks().values()):
            if place % every:
                continue
            episode = play(task, toolbox)
            played[task.category] += 1
            right[task.category] += episode.reward == 1.0
            if episode.reward != 1.0:
                failed = [call for call in episode.calls if not call.ok]
                print(f"{task.name}: reward {episode.reward}, {episode.dropped}, ended {episode.stop_reason}, {failed}")
    for category in CATEGORIES:
        print(f"{category:13s} {right[category]:4d} of {played[category]}")
    return played.total() - right.total()


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
