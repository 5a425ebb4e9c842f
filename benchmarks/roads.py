"""Which road to a trained model is best, and which one does `toolgrpo check` name: small settings, each road run to its end.

    python benchmarks/roads.py                        # every setting: about four hours of one core
    python benchmarks/roads.py --settings shop_60     # one of them, beside those that were kept
    python benchmarks/roads.py --quick                # one setting, a few steps

A setting is a task, a start that was made from nano, and perhaps a flag that is wrong for it. `check` is asked with its
defaults, and these roads are run as it would name them:

* leave it: the start itself;
* show: `sft` on worked conversations of the task;
* own: 16 episodes of each of 120 training questions, then `sft` on those that succeeded;
* reinforce: 60 steps of 64 episodes, in the shop the 100 of its recipe;
* fix: the start with the right flag.

What is compared is success on held-out questions, greedy. A folder of --work keeps what was made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from _machine import ROOT
from _reporting import benchmark, kept, parser_of, progress, save
from _rows import Figure, Row

from toolgrpo.data import load_tasks
from toolgrpo.evaluation.before_training import Road

NAME = "roads"
NEAR = 0.05  # a road within this of the best one is as good
TIME_LIMIT_S = 3600
OWN = "own successes"  # what `check` advises beside worked calls
LARGER = """
def larger(a: int, b: int) -> int:
    '''The larger of two numbers.

    Args:
        a: A number.
        b: Another number.
    '''
    return max(a, b)


def remainder(a: int, b: int) -> int:
    '''What a division leaves.

    Args:
        a: A number.
        b: The divisor.
    '''
    return a % b


