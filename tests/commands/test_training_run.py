"""What the command loads and says before the first step (every bad input: test_bad_input.py), and under its last table."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.check import CheckRun, check_arguments
from toolgrpo.commands.job import HELDOUT_ROWS, QUESTIONS, TRAINING_ROWS, Job
from toolgrpo.commands.main import read
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun, outcome_line, run_train
from toolgrpo.errors import ConfigError, DataError, ModelError, PluginError, RewardError
from toolgrpo.evaluation.measures import Share
from toolgrpo.observe.progress import training_line
from toolgrpo.tools import load_tools
from toolgrpo.trainer.config import ToolGRPOConfig

ROOT = Path(__file__).parents[2]
ROW = {"prompt": "1+1?", "answer": "2"}
GOOD_REWARD = "def reward_func(completions, answer, **kwargs):\n    return [0.0] * len(completions)\n"


def shown_by(folder: Path, *flags: str) -> tuple[TrainingRun, io.StringIO]:
    """A run, and what will stand on the terminal."""
    defaults = {"--model_name_or_path": "nano", "--dataset_id_or_path": "arithmetic", "--reward": "accuracy"}
    base = [part for flag, value in defaults.items() if flag not in flags for part in (flag, value)]
    parsed = parse_arguments([*base, "--output_dir", str(folder / "out"), "--use_cpu", *flags])
    return TrainingRun(*parsed, Terminal(None, shown := io.StringIO(), quiet=False)), shown


def load(folder: Path, *flags: str) -> str:
    """Everything up to the trainer; what was said on the terminal."""
    run, shown = shown_by(folder, *flags)
    rows = run.job.training_rows()
    with ExitStack() as opened:
        tools, _ = run.job.open(opened)
        rewards = run.job.rewards()
        run.job.rows_to_score(rows, tools, rewards, TRAINING_ROWS)
        run.job.say_rewards(tools, rewards)
        if run.preflight is not None:
            run.preflight.before_model(rows, tools, rewards)
    return shown.getvalue()


def jsonl(folder: Path, *rows: Mapping[str, Any]) -> str:
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "data.jsonl")


def test_a_bad_row_stops_the_run_or_is_counted(tmp_path: Path) -> None:
    rows = ("--dataset_id_or_path", jsonl(tmp_path, ROW, {"no": "prompt"}, *[ROW] * 8))
    with pytest.raises(DataError, match=r"data\.jsonl"):
        load(tmp_path, *rows)
    assert "1 bad row was skipped" in load(tmp_path, *rows, "--skip_bad_rows")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


GOOD_ROW = {"prompt": "Write f.", "answer": "def f(x): return 2 * x", "tests": ["assert f(2) == 4"]}


def over_refused_rows(folder: Path, *flags: str) -> tuple[Job, io.StringIO]:
    """A run whose second and fourth row answer themselves wrong."""
    bad = {**GOOD_ROW, "answer": "def f(x): return x"}
    rows = jsonl(folder, GOOD_ROW, bad, GOOD_ROW, bad)
    run, shown = shown_by(folder, "--dataset_id_or_path", rows, "--reward", "code_exec", *flags)
    return run.job, shown


def test_rows_that_a_reward_refuses_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    job, _ = over_refused_rows(tmp_path)
    rows, rewards = job.training_rows(), job.rewards()
    said = "2 of 4 rows do not fit code_exec: .*data.jsonl, line 2, 4: its own answer"
    with pytest.raises(DataError, match=f"{said}.*--skip_bad_rows"):
        job.rows_to_score(rows, None, rewards, TRAINING_ROWS)
    job, shown = over_refused_rows(tmp_path, "--skip_bad_rows")
    left = job.rows_to_score(rows, None, rewards, TRAINING_ROWS)
    assert list(left["answer"]) == [GOOD_ROW["answer"]] * 2 and re.search(f"{said}.*; left out", shown.getvalue())
    with pytest.raises(DataError, match="2 of 2 rows do not fit"):
        job.rows_to_score(rows.select([1, 3]), None, rewards, TRAINING_ROWS)


def test_rows_for_other_tools_are_one_error_with_file_and_line(tmp_path: Path) -> None:
    """Tools of one's own with somebody else's rows: on all rows, before anything is drawn, held out or not."""
    names = ("ad", "add", "sub") * 4
    rows = (
        {**GOOD_ROW, "prompt": str(n), "gold_calls": json.dumps([{"name": name, "arguments": {}}])}
        for n, name in enumerate(names)
    )
    given = ["--dataset_id_or_path", jsonl(tmp_path, *rows), "--reward", "gold_calls"]

    def look(name: str, *flags: str, tools: bool = True) -> int:
        job = shown_by(tmp_path, *given, *flags)[0].job
        rows = job.heldout_rows() if name == HELDOUT_ROWS else job.training_rows()
        assert rows is not None
        toolbox = load_tools([add]) if tools else None
        return len(job.rows_to_score(rows, toolbox, job.rewards(), name, trains=name == TRAINING_ROWS))

    said = r"8 of 12 rows do not fit the tools: .*data\.jsonl, line 1, 4, 7, 10: names the tool 'ad' in its column `gold_calls`"
    with pytest.raises(DataError, match=said + ".*nearest is 'add'; .*line 3, 6, 9, 12: names the tool 'sub'"):
        look(TRAINING_ROWS)
    with pytest.raises(DataError, match=r"held-out .*data\.jsonl, line \d"):
        look(HELDOUT_ROWS, "--eval_share", "0.9")
    assert look(TRAINING_ROWS, "--skip_bad_rows") == 4
    with pytest.raises(DataError, match=r"12 of 12 rows .*no tools were loaded"):
        look(TRAINING_ROWS, tools=False)
    assert look(QUESTIONS, tools=False) == 12, "a measurement without tools is a baseline"
    assert look(TRAINING_ROWS, "--agent", "an agent", tools=False) == 12, "an agent brings its own tools"


def test_held_out_rows_that_are_trained_on_are_told(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *({"prompt": f"What is {n}?", "answer": n} for n in range(8)))
    flags = ["--dataset_id_or_path", path, "--eval_dataset_id_or_path", path, "--eval_questions", "4"]
    run, shown = shown_by(tmp_path, *flags)
    with ExitStack() as opened, pytest.raises(ModelError):
        run.job = replace(run.job, model=replace(run.job.model, model_name_or_path=str(tmp_path)))  # type: ignore[call-arg]  # TRL ships no types
        run._load(opened)
    assert "4 of 4 held-out rows have a prompt that is trained on" in shown.getvalue() and run.n_trained_on == 4
    given = read("check", ["--model=nano", "--reward=exact_match", f"--output_dir={tmp_path / 'out'}", *flags])
    check = CheckRun(*check_arguments(given), Terminal(None, io.StringIO(), quiet=False))
    check._data()
    assert check.report.lines[0].verdict == "warning" and "4 of 4 held-out rows" in check.report.lines[0].do


IN_TWO_PROCESSES = """
import sys
from pathlib import Path
from tests.commands.test_training_run import over_refused_rows
folder = Path(sys.argv[1], sys.argv[2])
folder.mkdir()
job, _ = over_refused_rows(folder)
try:
    job.rows_to_score(job.training_rows(), None, job.rewards(), "the training rows")
