"""What the command loads and says before the first step (every bad input is in test_bad_input.py)."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.ports import free_port
from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.check import CheckRun, check_arguments
from toolgrpo.commands.job import HELDOUT_ROWS, QUESTIONS, TRAINING_ROWS, Job
from toolgrpo.commands.main import read
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun, run_train
from toolgrpo.errors import ConfigError, DataError, ModelError, PluginError, RewardError
from toolgrpo.tools import load_tools

ROOT = Path(__file__).parents[2]
GOOD_REWARD = "def reward_func(completions, answer, **kwargs):\n    return [0.0] * len(completions)\n"


def load(folder: Path, *flags: str) -> str:
    """Everything up to the trainer; what was said on the terminal."""
    defaults = {"--model_name_or_path": "nano", "--dataset_id_or_path": "arithmetic", "--reward": "accuracy"}
    given = set(flags)
    base = [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
    script, config, model = parse_arguments([*base, "--output_dir", str(folder / "out"), *flags])
    shown = io.StringIO()
    run = TrainingRun(script, config, model, Terminal(None, shown, quiet=False))
    rows = run.job.training_rows()
    tools = run.job.toolbox()
    try:
        rewards = run.job.rewards()
        run.job.rows_to_score(rows, tools, rewards, TRAINING_ROWS)
        run.job.say_rewards(tools, rewards)
        if run.preflight is not None:
            run.preflight.before_model(rows, tools, rewards)
    finally:
        if tools is not None:
            tools.close()
    return shown.getvalue()


def test_a_bad_row_stops_the_run_or_is_counted(tmp_path: Path) -> None:
    rows = tmp_path / "data.jsonl"
    rows.write_text('{"prompt": "1+1?", "answer": "2"}\nnot json\n' + '{"prompt": "2+2?", "answer": "4"}\n' * 8)
    with pytest.raises(DataError, match=r"data\.jsonl"):
        load(tmp_path, "--dataset_id_or_path", str(rows))
    assert "1 bad row was skipped" in load(tmp_path, "--dataset_id_or_path", str(rows), "--skip_bad_rows")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


GOOD_ROW = {"prompt": "Write f.", "answer": "def f(x): return 2 * x", "tests": ["assert f(2) == 4"]}


def parts_over_refused_rows(folder: Path, shown: io.StringIO, *flags: str) -> Job:
    """A run whose second and fourth row answer themselves wrong."""
    path, bad = folder / "data.jsonl", {**GOOD_ROW, "answer": "def f(x): return x"}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (GOOD_ROW, bad, GOOD_ROW, bad)))
    given = ["--model_name_or_path", "nano", "--dataset_id_or_path", str(path), "--reward", "code_exec"]
    script, config, model = parse_arguments([*given, "--output_dir", str(folder / "out"), "--use_cpu", *flags])
    return Job(script, config, model, Terminal(None, shown, quiet=False))


def test_rows_that_a_reward_refuses_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    shown = io.StringIO()
    parts = partial(parts_over_refused_rows, tmp_path, shown)
    rows = parts()._all_rows
    said = "the training rows: 2 of 4 rows do not suit code_exec: .*data.jsonl, line 2, 4: its own answer"
    with pytest.raises(DataError, match=f"{said}.*--skip_bad_rows"):
        parts().rows_to_score(rows, None, parts().rewards(), TRAINING_ROWS)
    left = parts("--skip_bad_rows").rows_to_score(rows, None, parts().rewards(), TRAINING_ROWS)
    assert list(left["answer"]) == [GOOD_ROW["answer"]] * 2 and re.search(f"{said}.*; left out", shown.getvalue())
    with pytest.raises(DataError, match="2 of 2 rows do not suit"):
        parts("--skip_bad_rows").rows_to_score(rows.select([1, 3]), None, parts().rewards(), TRAINING_ROWS)


def test_rows_for_other_tools_are_one_error_with_file_and_line(tmp_path: Path) -> None:
    """Tools of one's own with somebody else's rows: on all rows, before anything is drawn, held out or not."""
    calls = [{**GOOD_ROW, "gold_calls": json.dumps([{"name": name, "arguments": {}}])} for name in ("ad", "add", "sub")]
    (tmp_path / "data.jsonl").write_text(
        "".join(f"{json.dumps({**row, 'prompt': str(n)})}\n" for n, row in enumerate(calls * 4))
    )
    given = [
        "--model_name_or_path",
        "nano",
        "--dataset_id_or_path",
        str(tmp_path / "data.jsonl"),
        "--reward=gold_calls",
    ]

    def look(name: str, *flags: str, tools: bool = True) -> int:
        script, config, model = parse_arguments([*given, "--output_dir", str(tmp_path / "out"), "--use_cpu", *flags])
        parts = Job(script, config, model, Terminal(None, io.StringIO(), quiet=False))
        rows = parts.heldout_rows() if name == HELDOUT_ROWS else parts._all_rows
        toolbox = load_tools([add]) if tools else None
        assert rows is not None
        return len(parts.rows_to_score(rows, toolbox, parts.rewards(), name, trains=name == TRAINING_ROWS))

    said = r"8 of 12 rows do not suit the tools: .*data\.jsonl, line 1, 4, 7, 10: names the tool 'ad' in its column `gold_calls`"
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
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"prompt": "What is {n}?", "answer": {n}}}\n' for n in range(8)))
    given = ["--model_name_or_path=nano", "--reward=exact_match", "--use_cpu", f"--output_dir={tmp_path / 'out'}"]
    rows = ["--dataset_id_or_path", str(path), "--eval_dataset_id_or_path", str(path), "--eval_questions", "4"]
    shown = io.StringIO()
    run = TrainingRun(*parse_arguments([*given, *rows]), Terminal(None, shown, quiet=False))
    with ExitStack() as opened, pytest.raises(ModelError):
        run.job = replace(run.job, model=replace(run.job.model, model_name_or_path=str(tmp_path)))  # type: ignore[call-arg]  # TRL ships no types
        run._load(opened)
    assert "4 of 4 held-out rows have a prompt that is trained on" in shown.getvalue() and run.n_trained_on == 4
    check = CheckRun(*check_arguments(read("check", [*given, *rows])), Terminal(None, io.StringIO(), quiet=False))
    check._data()
    assert check.report.lines[0].verdict == "warning" and "4 of 4 held-out rows" in check.report.lines[0].do


IN_TWO_PROCESSES = """
import io, sys
from pathlib import Path
from tests.commands.test_training_run import parts_over_refused_rows
folder = Path(sys.argv[1], sys.argv[2])
folder.mkdir()
parts = parts_over_refused_rows(folder, io.StringIO())
try:
    parts.rows_to_score(parts._all_rows, None, parts.rewards(), "the training rows")
