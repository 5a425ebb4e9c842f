"""Play every row as it should go, in whole episodes; guess the held-out answers without tools; compare the splits' names.

    python recipes/sql_explorer/check_rows.py          # every row must earn 1.0, and guessers be right in at most 5 %
    python recipes/sql_explorer/check_rows.py 20       # every 20th row

Calls are written as a model writes them, so that schemas, the checks of arguments, the environment, the limits of the
recipe and the reward are those of a training.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from sql_rows import HERE, Row, Task, tasks, worked

from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.rewards import load_reward
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import Toolbox, load_tools

_ROOM = 100_000  # tokens; a token is a byte here
_REWARD = load_reward(HERE / "sql_reward.py")


def says(message: Row) -> str:
    """Return what a model says that sends this message."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "\n".join(f"call {call['name']} {json.dumps(call['arguments'])}" for call in calls) or str(
        message["content"]
    )


def play(row: Row, turns: list[str], box: Toolbox, **limits: Any) -> Trajectory:
    """Return the episode of a row in which a model says these turns, one after the other."""
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns], max_model_len=_ROOM)
    limits = {"max_turns": 10, "max_completion_length": _ROOM, "max_tool_response_tokens": None, **limits}
    return run_episode(engine, box, question=row["prompt"], row=row, **limits)


def earns(row: Row, episode: Trajectory, before: Sequence[Row] = ()) -> float:
    prompt = [*before, {"role": "user", "content": row["prompt"]}]
    given = {"prompts": [prompt], "answer": [row["answer"]], "trajectories": [episode]}
    (earned,) = _REWARD(completions=[list(episode.messages)], **given)
    assert isinstance(earned, float)
    return earned


def play_worked(task: Task, box: Toolbox, mistaken: bool) -> float:
    turns = [says(message) for message in worked(task, box, mistaken) if message["role"] == "assistant"]
    return earns(task.row(), play(task.row(), turns, box))


def guesses(question: str, known: list[Row]) -> dict[str, str]:
    """Return what is guessed from the questions and answers that are trained on, in four ways."""
    words = set(question.split())
    near = sorted(known, key=lambda row: len(words ^ set(row["prompt"].split())))
    alike = [row["answer"] for row in known if row["prompt"].split()[:4] == question.split()[:4]] or [near[0]["answer"]]
    numbers = [float(answer) for answer in alike if answer.replace(".", "", 1).isdigit()]
    return {
        "the nearest question's": near[0]["answer"],
        "the commonest of ten near ones": Counter(row["answer"] for row in near[:10]).most_common(1)[0][0],
        "the commonest of its form": Counter(alike).most_common(1)[0][0],
        "the median of its form": f"{median(numbers):.0f}" if numbers else sorted(alike)[len(alike) // 2],
    }


def rightly_guessed() -> Counter[str]:
    """Count how many held-out answers each way of guessing gets right."""
    known = [task.row() for task in tasks("train")]
    held_out = [task.row() for task in tasks("heldout")]
    right = Counter[str]()
    for row in held_out:
        right.update({way: guess == row["answer"] for way, guess in guesses(row["prompt"], known).items()})
    return right


def shared_names() -> set[str]:
    """Return the names of tables and columns, the words of comments and the texts that both splits have, but dates."""
    names: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split, of_split in names.items():
        for company in {task.company.name: task.company for task in tasks(split)}.values():
            database = company.connect()
            for table, sql in database.execute("SELECT name, sql FROM sqlite_master").fetchall():
                values = (value for row in database.execute(f"SELECT * FROM {table}") for value in row)
                of_split.update(re.findall(r"[a-z_]+", sql), (value for value in values if isinstance(value, str)))
    return {name for name in names["train"] & names["heldout"] if not re.fullmatch(r"[\d-]+", name)}


def main(every: int) -> int:
    failed = 0
    with load_tools(HERE / "sql_environment.py") as box:
        for split in ("train", "heldout"):
            drawn = tasks(split)[::every]
            earned = []
            for number, task in enumerate(drawn):
                earned.append(play_worked(task, box, mistaken=number % 3 == 2))
                if earned[-1] != 1.0:
                    print(f"{earned[-1]}: {task.row()} {task.asked}")
            print(f"{split}: {earned.count(1.0)} of {len(earned)} rows earn 1.0 when they are played as they should be")
            failed += len(earned) - earned.count(1.0)
    print(f"names in both splits: {shared_names() or 'none'}")
    guessed = rightly_guessed()
    for way, n_right in guessed.items():
        print(f"without tools, {way} answer: {n_right} of 240")
    return failed + len(shared_names()) + sum(n_right > 12 for n_right in guessed.values())


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