except Exception as error:
    print(job.terminal.is_main_process(), type(error).__name__, error)
"""


def test_a_refused_row_stops_every_process_with_the_same_sentence(tmp_path: Path) -> None:
    """The main process alone asks the reward; the others are told what it found."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IN_TWO_PROCESSES, str(tmp_path), rank],
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    first, second = (process.communicate(timeout=300)[0].strip() for process in processes)
    assert first.startswith("True DataError the training rows: 2 of 4 rows do not fit code_exec: ")
    assert "line 2, 4: its own answer" in first
    assert second == first.replace("True", "False", 1).replace(f"{tmp_path / '0'}/", f"{tmp_path / '1'}/")


def test_a_users_own_files_are_loaded(tmp_path: Path) -> None:
    reward, tools = tmp_path / "my_reward.py", tmp_path / "my_tools.py"
    reward.write_text(GOOD_REWARD)
    tools.write_text("def twice(x: int) -> int:\n    'Double.'\n    return 2 * x\n\nTOOL_FUNCTIONS = [twice]\n")
    shown = load(tmp_path, "--tools_script", str(tools), "--reward_fn", str(reward))
    assert "twice(x: integer)" in shown and f"reward    reward_func: {reward}:1\n" in shown
    assert re.search(r"^reward    accuracy: built in, .*/toolgrpo/rewards/accuracy\.py:\d+$", shown, re.MULTILINE)