except Exception as error:
    print(parts.terminal.is_main_process(), type(error).__name__, error)
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
    assert first.startswith("True DataError the training rows: 2 of 4 rows do not suit code_exec: ")
    assert "line 2, 4: its own answer" in first
    assert second == first.replace("True", "False", 1).replace(f"{tmp_path / '0'}/", f"{tmp_path / '1'}/")


def test_a_users_own_files_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(GOOD_REWARD)
    (tmp_path / "my_tools.py").write_text(
        'def twice(x: int) -> int:\n    """Double.\n\n    Args:\n        x: A number.\n    """\n    return 2 * x\n\n'
        "TOOL_FUNCTIONS = [twice]\n"
    )
    shown = load(
        tmp_path, "--tools_script", str(tmp_path / "my_tools.py"), "--reward_fn", str(tmp_path / "my_reward.py")
    )
    assert "twice(x: integer)" in shown
    assert f"reward    reward_func: {tmp_path / 'my_reward.py'}:1\n" in shown
    assert re.search(r"^reward    accuracy: built in, .*/toolgrpo/rewards/accuracy\.py:\d+$", shown, re.MULTILINE)


def test_several_reward_files_have_names_of_their_own(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("style.py", "length.py")]
    for path in paths:
        Path(path).write_text(GOOD_REWARD)
    shown = load(tmp_path, "--reward_fn", *paths, "--reward_weights", "1", "0.5", "0.25")
    assert "reward    style.reward_func: " in shown and "reward    length.reward_func: " in shown
    assert "no episode succeeds" not in shown
    shown = load(tmp_path, "--reward_fn", *paths, "--reward_weights", "0.5", "0.25", "0.125")
    assert "success_threshold is 1, and the weights of the rewards add up to 0.875: no episode succeeds" in shown
    config = tmp_path / "one.yaml"
    config.write_text(f"reward:\n  reward_fn: {paths[0]}\n")
    assert "reward    reward_func: " in load(tmp_path, "--config", str(config))


