"""Write the rows of the recipe, from their seeds; the files that are shipped are what this writes.

    python recipes/sql_explorer/sql_rows.py recipes/sql_explorer           train.jsonl (400), heldout.jsonl (240)
    python recipes/sql_explorer/sql_rows.py outputs/sql --rung schema --tier "one table" trap
    python recipes/sql_explorer/sql_rows.py outputs/sql --example          each question after two worked ones
    python recipes/sql_explorer/sql_rows.py outputs/sql --worked           also worked.jsonl, for `toolgrpo sft`; or: --worked clean
    python recipes/sql_explorer/sql_rows.py outputs/sql --worked --half    worked.jsonl for half of the kinds of company, and
                                                                           train.jsonl for the others

A row has a question, its answer, the name of its database, and the rung of the ladder: what the model is told of the database
at the start, and so which tools it needs. It has no query and no call. Those are in worked.jsonl only: one conversation for
each training row as it should go, every third one with a mistake and its repair, or with `clean` none.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sql_companies import KINDS, Company, plural
from sql_questions import TIERS, Asked, ask

from toolgrpo.tools import Toolbox, load_tools

HERE = Path(__file__).resolve().parent
RUNGS = {"schema": ["query"], "tables": ["describe", "query"], "nothing": ["list_tables", "describe", "query"]}
ROWS = {"train": 400, "heldout": 240}
EACH_KIND = {"train": 2, "heldout": 1}  # databases of a kind
_MOST_ALIKE = 3  # rows with one answer
_TRIES = 3000
_EXAMPLE = "hotel-3"  # a database of neither split
_EXAMPLE_ASKED = {  # by tier, each with a mistake and its repair or without
    ("one table", True): "What is the total quantity of all bookings?",
    ("trap", False): "What is the worth in euros of all bookings booked in 2021?",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    company: Company
    rung: str
    tier: str
    asked: Asked

    def row(self) -> Row:
        row = {"prompt": self.asked.question, "answer": self.asked.answer, "database": self.company.name}
        return {**row, "rung": self.rung, "tools": RUNGS[self.rung], "task": f"{self.tier}, {self.rung} told"}


def tasks(split: str, rungs: Sequence[str] = tuple(RUNGS), tiers: Sequence[str] = TIERS) -> list[Task]:
    """Draw the tasks of a split: as many of each tier at each rung; no question twice, no answer often."""
    names = [f"{kind}-{number}" for kind in KINDS[split] for number in range(1, EACH_KIND[split] + 1)]
    asked: set[tuple[str, str]] = set()
    answers: Counter[str] = Counter()
    made: list[Task] = []
    for place, name in enumerate(names):
        company, rng = Company(name), random.Random(f"questions about {name}")
        database = company.connect()
        while len(made) < ROWS[split] * (place + 1) // len(names):
            tier, rung = tiers[len(made) % len(tiers)], rungs[len(made) // len(tiers) % len(rungs)]
            for _ in range(_TRIES):
                one = ask(company, database, tier, rng)
                if one and (name, one.question) not in asked and answers[one.answer] < _MOST_ALIKE:
                    break
            else:
                raise SystemExit(f"{name} has too few questions of the tier {tier!r}; name another tier beside it")
            asked.add((name, one.question))
            answers[one.answer] += 1
            made.append(Task(company, rung, tier, one))
        database.close()
    random.Random(split).shuffle(made)
    return made


def worked(task: Task, box: Toolbox, mistaken: bool) -> list[Row]:
    """Return a whole conversation as it should go, with one mistake or none."""
    asked, look = task.asked, "list_tables" in RUNGS[task.rung]
    with box.session(task.row()) as session:
        messages: list[Row] = [{"role": "user", "content": asked.question + (session.observation or "")}]

        def turn(*calls: Row) -> str:
            made = [{"type": "function", "function": call} for call in calls]
            messages.append({"role": "assistant", "content": "", "tool_calls": made})
            for call in calls:
                messages.append({"role": "tool", "name": call["name"], "content": session.run(call).content})
            return str(messages[-1]["content"])

        if mistaken and look:
            turn(_query(_with_other_table(task)))
        if look:
            turn({"name": "list_tables", "arguments": {}})
        if task.rung != "schema":
            turn(*({"name": "describe", "arguments": {"table": table}} for table in asked.tables))
        if mistaken and not look:
            turn(_query(_mistaken(task)))
        result = turn(_query(asked.steps[0]))
        for step in asked.steps[1:]:
            result = turn(_query(step.format(result.splitlines()[1])))
    return [*messages, {"role": "assistant", "content": asked.said}]


def _query(sql: str) -> Row:
    return {"name": "query", "arguments": {"sql": sql}}


def _with_other_table(task: Task) -> str:
    """Return the first query with a guess at the name of its table."""
    (table,) = re.findall(r"FROM (\w+)", task.asked.steps[0])
    noun = next(one for one in task.company.kind if table in (one, plural(one), f"all_{plural(one)}"))
    return re.sub(rf"\b{table}\b", noun if table != noun else plural(noun), task.asked.steps[0])


def _mistaken(task: Task) -> str:
    """Return the first query as somebody asks who misses what is around a name, or takes columns for those of another company."""
    c, sql = task.company, task.asked.steps[0]
    if "LIKE '%" in sql:
        return task.asked.unseen
    columns = {"quantity": c.quantity, "total": c.total, "price": c.price, "status": c.status, "wage": c.wage}
    for what, column in {**columns, "name": c.label}.items():
        if re.search(rf"\b{column}\b", sql):
            return re.sub(rf"\b{column}\b", next(word for word in c.words[what] if word != column), sql)
    return _with_other_table(task)


def example(rung: str, box: Toolbox) -> list[Row]:
    """Return two worked questions about one database, as somebody would write them by hand: the same for every row."""
    company, rng = Company(_EXAMPLE), random.Random(_EXAMPLE)
    database = company.connect()
    messages: list[Row] = []
    for (tier, mistaken), question in _EXAMPLE_ASKED.items():
        drawn = (ask(company, database, tier, rng) for _ in range(_TRIES))
        asked = next(one for one in drawn if one and one.question == question)
        said = worked(Task(company, rung, tier, asked), box, mistaken)
        messages += said if not messages else [{**said[0], "content": question}, *said[1:]]
    return messages


def write(path: Path, rows: Iterable[Row]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{path}: {len(lines)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rung", nargs="+", choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--tier", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--example", action="store_true")
    parser.add_argument("--worked", nargs="?", const="mistakes", choices=("mistakes", "clean"))
    parser.add_argument("--half", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with load_tools(HERE / "sql_environment.py") as box:
        examples = {rung: example(rung, box) if given.example else [] for rung in given.rung}
        for split in ROWS:
            drawn = tasks(split, given.rung, given.tier)
            to_show, to_ask = _halves(drawn) if given.half and split == "train" else (drawn, drawn)
            write(given.folder / f"{split}.jsonl", (_after(examples[task.rung], task.row()) for task in to_ask))
            if given.worked and split == "train":
                schemas = {schema["function"]["name"]: schema for schema in box.schemas}
                mistaken = [number % 3 == 2 and given.worked == "mistakes" for number in range(len(to_show))]
                conversations = [worked(task, box, how) for task, how in zip(to_show, mistaken, strict=True)]
                shown = [{"tools": [schemas[name] for name in RUNGS[task.rung]]} for task in to_show]
                rows = [{"messages": said, **tools} for said, tools in zip(conversations, shown, strict=True)]
                write(given.folder / "worked.jsonl", rows)


def _halves(drawn: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Return the tasks of the first half of the kinds of company, and those of the others."""
    kinds = list(KINDS["train"])
    first = tuple(f"{kind}-" for kind in kinds[: len(kinds) // 2])
    halves = {half: [task for task in drawn if task.company.name.startswith(first) is half] for half in (True, False)}
    return halves[True], halves[False]


def _after(example: list[Row], row: Row) -> Row:
    return {**row, "prompt": [*example, {"role": "user", "content": row["prompt"]}]} if example else row


if __name__ == "__main__":
    main()
