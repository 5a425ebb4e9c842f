"""Rows of drawn calls, some to train on and some held out, and the folder that a training begins with."""

from __future__ import annotations

import json
import random
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolgrpo.draw.play import Played, Program, answered, explore, linked, replayed
from toolgrpo.draw.wording import alike_tools, question
from toolgrpo.errors import ConfigError, DataError
from toolgrpo.support.plain_text import counted
from toolgrpo.support.storage import write_whole
from toolgrpo.tools.toolbox import Toolbox

_HELD_OUT = 0.2  # of the rows, and of the compositions
_BUDGET_S = 25.0  # of drawing calls
Row = dict[str, Any]
Reword = Callable[[Sequence[tuple[Program, str]], random.Random], list[str]]
"""Puts the questions for these programs into other words."""


@dataclass(frozen=True, slots=True)
class ToolRows:
    """Rows for the files, and what became of each tool."""

    train: Sequence[Row]
    held_out: Sequence[Row]
    worked: Sequence[Row]  # conversations of the rows to train on
    played: Mapping[str, Played]

    def table(self) -> Iterator[str]:
        """Yield a line for each tool: what was drawn and answered, its rows, and why it has none."""
        counts = Counter(
            call["name"] for row in (*self.train, *self.held_out) for call in json.loads(row["gold_calls"])
        )
        width = max(map(len, self.played))
        yield f"{'tool':<{width}}  drawn  answered  rows"
        for name, one in self.played.items():
            numbers = f"{one.drawer.calls:>5}  {len(one.drawer.good):>8}  {counts[name]:>4}"
            yield f"{name:<{width}}  {numbers}{f'  left out: {one.out}' if one.out else ''}"