def mixture(folder: Path, *tasks: str) -> str:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    path = folder / "mixture.yaml"
    path.write_text("tasks:\n" + "".join(f"- {{data: {folder / 'rows.jsonl'}, {task}}}\n" for task in tasks))
    return str(path)


def test_the_rewards_that_tasks_name_are_checked_before_the_first_step(tmp_path: Path) -> None:
    flags = ("--reward", "by_task", "--dataset_id_or_path")
    with pytest.raises(ConfigError, match="'gsm9k'"):
        load(tmp_path, *flags, mixture(tmp_path, "reward: gsm9k"))
    with pytest.raises(RewardError, match="some rows name no reward"):
        load(tmp_path, *flags, mixture(tmp_path, "reward: gsm8k", "name: other"))
    (tmp_path / "needs.py").write_text("def reward_func(completions, gold): return [0.0] * len(completions)\n")
    with pytest.raises(RewardError, match="asks for 'gold'"):
        load(tmp_path, *flags, mixture(tmp_path, f"reward: {tmp_path / 'needs.py'}"))


def test_a_dry_run_checks_gold_answers_with_each_tasks_own_reward(tmp_path: Path) -> None:
    flags = ("--dry_run", "--reward", "by_task", "--dataset_id_or_path")
    shown = load(tmp_path, *flags, mixture(tmp_path, "reward: gsm8k", "reward: tool_use"))
    assert "reward    by_task: built in, " in shown and "by_task: the gold answers of 8 rows score full marks" in shown


def run_parts(folder: Path, *flags: str) -> Job:
    base = ["--model_name_or_path", "nano", "--reward", "exact_match", "--output_dir", str(folder / "out")]
    script, config, model = parse_arguments([*base, *flags])
    return Job(script, config, model, Terminal(None, io.StringIO(), quiet=False))


def test_one_file_of_rows_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}+1?", "answer": {i + 1}}}\n' for i in range(40)))
    parts = run_parts(tmp_path, "--dataset_id_or_path", str(file), "--eval_share", "0.1")
    rows, heldout = parts.training_rows(), parts.heldout_rows()
    assert heldout is not None and (len(rows), len(heldout)) == (36, 4)
    assert not {str(p) for p in rows["prompt"]} & {str(p) for p in heldout["prompt"]}
    other = run_parts(tmp_path, "--dataset_id_or_path", "arithmetic", "--eval_dataset_id_or_path", str(file))
    assert other.heldout_rows(default=7) is not None, "without a split a file is taken whole"
    with pytest.raises(DataError, match=r"--eval_share 0\.1"):
        run_parts(tmp_path, "--dataset_id_or_path", str(file), "--eval_questions", "4").heldout_rows()


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("def reward_func(completions, **kwargs): return [0.0]", "returned 1 rewards for 3 completions"),
        ("def reward_func(completions, answers): return [0.0] * len(completions)", "asks for 'answers'"),
        (
            "def reward_func(completions, **kwargs): return [len(c[-1]['content']) / len(c[0]['content']) for c in completions]",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_dry_run_asks_each_reward_as_the_evaluation_will(tmp_path: Path, reward: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(reward + "\n")
    with pytest.raises(RewardError, match=said):
        load(tmp_path, "--dry_run", "--reward_fn", str(tmp_path / "mine.py"))


def test_a_dry_run_resets_the_environment(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "class Env:\n    def reset(self, goal): pass\n    def look(self) -> int:\n        'Look.'\n        return 1\n\n"
        "    def reward(self): return 0.5\n"
    )
    with pytest.raises(PluginError, match="environment Env: reset raised for a row with the columns"):
        load(tmp_path, "--dry_run", "--environment", f"{tmp_path / 'env.py'}:Env", "--reward", "environment")


def test_a_dry_run_checks_everything_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and proven like a run, model and engine too; the command itself is tried in `test_train_command.py`."""
    monkeypatch.chdir(ROOT)
    flags = ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--eval_questions", "16", "--dry_run"]
    given = ["--config", "recipes/configs/nano.yaml", "--engine", "transformers", "--use_cpu", "true", *flags]
    shown = io.StringIO()
    assert run_train(read("train", given), Terminal(None, shown, quiet=False)) == 0
    said = shown.getvalue()
    assert "dry run: everything was loaded and checked" in said and " 1/2 " not in said
    assert "engine    transformers (asked for)" in said and "training  2 steps (of " in said
    assert not (tmp_path / "out").exists()
