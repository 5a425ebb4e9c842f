"""docs/background/one_question.md counts the functions that a row passes, and names them: those of a real step, and no other."""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.testing import ByteChat, tiny_trainer

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "toolgrpo"
PAGE = (ROOT / "docs/background/one_question.md").read_text()
NAMED = [
    (file, name)
    for file, names in re.findall(r"`([\w/]+\.py)`((?: `[\w.]+`(?: \(forwards\))?)+)", PAGE)
    for name in re.findall(r"`([\w.]+)`", names)
]
MOST = {"functions": 91, "forwarding": 2, "shapes": 7}  # may only fall

# Where a row or its episode changes or is handed to another task, thread or process. What is on the stack there, it passes.
CHANGES = """read_jsonl check_row suited_rows rows_that_fit Scheduler.submit ByteChat.prompt ScriptedEngine.sample
    ByteChat.parse Ledger.sampled ToolboxSession.call ArgumentChecker.check WorkerPool.submit Dispatcher.enqueue
    WorkerLink.send Job.answer ByteChat.bridge Ledger.context Ledger.finish RolloutBatch.numbered RewardGuard._answer
    RolloutBatch.graded as_trl CallsOfTRL._calculate_rewards train_batch drops estimator dead_groups correction left_out
    RolloutBatch.with_advantages denominator with_train_batch put_in_order forward_packing"""
PROTOCOLS = {"chat/base.py", "engines/base.py"}  # on the page in place of the fakes of `testing/`
ASIDE = ("Prompts.", "Dispatcher._tick")  # prompts are measured before, and workers are pinged: no episode goes there
OTHERS = ("commands/", "tools/workers/tool_worker.py", "tools/render.py", "tools/plugin/")  # of the command, a worker


@cache
def named_by(code: CodeType) -> tuple[str, str] | None:
    """Return file and name of a function of the package; a function inside another one counts as that one."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    return path.relative_to(PACKAGE).as_posix(), re.sub(r"\.<.*", "", code.co_qualname)


def passed(run: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return the functions of the package that stand on a stack where something changes, in any thread."""
    found, changes = set[tuple[str, str]](), frozenset(CHANGES.split())

    def hear(frame: FrameType, event: str, arg: object) -> None:
        name = named_by(frame.f_code) if event == "call" else None
        if name is not None and name[1] in changes:
            stack: list[tuple[str, str]] = []
            on_stack: FrameType | None = frame
            while on_stack is not None:
                stack += filter(None, [named_by(on_stack.f_code)])
                on_stack = on_stack.f_back
            if not any(name.startswith(ASIDE) for _, name in stack):
                found.update(stack)

    threading.setprofile(hear)
    sys.setprofile(hear)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {one for one in found if not one[0].startswith("testing/")}


def test_the_page_names_functions_that_are_there() -> None:
    """`file.py` `name` on the page is a function or a class of that file, or a method of one."""
    for file, name in NAMED:
        owner: ast.AST = ast.parse((PACKAGE / file).read_text())
        for part in name.split("."):
            found = [one for one in ast.iter_child_nodes(owner) if getattr(one, "name", None) == part]
            assert found, f"{file} has no {name}; the page names another"
            owner = found[0]


def test_the_page_counts_what_it_names() -> None:
    said = re.search(r"(\d+) functions,\s+(\d+)\s+of\s+which\s+only\s+forward,\s+and\s+(\d+)\s+shapes", PAGE)
    assert said is not None
    counted = {
        "functions": len(set(NAMED)),
        "forwarding": PAGE.count("(forwards)"),
        "shapes": len(re.findall(r"\*\*`\w+`\*\*", PAGE)),
    }
    assert list(map(int, said.groups())) == list(counted.values()) and len(set(NAMED)) == len(NAMED)
    assert all(counted[name] <= most for name, most in MOST.items())


@pytest.mark.e2e
def test_a_row_passes_the_functions_of_the_page_and_no_other(tmp_path: Path) -> None:
    rows, tools = tmp_path / "data.jsonl", tmp_path / "tools.py"
    rows.write_text("".join(json.dumps({"prompt": f"q{number}", "answer": "3"}) + "\n" for number in range(8)))
    tools.write_text("def add(a: int, b: int) -> int:\n    '''Add.'''\n    return a + b\n\n\nTOOL_FUNCTIONS = [add]\n")

    def script(request: Any, number: int) -> list[int]:
        ended = ">tool:" in ByteChat.text(request.ids)
        return ByteChat.say(f"{number}" if ended else 'call add {"a": 1, "b": 2}')

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(one[-1]["content"]) % 2) for one in completions]

    def run() -> None:
        with tiny_trainer(
            tmp_path / "out", reward, script, rows=load_tasks(rows), parts={"tools": tools}, max_steps=1
        ) as trainer:
            trainer.train()

    on_the_way = passed(run)
    on_the_page = {one for one in NAMED if one[0] not in PROTOCOLS and not one[0].startswith(OTHERS)}
    assert sorted(on_the_way - on_the_page) == [], "a row passes them, and the page does not name them"
    assert sorted(on_the_page - on_the_way) == [], "the page names them, and a row does not pass them"