def test_several_reward_files_have_names_of_their_own(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("style.py", "length.py")]
    for path in paths:
        Path(path).write_text(GOOD_REWARD)
    shown = load(tmp_path, "--reward_fn", *paths, "--reward_weights", "1", "0.5", "0.25")
    assert "reward    style.reward_func: " in shown and "reward    length.reward_func: " in shown
    assert "no episode succeeds" not in shown
    shown = load(tmp_path, "--reward_fn", *paths, "--reward_weights", "0.5", "0.25", "0.125")
    assert "add up to 0.875: no episode succeeds" in shown
    config = tmp_path / "one.yaml"
    config.write_text(f"reward:\n  reward_fn: {paths[0]}\n")
    assert "reward    reward_func: " in load(tmp_path, "--config", str(config))


def test_the_rewards_that_tasks_name_are_checked_before_the_first_step(tmp_path: Path) -> None:
    rows, needs, mixture = jsonl(tmp_path, *[ROW] * 8), tmp_path / "needs.py", tmp_path / "mixture.yaml"
    needs.write_text("def reward_func(completions, gold): return [0.0] * len(completions)\n")

    def by_task(*tasks: str) -> str:
        mixture.write_text("tasks:\n" + "".join(f"- {{data: {rows}, {task}}}\n" for task in tasks))
        return load(tmp_path, "--dry_run", "--reward", "by_task", "--dataset_id_or_path", str(mixture))

    with pytest.raises(ConfigError, match="'gsm9k'"):
        by_task("reward: gsm9k")
    for tasks, said in ((("reward: gsm8k", "name: other"), "no reward"), ((f"reward: {needs}",), "asks for 'gold'")):
        with pytest.raises(RewardError, match=said):
            by_task(*tasks)
    assert "by_task: the gold answers of 8 rows get full marks" in by_task("reward: gsm8k", "reward: tool_use")


def test_one_file_of_rows_is_enough(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *({"prompt": f"{n}+1?", "answer": n + 1} for n in range(40)))

    def rows_of(data: str, *flags: str) -> Job:
        return shown_by(tmp_path, "--dataset_id_or_path", data, *flags)[0].job

    job = rows_of(file, "--eval_share", "0.1")
    rows, heldout = job.training_rows(), job.heldout_rows()
    assert heldout is not None and (len(rows), len(heldout)) == (36, 4)
    assert not {str(p) for p in rows["prompt"]} & {str(p) for p in heldout["prompt"]}
    other = rows_of("arithmetic", "--eval_dataset_id_or_path", file)
    assert other.heldout_rows(default=7) is not None, "without a split a file is taken whole"
    with pytest.raises(DataError, match=r"--eval_share 0\.1"):
        rows_of(file, "--eval_questions", "4").heldout_rows()


DIVIDES = "return [len(c[-1]['content']) / len(c[0]['content']) for c in completions]"
ENVIRONMENT = """
class Env:
    def reset(self, goal): pass

    def look(self) -> int:
        'Look.'
        return 1

    def reward(self): return 0.5
"""