TOOL_FUNCTIONS = [larger, remainder]
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A task, the steps that its start was trained, and flags: those of the setting, and what would mend them."""

    task: str
    trained: int = 0  # of GRPO on arithmetic
    guesses: int = 0  # on answers without a call
    shown: int = 0  # on worked conversations
    flag: tuple[str, ...] = ()
    mended: tuple[str, ...] = ()
    reinforced: int = 60  # steps of that road, as the recipe has them


SETTINGS = {
    **{f"shop_{n}": Setting("shop", shown=n, reinforced=100) for n in (0, 20, 40, 50, 60, 70, 80, 90, 120)},
    **{f"arithmetic_{n}": Setting("arithmetic", trained=n) for n in (0, 10, 25, 60)},
    "arithmetic_strict": Setting("arithmetic", flag=("--reward", "exact_match", "--reward_weights", "1.0")),
    **{f"guesses_{n}": Setting("arithmetic", guesses=n) for n in (4, 8, 16)},
    **{f"chains_{n}": Setting("chains", trained=60, shown=n) for n in (0, 10, 30, 60)},
    **{f"drawn_{n}": Setting("drawn", shown=n) for n in (0, 40, 120)},
    **{
        name: Setting("arithmetic", flag=(flag, wrong), mended=(flag, right))
        for name, flag, wrong, right in (
            ("short_turns", "--max_turn_tokens", "32", "64"),
            ("short_episodes", "--max_completion_length", "40", "224"),
            ("one_turn", "--max_turns", "1", "5"),
            ("other_tools", "--tools_script", "other.py", "right.py"),
        )
    },
}


@dataclass(frozen=True)
class Roads:
    """The roads from one setting. Each model and measurement is made once, in a folder of its own."""

    work: Path
    setting: Setting
    quick: bool

    def run(self, *arguments: object) -> str:
        """Run a command of the package in the task's folder; return what it printed."""
        command = [sys.executable, "-m", "toolgrpo", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.task, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
        if done.returncode > (arguments[0] == "check"):  # a check that fails ends with 1, and says so in its lines
            raise SystemExit(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
            )
        return done.stdout

    @cached_property
    def task(self) -> Path:
        """A folder with the rows, tools, worked conversations and config.yaml of the task."""
        folder = self.work.parent / "tasks" / self.setting.task
        if not (folder / "config.yaml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            {"shop": _shop, "drawn": _drawn}.get(self.setting.task, _arithmetic)(folder)
        return folder

    @cached_property
    def start(self) -> str:
        """The model that the setting begins with."""
        made, of = "nano", self.setting
        for way, steps in (("trained", of.trained), ("guesses", of.guesses), ("worked", of.shown)):
            folder = self.work.parent / f"start_{of.task}_{Path(made).name}_{way}_{steps}"
            if steps and way == "trained":
                Roads(folder, Setting("arithmetic"), self.quick).train(made, folder, steps)
            elif steps:
                Roads(folder, Setting(of.task), self.quick).teach(
                    made, folder, steps, "--dataset_id_or_path", f"{way}.jsonl"
                )
            made = str(folder) if steps else made
        return made

    def train(self, model: str, folder: Path, steps: int) -> Path:
        if not (folder / "model.safetensors").exists():
            of = ("--model_name_or_path", model, "--output_dir", folder, "--max_steps", 2 if self.quick else steps)
            self.run("train", "--config", "config.yaml", *self.setting.flag, *of, "--eval_questions", 0)
        return folder

    def teach(self, model: str, folder: Path, steps: int, *rows: object) -> Path:
        if not (folder / "model.safetensors").exists():
            flag = self.setting.flag if "--tools_script" in self.setting.flag else ("--tools_script", "right.py")
            of = ("--model_name_or_path", model, *flag, "--batch_size", 8, "--max_steps", 2 if self.quick else steps)
            self.run("sft", *rows, *of, "--bf16", "false", "--output_dir", folder)
        return folder

    def measured(self, model: str | Path, where: str, *more: object) -> float:
        """Return the share of right answers: of held-out questions, greedy, unless `more` says otherwise."""
        folder = self.work / where
        if not (folder / "evaluation.json").exists():
            greedy = ("--samples", 1, "--temperature", 0, "--eval_questions", 16 if self.quick else 240)
            of = ("--model_name_or_path", model, "--output_dir", folder, "--engine", "transformers")
            self.run("evaluate", "--config", "config.yaml", *self.setting.flag, *of, *greedy, *more)
        return float(json.loads((folder / "evaluation.json").read_text())["model"]["pass@1"]["value"])

    def named(self) -> dict[str, Any]:
        """Return what `check` says of the start; where it fails, something is to be mended."""
        file = self.work / "check.json"
        if not file.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            of = ("--json", "--config", "config.yaml", *self.setting.flag, "--model_name_or_path", self.start)
            file.write_text(self.run("check", *of))
        checks = json.loads(file.read_text())["checks"]
        failed = [f"{one['what']}: {one['said']}" for one in checks if one["verdict"] == "failure"]
        numbers = [one["numbers"] for one in checks if one["what"] in ("success", "road")]
        return {"road": Road.MEND, "failed": failed} | {name: one for of in numbers for name, one in of.items()}

    def success(self) -> dict[str, float]:
        """Return what came of each road that can be taken."""
        folder, found = self.work, {str(Road.LEAVE): self.measured(self.start, "before")}
        if self.setting.mended:
            found[Road.MEND] = self.measured(self.start, "mended", *self.setting.mended)
        shown = self.teach(self.start, folder / "shown", 90, "--dataset_id_or_path", "worked.jsonl")
        found[Road.SHOW] = self.measured(shown, "shown_after")
        size = ("--samples", 2 if self.quick else 16, "--eval_questions", 16 if self.quick else 120)
        drawn = ("--temperature", 1, *size, "--eval_dataset_id_or_path", "train.jsonl")
        if self.measured(self.start, "asked", "--engine", "auto", *drawn):  # else there is no success to learn from
            found[OWN] = self.measured(
                self.teach(self.start, folder / "own", 90, "--from_run", folder / "asked"), "own_after"
            )
        found[Road.REINFORCE] = self.measured(
            self.train(self.start, folder / "trained", self.setting.reinforced), "trained_after"
        )
        return found


# --- tasks -----------------------------------------------------------------------------------------------------------


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _shop(folder: Path) -> None:
    recipe = ROOT / "recipes/shop"
    for name, to in (
        ("shop_reward.py", "shop_reward.py"),
        ("make_shop.py", "make_shop.py"),
        ("shop_tools.py", "right.py"),
    ):
        shutil.copy(recipe / name, folder / to)
    subprocess.run([sys.executable, "make_shop.py"], cwd=folder, check=True, timeout=TIME_LIMIT_S)
    (folder / "examples.jsonl").rename(folder / "worked.jsonl")
    (folder / "config.yaml").write_text((recipe / "shop.yaml").read_text().replace("shop_tools.py", "right.py"))


def _config(folder: Path, *more: tuple[str, str]) -> None:
    """Write nano's recipe for the rows and tools of a folder; last of all, for a folder with it is whole."""
    text = (ROOT / "recipes/configs/nano.yaml").read_text()
    rows = "dataset_id_or_path: train.jsonl\n  eval_dataset_id_or_path: heldout.jsonl"
    for old, new in (("dataset_id_or_path: arithmetic", rows), ("tools_funcs/arithmetic_tools.py", "right.py"), *more):
        assert old in text, old
        text = text.replace(old, new)
    (folder / "config.yaml").write_text(text)


def _arithmetic(folder: Path) -> None:
    task, chains = folder.name, folder.name == "chains"
    for name, n in (("train", 2000), ("heldout", 240)):
        _write(folder / f"{name}.jsonl", load_tasks(task, split=name, limit=n))
    shutil.copy(ROOT / "tools_funcs/math_tools.py", folder / "math_tools.py")
    names = ("add", "subtract", "multiply", "divide")
    head = f"from math_tools import {', '.join(names)}\n\n"
    (folder / "right.py").write_text(f"{head}TOOL_FUNCTIONS = [{', '.join(names)}]\n")
    others = "".join(
        f"def {name}_of(first: int, second: int) -> int:\n    '''{name}.\n\n    Args:\n        first: A number.\n"
        f"        second: Another.\n    '''\n    return {name}(first, second)\n\n"
        for name in names
    )
    (folder / "other.py").write_text(f"{head}{others}TOOL_FUNCTIONS = [{', '.join(f'{name}_of' for name in names)}]\n")
    if chains:
        _write(folder / "worked.jsonl", map(_worked_chain, load_tasks("chains", limit=250)))
    else:
        shutil.copy(ROOT / "recipes/data/arithmetic_examples.jsonl", folder / "worked.jsonl")
    _write(folder / "guesses.jsonl", map(_guess, load_tasks(task, limit=200)))
    _config(folder, *((("max_turns: 5", "max_turns: 8"), ("length: 224", "length: 320")) if chains else ()))


def _worked_chain(row: Mapping[str, Any]) -> dict[str, Any]:
    messages, calls = list(row["prompt"]), json.loads(row["gold_calls"])
    results = [call["arguments"]["a"] for call in calls[1:]] + [row["answer"]]  # a call goes on from the one before
    for call, result in zip(calls, results, strict=True):
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": call["name"], "content": str(result)})
    return {"messages": [*messages, {"role": "assistant", "content": f"The answer is {row['answer']}."}]}


def _guess(row: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation that answers the first number of the question, without a call."""
    words = row["prompt"][0]["content"].replace("?", "").replace(",", "").split()
    guess = f"The answer is {next(filter(str.isdigit, words))}."
    return {"messages": [*row["prompt"], {"role": "assistant", "content": guess}]}


def _drawn(folder: Path) -> None:
    (folder / "right.py").write_text(LARGER)
    init = [sys.executable, "-m", "toolgrpo", "init", "--tools_script", "right.py", "rows"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True, timeout=TIME_LIMIT_S)
    for name in ("train", "heldout", "worked"):
        shutil.copy(folder / "rows" / f"{name}.jsonl", folder)
    _config(folder, ("[tool_result, exact_match]", "[tool_result, gold_calls]"))


# --- what came of it -------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    work = options.work / ("quick" if options.quick else "whole")
    for name in options.settings or (["short_turns"] if options.quick else SETTINGS):
        progress(name)
        roads = Roads(work / name, SETTINGS[name], options.quick)
        check, success = roads.named(), roads.success()
        found: dict[str, Any] = kept(NAME, options.quick)  # another process may have added some
        found.setdefault("settings", {})[name] = {"check": check, "success": success}
        save(NAME, found, quick=options.quick, number_type="float32")
        print(json.dumps({"named": check["road"], **success}), flush=True)
    return kept(NAME, options.quick)


def short_of_best(setting: Mapping[str, Any]) -> float:
    """Return how far the road that check names ends below the best; one that cannot be taken ends where it begins."""
    success = setting["success"]
    return float(max(success.values()) - success.get(setting["check"]["road"], success[Road.LEAVE]))


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    short = [short_of_best(one) for one in results["settings"].values()]
    what = f"settings in which the road that check names ends within {NEAR} of the best, of {len(short)}"
    return [Row(what, Figure(sum(value <= NEAR for value in short) / len(short)), "")]


def main() -> None:
    parser = parser_of(__doc__, "one setting, a few steps")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), metavar="NAME", help=", ".join(SETTINGS))
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / NAME, help="where models are kept")
    benchmark(NAME, parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
