"""What a whole run leaves behind when something ends it: the trained model, and nobody else's files mixed with its own."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from tests.support.held_folder import Holder
from toolgrpo.commands.arguments import parse_arguments
from toolgrpo.commands.main import read
from toolgrpo.commands.sft import run_sft, sft_arguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.support.run_lock import claim_folder
from toolgrpo.trainer.stopping import GracefulStop, finish_before_stopping

pytestmark = pytest.mark.e2e

# Called for the rows before (greedy, sampled), for the one step, and then for the rows after.
REWARD = """
import os, signal
calls = 0

def reward_func(completions, **kwargs):
    global calls
    calls += 1
    if calls == 4:
        {trouble}
    return [float(i % 2) for i in range(len(completions))]
"""


def arguments(mini_nano: Path, folder: Path, reward: str = REWARD.format(trouble="pass")) -> list[str]:
    (folder / "reward.py").write_text(reward)
    return [
        *("--model_name_or_path", str(mini_nano), "--output_dir", str(folder / "out")),
        *("--dataset_id_or_path", "arithmetic", "--reward_fn", str(folder / "reward.py"), "--eval_questions", "2"),
        *("--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "8"),
        *("--engine", "transformers", "--save_strategy", "no", "--report_to", "none", "--learning_rate", "0.01"),
        *("--max_steps", "1", "--use_cpu", "true"),
    ]


def training(words: list[str]) -> tuple[TrainingRun, io.StringIO]:
    return TrainingRun(*parse_arguments(words), Terminal(None, shown := io.StringIO(), quiet=False)), shown


@pytest.mark.parametrize(
    ("trouble", "error"),
    [("raise ValueError('a bad row')", RewardError), ("signal.raise_signal(signal.SIGINT)", KeyboardInterrupt)],
    ids=["an error", "Ctrl-C"],
)
def test_what_happens_after_the_last_step_does_not_cost_the_model(
    mini_nano: Path, tmp_path: Path, trouble: str, error: type[BaseException]
) -> None:
    run, shown = training(arguments(mini_nano, tmp_path, REWARD.format(trouble=trouble)))
    with pytest.raises(error):
        run.run()
    out = tmp_path / "out"
    one, other = (load_file(folder / "model.safetensors") for folder in (out, mini_nano))
    assert any(not one[name].equal(other[name]) for name in one), "it is the trained one"
    assert (out / "config.json").is_file() and (out / "tokenizer.json").is_file()
    for said in (f"saved     {out}\n", f"model     {out}\n", "(not measured)", "1 step, "):
        assert said in shown.getvalue()


def test_a_signal_while_the_model_is_saved_waits_until_it_is() -> None:
    before, said, saved = signal.getsignal(signal.SIGTERM), list[str](), False
    with pytest.raises(KeyboardInterrupt), finish_before_stopping("the model is saved", said.append):
        signal.raise_signal(signal.SIGINT)
        saved = True
    assert saved and len(said) == 1 and said[0].startswith("SIGINT: the model is saved")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_starting_shell_has_it_ignore_stays_ignored(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with finish_before_stopping("the model is saved", said.append), GracefulStop(None, said.append) as training:
            signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert said == [] and training.stopped_by is None
    finally:
        signal.signal(number, before)


def test_every_way_to_write_into_a_folder_is_refused_while_another_run_does(
    train_tiny: ModuleType, tiny_model: Path, mini_nano: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = train_tiny.Job(out=str(out), model=str(tiny_model), config={"use_cpu": True, "max_steps": 1})
    sft = ["--model_name_or_path", str(mini_nano), "--dataset_id_or_path", "rows.jsonl", "--output_dir", str(out)]
    run, _ = training(arguments(mini_nano, tmp_path))
    with Holder(out) as other:
        before = sorted(path.name for path in out.iterdir())
        for write in (
            lambda: train_tiny.run(job),
            lambda: run_sft(*sft_arguments(read("sft", sft)), Console(file=io.StringIO())),
            run.run,
        ):
            with pytest.raises(ConfigError, match=f"another run writes into .*process {other.pid} on "):
                write()
        assert sorted(path.name for path in out.iterdir()) == before
    train_tiny.run(job)
    claim_folder(out, patience_s=0.0).release()


def test_a_resumed_run_counts_its_own_steps_and_keeps_the_first_table(mini_nano: Path, tmp_path: Path) -> None:
    def run(*flags: str) -> tuple[dict[str, Any], str]:
        run, shown = training([*arguments(mini_nano, tmp_path), "--save_strategy", "steps", *flags])
        return dict(run.run() or {}), shown.getvalue()

    first, _ = run("--save_steps", "1")
    again, shown = run("--save_steps", "1", "--max_steps", "2", "--resume_from_checkpoint", "auto")
    assert (first["steps"], again["steps"], again["steps_in_all"]) == (1, 1, 2)
    assert again["before"] == first["before"] and "before    greedy" not in shown, "it was measured once, before step 1"
    assert [run["after"] for run in again["earlier_runs"]] == [first["after"]] and first["earlier_runs"] == []
    card = (tmp_path / "out" / "README.md").read_text()
    assert "before (greedy)" in card and "after (sampled)" in card and f"`{mini_nano}`" in card


STOPPED = """
import logging, signal, warnings

print("the reward is loaded")

def reward_func(completions, trainer_state, **kwargs):
    warnings.warn("the unit is unclear")
    if trainer_state.global_step == 1:  # it is asked in the second step
        logging.getLogger(__name__).warning("the price is missing")
        signal.raise_signal(signal.{name})
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), pytest.param("SIGTERM", 0, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_says_each_thing_once(mini_nano: Path, tmp_path: Path, name: str, code: int) -> None:
    flags = arguments(mini_nano, tmp_path, STOPPED.format(name=name))
    flags += ["--max_steps", "4", "--report_to", "wandb", "--tools_script", "tools.py"]
    (tmp_path / "tools.py").write_text("def f(bare: int) -> int:\n    'Double.'\n\nTOOL_FUNCTIONS = [f]\n")
    without_login = {"HOME": str(tmp_path), "NETRC": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    words, env = [sys.executable, "-m", "toolgrpo", "train", *flags], {**os.environ, **without_login}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == code, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    for text in (done.stdout, (tmp_path / "out" / "train.log").read_text()):
        assert re.findall(r"^ *(\d)/4 ", text, re.MULTILINE) == ["1", "2"]
        said = [f"{name}: the current step is finished", "go on     ", "warning   the model will see only"]
        said += ["the reward is loaded", "the unit is unclear", "the price is missing", "WandbCallback failed"]
        assert [text.count(one) for one in said] == [1] * 7, text