@pytest.mark.parametrize(
    ("flags", "text", "error", "said"),
    [
        ("--reward_fn FILE", "def reward_func(completions, **_): return [0.0]", RewardError, "1 rewards for 3 comp"),
        ("--reward_fn FILE", f"def reward_func(completions, **_): {DIVIDES}", RewardError, "ZeroDivisionError"),
        ("--reward environment --environment FILE:Env", ENVIRONMENT, PluginError, "Env: reset raised for a row"),
    ],
)
def test_a_dry_run_asks_as_the_evaluation_will(
    tmp_path: Path, flags: str, text: str, error: type[Exception], said: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(error, match=said):
        load(tmp_path, "--dry_run", *flags.replace("FILE", str(tmp_path / "mine.py")).split())


def test_a_dry_run_checks_everything_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and proven like a run, model and engine too; the command itself is tried in `test_train_command.py`."""
    monkeypatch.chdir(ROOT)
    flags = ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--eval_questions", "16", "--dry_run"]
    given = ["--config", "recipes/configs/nano.yaml", "--engine", "transformers", "--use_cpu", "true", *flags]
    shown = io.StringIO()
    assert run_train(read("train", given), Terminal(None, shown, quiet=False)) == 0
    for text in ("dry run: everything", "engine    transformers (asked for)", "training  2 steps (of "):
        assert text in shown.getvalue()
    assert " 1/2 " not in shown.getvalue() and not (tmp_path / "out").exists()


def rates(**successes: float) -> dict[str, Any]:
    shares = {name: Share(value, 100) for name, value in successes.items()}
    return {name: {"rate": one.value, "interval": list(one.interval), "n": one.n} for name, one in shares.items()}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (rates(greedy=0.4, sampled=0.4), rates(greedy=0.36, sampled=0.7), None),
        (rates(greedy=0.4, sampled=0.3), rates(greedy=0.45, sampled=0.3), "change (the intervals overlap): see"),
        (rates(greedy=0.4, sampled=0.3), rates(greedy=0.38, sampled=0.3), "overlap; greedy went down): see"),
        (rates(greedy=0.7, sampled=0.6), rates(greedy=0.3, sampled=0.55), "fell (greedy): see"),
        (rates(greedy=0.7), {}, None),
    ],
)
def test_what_did_not_rise_is_said(before: dict[str, Any], after: dict[str, Any], said: str | None) -> None:
    line = outcome_line(before, after)
    assert (line is None) if said is None else (line is not None and said in line)


def test_it_stands_under_the_table_and_its_page_has_the_section(tmp_path: Path) -> None:
    run, shown = shown_by(tmp_path)
    summary = {"before": rates(greedy=0.4), "after": rates(greedy=0.4, sampled=0.35), "steps": 3, "seconds_in_all": 9.0}
    summary |= {"seconds_per_step": {"all": 1.0, "rollout": 0.5, "training": 0.5}, "best_step": 4, "steps_in_all": 9}
    run._show({**summary, "model": "m", "episodes": None, "log": "l"}, [])
    lines = shown.getvalue().splitlines()
    (number,) = (number for number, line in enumerate(lines) if "did not clearly change" in line)
    assert "┘" in lines[number - 1] and "3 steps" in lines[number + 1]
    assert "model     m (of step 4, the best of 9 by held-out success)" in lines
    assert lines[-1] == "objective eval_success 0.35"
    ((page, section),) = re.findall(r"see (\S+)#(\S+)", lines[number])
    headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert section in [heading.lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "6 steps (3 epochs of 2 rows), learning rate 1e-06 (TRL's default; LoRA recipes use 1e-5 to 1e-4)"),
        ({"num_train_epochs": 1, "learning_rate": 4e-4}, "6 steps (1 epoch of 2 rows), learning rate 0.0004"),
        ({"max_steps": 6, "learning_rate": 1e-5}, "6 steps (of 2 rows), learning rate 1e-05"),
    ],
)
def test_the_start_says_what_is_about_to_happen(tmp_path: Path, given: dict[str, float], said: str) -> None:
    assert training_line(ToolGRPOConfig(str(tmp_path), use_cpu=True, **given), 6, range(2)) == f"training  {said}"