def draw_rows(
    open_toolbox: Callable[[], Toolbox],
    *,
    hold_out: Collection[str] = (),
    allow_writes: bool = False,
    n_rows: int,  # of both files together
    say: Callable[[str], None] = lambda text: None,
    reword: Reword | None = None,
) -> ToolRows:
    """Draw calls, chain some, run all of them again in workers of their own, and ask for them in plain words."""
    rng = random.Random(0)
    with open_toolbox() as toolbox:
        unknown = [name for name in hold_out if name not in toolbox.names]
        if unknown:
            raise ConfigError(f"--hold_out {unknown[0]}: there is no such tool; there is {', '.join(toolbox.names)}")
        wanted = min(n_rows, max(12, 3 * n_rows // max(1, len(toolbox.names))))
        played = explore(toolbox, rng, wanted=wanted, budget_s=_BUDGET_S, allow_writes=allow_writes, say=say)
        singles: list[Program] = [(call,) for one in played.values() if not one.out for call in one.good.values()]
        pairs = answered(toolbox, [*linked(singles, played, rng, n_rows), *_both(singles, rng, n_rows // 2)])
        threes = answered(toolbox, linked(pairs, played, rng, n_rows // 4))
        programs = list({_key(program): program for program in (*singles, *pairs, *threes)}.values())
    say("running them again")
    with open_toolbox() as toolbox:
        same, changing = replayed(toolbox, programs, rng, {})
    for name, why in changing.items():
        played[name].out = why
    train, held_out = _split(same, rng, n_rows, hold_out)
    asked = _worded(train, held_out, rng, reword)
    shown, away = [one for one in asked if not one.away], [one for one in asked if one.away]
    return ToolRows(list(map(_row, shown)), list(map(_row, away)), list(map(_conversation, shown)), played)


def _both(singles: Sequence[Program], rng: random.Random, n: int) -> list[Program]:
    """Return programs of two calls of different tools that need nothing of each other."""
    names = {program[0].name for program in singles}
    by_tool = {name: [program for program in singles if program[0].name == name] for name in names}
    if len(names) < 2:
        return []
    chosen = [rng.sample(sorted(names), 2) for _ in range(n)]
    return [(*rng.choice(by_tool[one]), *rng.choice(by_tool[other])) for one, other in chosen]


def _task(program: Program) -> str:
    """Return what a program is composed of: its tools, in their order, and whether one uses the result of another."""
    joints = [" then " if call.links else " and " for call in program[1:]]
    return "".join(f"{joint}{call.name}" for joint, call in zip(["", *joints], program, strict=True))


def _split(
    programs: Sequence[Program], rng: random.Random, n_rows: int, hold_out: Collection[str]
) -> tuple[list[Program], list[Program]]:
    """Share programs out: by tool, if some are to be held out; else by composition, and single calls by their values."""
    by_task: defaultdict[str, list[Program]] = defaultdict(list)
    for program in sorted(programs, key=_key):
        by_task[_task(program)].append(program)
    composed = sorted(task for task, some in by_task.items() if len(some[0]) > 1)
    made_of = {task: {task, *map(_task, _parts(by_task[task][0]))} for task in composed}

    def closed(tasks: Collection[str]) -> set[str]:
        """Return these, and the compositions that have one of them in them."""
        return {*tasks, *(task for task in composed if not made_of[task].isdisjoint(tasks))}

    picked: list[str] = []
    if hold_out:
        picked = [task for task, some in by_task.items() if any(call.name in hold_out for call in some[0])]
    else:
        chains = {task for task in composed if " then " in task}
        n_picked = max(len(composed) > 1, round(_HELD_OUT * len(composed)))
        for task in rng.sample(composed, len(composed)):
            if len(picked) < n_picked and (not chains or chains - closed([*picked, task])):  # one is left to learn from
                picked.append(task)
    away = closed(picked)
    trained_in = {_key((call,)) for task in composed if task not in away for one in by_task[task] for call in one}
    train: dict[str, list[Program]] = {}
    held_out: dict[str, list[Program]] = {}
    for task, some in by_task.items():
        mixed = sorted(rng.sample(some, len(some)), key=lambda one: _key(one) in trained_in)
        n = max(1, len(some) // 5)
        if task in away:
            n = len(some)
        elif len(some[0]) > 1 or hold_out or len(some) < 3:
            n = 0
        held_out[task], train[task] = mixed[:n], mixed[n:]
    alone = {_key(one) for some in held_out.values() for one in some if len(one) == 1}
    for task in composed:  # no call that is asked for alone is trained on in a composition
        train[task] = [one for one in train[task] if alone.isdisjoint(_key((call,)) for call in one)]
    n_held_out = round(_HELD_OUT * n_rows)
    return _taken(train, n_rows - n_held_out), _taken(held_out, n_held_out)


def _parts(program: Program) -> list[Program]:
    """Return the shorter compositions that stand in a program."""
    n = len(program)
    return [program[i:j] for i in range(n) for j in range(i + 2, n + 1) if j - i < n]


def _taken(by_task: Mapping[str, list[Program]], n: int) -> list[Program]:
    """Take programs of every composition in turn, more short ones than long ones, and whatever there is if that is few."""
    taken: list[Program] = []
    for size, most in ((3, 0.15 * n), (2, 0.5 * n), (1, n), (2, n), (3, n)):
        some = [one for one in by_task.values() if one and len(one[0]) == size]
        while len(taken) < round(most) and any(some):
            taken += [one.pop() for one in [one for one in some if one][: round(most) - len(taken)]]
    return taken


def _key(program: Program) -> str:
    return json.dumps([call.as_gold for call in program], sort_keys=True)


class _Asked(NamedTuple):
    text: str
    program: Program
    away: bool  # held out


def _worded(
    train: Sequence[Program], held_out: Sequence[Program], rng: random.Random, reword: Reword | None
) -> list[_Asked]:
    asked: dict[str, tuple[Program, bool]] = {}
    twice: set[str] = set()
    alike = alike_tools({call.name: call for program in (*train, *held_out) for call in program}.values())
    for programs, away in ((train, False), (held_out, True)):
        for program in rng.sample(programs, len(programs)):
            text = question(program, rng, held_out=away, alike=alike)
            if _key(asked.setdefault(text, (program, away))[0]) != _key(program):
                twice.add(text)  # a question has one answer
    asked = {text: one for text, one in asked.items() if text not in twice}
    said = reword([(program, text) for text, (program, _) in asked.items()], rng) if reword else list(asked)
    return [_Asked(text, *one) for text, one in zip(said, asked.values(), strict=True)]


def _row(asked: _Asked) -> Row:
    gold = json.dumps([call.as_gold for call in asked.program], ensure_ascii=False)
    answer, task = asked.program[-1].result, _task(asked.program)
    return {"prompt": asked.text, "answer": answer, "task": task, "gold_calls": gold}


def _conversation(asked: _Asked) -> Row:
    """Return the calls with their results, and a sentence with the results that no later call took."""
    messages: list[Row] = [{"role": "user", "content": asked.text}]
    for call in asked.program:
        called = {"type": "function", "function": call.as_gold}
        messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        messages.append({"role": "tool", "name": call.name, "content": call.result})
    behind = (*asked.program[1:], None)
    left = [call.result for call, later in zip(asked.program, behind, strict=True) if later is None or not later.links]
    said = f"The results are {', '.join(left[:-1])} and {left[-1]}." if len(left) > 1 else f"The result is {left[0]}."
    return {"messages": [*messages, {"role": "assistant", "content": said}]}


# What is written.

_CONFIG = """\
# Rows drawn from tools by `toolgrpo init`; run it from the folder where that was run. README.md has the commands.
model:
  model_name_or_path: Qwen/Qwen3-0.6B  # or yours; nano for a look without a download
data:
  dataset_id_or_path: {folder}
  eval_questions: {n_eval}
tools:
{tools}
  max_turns: {max_turns}
reward:
  reward: [tool_result, gold_calls]  # the last result is the answer; the calls are those of the row, with partial credit
  reward_weights: [0.5, 0.5]
generation:
  max_completion_length: 512
training:
  output_dir: {output}
  max_steps: 100
  per_device_train_batch_size: 32
  num_generations: 8
  learning_rate: 1.0e-6
  save_strategy: "no"
  seed: 42
"""

_README = """\
`toolgrpo init` drew {n_train} rows to train on and {n_held_out} held-out rows from {tools}. Every answer is a result that the
tools gave twice, in separate workers. `gold_calls` has the calls, `task` the tools in their order ("and": one after the
other; "then": on the result before). The held-out rows have other values, other wordings and {away}.
`worked.jsonl` has the rows to train on as conversations. If `check` advises to show worked calls, run `sft`, and add
`--model_name_or_path {shown}` to `train`.

    toolgrpo data {folder} --show 5
    toolgrpo check --config {config}
    toolgrpo sft --model_name_or_path MODEL --dataset_id_or_path {worked} {flags} --output_dir {shown}
    toolgrpo train --config {config}
    toolgrpo evaluate --config {config} --model_name_or_path {output} --output_dir {measured}

Read twenty rows first: the questions are only as clear as your docstrings. `EXAMPLES = {{"parameter": [...]}}` in the
tools file overrides guessed values, and `toolgrpo init` into another folder draws again.
"""


def write_folder(drawn: ToolRows, folder: Path, tools: Mapping[str, str], hold_out: Collection[str]) -> Path:
    """Write rows, config and README; return the config."""
    if not drawn.train or not drawn.held_out:
        none = "; ".join(f"{name}: {one.out}" for name, one in drawn.played.items() if one.out)
        raise DataError(
            f"no rows {'to train on ' if not drawn.train else 'to hold out '}could be drawn{f' ({none})' if none else ''}; describe "
            f"the accepted values in docstrings, or register values: EXAMPLES = {{'parameter': [...]}}"
        )
    for name, rows in (("train", drawn.train), ("heldout", drawn.held_out), ("worked", drawn.worked)):
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    config, output = folder / "config.yaml", folder / "output"
    longest = max(len(json.loads(row["gold_calls"])) for row in (*drawn.train, *drawn.held_out))
    told = [f"  {name}: {json.dumps(value)}" for name, value in tools.items()]
    said = {
        "folder": json.dumps(str(folder)),
        "n_eval": len(drawn.held_out),
        "tools": "\n".join(told),
        "max_turns": longest + 2,
        "output": json.dumps(str(output)),
    }
    write_whole(config, _CONFIG.format(**said))
    away = {row["task"] for row in drawn.held_out} - {row["task"] for row in drawn.train}
    page = {"n_train": len(drawn.train), "n_held_out": len(drawn.held_out), "tools": ", ".join(tools.values())}
    paths = {"folder": folder, "config": config, "output": output, "measured": output / "evaluation"}
    paths |= {"worked": folder / "worked.jsonl", "shown": folder / "shown"}
    page |= {name: shlex.quote(str(path)) for name, path in paths.items()}
    page["flags"] = shlex.join(word for name, value in tools.items() for word in (f"--{name}", value))
    page["away"] = f"the tools {', '.join(hold_out)}" if hold_out else f"{counted(len(away), 'composition')} of tools"
    write_whole(folder / "README.md", _README.format(**page))
    return config
