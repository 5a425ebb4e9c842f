"""The evaluation command on nano: two models, real tools, real episodes, no gradients."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.commands.evaluate import EvaluationRun, evaluation_arguments
from toolgrpo.commands.job import Job
from toolgrpo.commands.main import read
from toolgrpo.commands.replay import ReplayRun, replay_arguments
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import ConfigError
from toolgrpo.models import NANO
from toolgrpo.observe.records import read_episodes

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
OF_NANO = ("--config", "recipes/configs/nano.yaml", "--engine", "transformers", "--use_cpu", "true")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter that spoils nano: with noise in every projection it can answer nothing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(NANO), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(20)
    folder = tmp_path_factory.mktemp("models") / "adapter"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    return folder


def evaluate(folder: Path, *flags: str) -> tuple[Any, str]:
    given = read("evaluate", [*OF_NANO, "--output_dir", str(folder), *flags])
    shown = io.StringIO()
    comparison = EvaluationRun(*evaluation_arguments(given), Terminal(None, shown, quiet=False), given).run()
    return comparison, shown.getvalue()


def test_a_model_and_a_spoilt_one_side_by_side(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags = ("--eval_questions", "12", "--samples", "3", "--ks", "1", "3", "--baseline", str(adapter))
    comparison, shown = evaluate(tmp_path, *flags)
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found == json.loads(json.dumps(comparison.as_json()))
    assert (found["questions"], found["samples"], found["data"]) == (12, 3, "arithmetic")
    assert found["baseline"]["pass@3"]["value"] == 0.0 < found["model"]["pass@3"]["value"]
    assert set(found["difference"]) == {"pass@1", "pass@3", "maj@3"}
    assert {"add", "multiply"} & set(found["model"]["tools"])
    assert all(name in shown for name in ("pass@1", "maj@3", "difference", "calls per episode"))
    lines = shown.splitlines()
    ends = [line for line in lines if line.startswith("ends ") and " of 36 episodes" in line]
    assert [line.rpartition(" ")[2] for line in ends] == ["(baseline)", "(model)"]
    assert lines.index(f"baseline  {adapter}") < lines.index("model     nano")
    assert all(f"episodes  {tmp_path / label / 'episodes.jsonl'}" in lines for label in ("baseline", "model"))
    episodes = read_episodes(tmp_path / "model" / "episodes.jsonl")
    assert len(episodes) == 36 and {episode["mode"] for episode in episodes} == {"eval"}
    successes = sum(episode.success for episode in comparison.model.episodes)
    assert found["model"]["pass@1"]["value"] == pytest.approx(successes / 36)
    assert lines[-1] == f"objective eval_success {successes / 36:.6g}"


def test_any_k_and_any_name_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = [{"prompt": "What is 2 + 2?", "answer": "4", "task": task} for task in ("sums [easy]", "sums [/b]")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--eval_dataset_id_or_path", str(tmp_path / "rows.jsonl"))
    _, shown = evaluate(tmp_path / "out", *data, "--eval_questions", "2", "--samples", "2", "--ks", "2")
    assert "[easy]" in shown and "[/b]" in shown
    assert json.loads((tmp_path / "out/evaluation.json").read_text())["model"]["pass@2"]
    assert shown.splitlines()[-1].startswith("objective eval_success ")


def test_users_who_speak_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of the row, on a real tokenizer; `replay` and `show` read the same recording."""
    from transformers import AutoTokenizer

    from toolgrpo.chat import resolve_format
    from toolgrpo.observe.episode_view import conversation

    monkeypatch.chdir(ROOT)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 2 + 3?", "answer": "5", "user_turns": ["Thanks! And 4 + 5?"]}\n')
    flags = ("--eval_split", "train", "--eval_questions", "1", "--samples", "2", "--temperature", "0")
    evaluate(tmp_path, "--eval_dataset_id_or_path", str(rows), *flags)
    chat = resolve_format(AutoTokenizer.from_pretrained(NANO))
    for record in read_episodes(tmp_path / "model" / "episodes.jsonl"):
        users = [turn["user"] for turn in record["turns"] if turn["user"] is not None]
        assert users == ["Thanks! And 4 + 5?"] and record["stop_reason"] == "finished"
        place = next(number for number, turn in enumerate(record["turns"]) if turn["user"] is not None)
        start, end = record["turns"][place]["end"], record["turns"][place + 1]["start"]
        bridge = chat.bridge([chat.stop_ids[0]], [{"role": "user", "content": users[0]}], messages=record["prompt"])
        assert record["ids"][start:end] == bridge and set(record["mask"][start:end]) == {0}
        assert "user: Thanks!" in "".join(str(part) for part in conversation(record).renderables)
    replays = {"1": "same     reward together", "--all": "0 of 2 episodes", "0 --with_model nano": "the same tokens"}
    for words, says in replays.items():
        parsed = replay_arguments(read("replay", [str(tmp_path), *words.split()]))
        again = ReplayRun(*parsed, Terminal(None, heard := io.StringIO(), quiet=False))
        assert (again.run(), says in heard.getvalue()) == (False, True), heard.getvalue()


def test_questions_are_all_that_it_needs(tmp_path: Path) -> None:
    """Nothing is trained, so no data to train on has to be named beside them."""
    flags = ["--model_name_or_path", "nano", "--output_dir", str(tmp_path)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "What is 2 + 3?", "answer": "5"}\n')
    given = read("evaluate", [*flags, "--eval_dataset_id_or_path", str(questions)])
    _, script, config, model = evaluation_arguments(given)
    rows = Job(script, config, model, Terminal(None, io.StringIO(), quiet=False)).heldout_rows(1)
    assert rows is not None and rows["answer"] == ["5"]
    with pytest.raises(ConfigError, match="--dataset_id_or_path is missing"):
        evaluation_arguments(read("evaluate", flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch_file", "more"),
    [("cpu", ()), ("cpu_ddp", ("--ddp_backend", "gloo", "--engine", "transformers"))],
    ids=["one process", "two processes that share 9 questions"],
)
def test_the_command_itself(tmp_path: Path, launch_file: str, more: tuple[str, ...]) -> None:
    """From the shell, with the engine that the machine has; `python -m json.tool` reads the report."""
    file = f"recipes/accelerate/{launch_file}.yaml"
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", file)
    flags = ("--eval_questions", "9", "--samples", "2", "--baseline", "nano", "--output_dir", str(tmp_path), *more)
    command = [*launch, "recipes/evaluate.py", "--config", "recipes/configs/nano.yaml", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert "pass@2" in done.stdout and "Warning" not in done.stdout + done.stderr
    report = tmp_path / "evaluation.json"
    subprocess.run([sys.executable, "-m", "json.tool", str(report), os.devnull], check=True)
    found = json.loads(report.read_text())
    assert found["questions"] == 9 and abs(found["difference"]["pass@1"]["value"]) < 0.5, "the same model twice"


def test_a_dry_run_ends_with_the_exit_code_of_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = "def reward_func(completions, **_):\n    return [float('weather' in str(one)) for one in completions]\n"
    (tmp_path / "wrong.py").write_text(text)
    wrong = (*("--reward_fn", str(tmp_path / "wrong.py")), *("--reward_weights", "0", "0", "1"))
    old = tmp_path / "out/model/episodes.jsonl"
    old.parent.mkdir(parents=True)
    old.touch()
    for flags, code in (((), 0), (wrong, 1)):
        report, shown = evaluate(tmp_path / "out", "--dry_run", "--eval_questions", "4", *flags)
        assert report.exit_code == code and "dry run: everything was loaded and checked; " in shown and old.exists()
