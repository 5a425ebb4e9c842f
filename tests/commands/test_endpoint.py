"""A model behind a chat endpoint, from the commands: measured, compared, checked, and learned from."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.chat_server import Says, ScriptedEndpoint, answer, question_of, serving
from toolgrpo.commands.check import CheckRun, check_arguments
from toolgrpo.commands.evaluate import EvaluationRun, evaluation_arguments
from toolgrpo.commands.main import mistakes, read
from toolgrpo.commands.show import run_show
from toolgrpo.commands.terminal import Terminal
from toolgrpo.engines.base import KEY_VARIABLE, NO_TOKENS
from toolgrpo.engines.build import EngineOptions, choose_engine
from toolgrpo.errors import ConfigError, TooManyDroppedError
from toolgrpo.observe.records import read_episodes
from toolgrpo.report.episode_data import episode_tokens

ROOT = Path(__file__).parents[2]
KEY = "sk-test-0123456789"


def adds(body: dict[str, Any]) -> Says:
    """`big` calls `add` and says its result; `small` guesses; `mute` does not answer the question 4 + 1."""
    if question_of(body) == "Say OK.":
        return answer("OK")
    a, b = map(int, re.findall(r"\d+", question_of(body)))
    if body["model"] == "mute" and (a, b) == (4, 1):
        return 403, b"not this one"
    counted: dict[str, Any] = {"prompt_tokens": 40, "completion_tokens": 8, "cost": 0.001}
    if body["model"] == "small":
        return answer("12", **counted)
    if body["messages"][-1]["role"] != "tool":
        return answer(None, ("add", json.dumps({"a": a, "b": b})), **counted)
    return answer(f"It is {body['messages'][-1]['content']}.", **counted)


@pytest.fixture
def server() -> Iterator[ScriptedEndpoint]:
    with serving(adds) as endpoint:
        yield endpoint


@pytest.fixture
def job(server: ScriptedEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of an evaluation of `big` on ten sums."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    rows = tmp_path / "rows.jsonl"
    sums = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "expected_tools": ["add"]} for n in range(10)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return [
        *("--model", "big", "--engine", "chat_api", "--base_url", server.url, "--use_cpu", "true"),
        *("--tools_script", "arithmetic", "--reward", "exact_match", "--tool_workers", "1"),
        *("--eval_dataset_id_or_path", str(rows), "--eval_split", "train", "--samples", "2"),
        *("--output_dir", str(tmp_path / "out")),
    ]


def evaluate(flags: list[str]) -> tuple[Any, str]:
    given, shown = read("evaluate", flags), io.StringIO()
    assert mistakes(given) == []
    done = EvaluationRun(*evaluation_arguments(given), Terminal(None, shown, quiet=False), given).run()
    return done, shown.getvalue()


@pytest.mark.e2e
def test_a_large_model_and_a_small_one_side_by_side(server: ScriptedEndpoint, job: list[str], tmp_path: Path) -> None:
    """As a user would: worse than the baseline is exit code 1, and the key stands in no file."""
    flags = [*job, "--model", "small", "--baseline", "chat_api:big", "--fail_if", "worse"]
    command = [sys.executable, "-m", "toolgrpo", "evaluate", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (found["model"]["pass@1"]["value"], found["baseline"]["pass@1"]["value"]) == (0.0, 1.0)
    usage = {"requests": 40, "prompt_tokens": 1600, "completion_tokens": 320, "cost": 0.04}
    assert found["baseline"]["usage"] == pytest.approx(usage)
    assert found["baseline"]["sampled_tokens"] == 16 and found["verdict"]["verdict"] == "worse"
    assert found["verdict"]["worse_on"][0]["name"] == "tool add"
    assert f"engine    chat_api: big at {server.url} answers" in done.stdout
    for said in ("tokens read", "1,600", "cost", "0.04", "verdict   worse: pass@1 -1.000"):
        assert said in done.stdout, done.stdout
    files = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 4 and not any(KEY.encode() in one for one in files) and KEY not in done.stdout + done.stderr
    assert {*server.keys} == {f"Bearer {KEY}"}
    episodes = read_episodes(tmp_path / "out" / "baseline")
    assert len(episodes) == 20 and {one["stop_reason"] for one in episodes} == {"finished"}
    assert episode_tokens(episodes[0], None) == {"i": [], "m": [0], "l": []}

    console = Console(file=(shown := io.StringIO()), width=300)
    for words in (["0", "--tokens"], ["--successes", "--as_examples", str(tmp_path / "x.jsonl")]):
        run_show(read("show", [str(tmp_path / "out" / "baseline"), *words]), console)
    assert "counts tokens and does not show them" in shown.getvalue()
    assert "10 of 20 episodes (10 that repeat an earlier one)" in shown.getvalue()
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 10


@pytest.mark.e2e
def test_a_dry_run_asks_once_and_losses_are_an_error(server: ScriptedEndpoint, job: list[str], tmp_path: Path) -> None:
    report, shown = evaluate([*job, "--dry_run"])
    assert report.exit_code == 0 and "dry run" in shown and len(server.asked) == 1
    comparison, shown = evaluate([*job, "--model", "mute"])
    assert comparison.model.as_json()["dropped"] == {"episodes": 2, "causes": {"endpoint": 2}}
    assert "dropped   2 of 20 episodes, neither successes nor failures: endpoint 2" in shown
    with pytest.raises(TooManyDroppedError, match="the endpoint lost 2 of 20 episodes of mute"):
        evaluate([*job, "--model", "mute", "--max_infrastructure_failures", "0.05"])
    assert len(read_episodes(tmp_path / "out" / "model")) == 20, "what was played is kept"
    (tmp_path / "r.py").write_text("def reward_func(completions, **_):\n    return [None] * len(completions)\n")
    silent = [*job, "--reward_fn", str(tmp_path / "r.py")]
    del silent[(at := silent.index("--reward")) : at + 2]
    with pytest.raises(TooManyDroppedError, match="none of 20 episodes of big could be scored: 20 x no_reward: "):
        evaluate([*silent, "--max_dropped_share", "1"])
    (tmp_path / "r.py").write_text("def reward_func(completions, **_):\n    return [None] * 8 + [1.0] * 12\n")
    with pytest.raises(TooManyDroppedError, match=r"8 of 20 .* max_dropped_share \(0.25\) allows: 8 x no_reward"):
        evaluate(silent)


@pytest.mark.e2e
def test_a_check_lets_the_endpoint_play_alone(server: ScriptedEndpoint, job: list[str], tmp_path: Path) -> None:
    flags = [*job[: job.index("--eval_dataset_id_or_path")], "--dataset_id_or_path", str(tmp_path / "rows.jsonl")]
    flags += ["--questions", "3", "--samples", "2", "--output_dir", str(tmp_path / "out")]
    given, terminal = read("check", flags), Terminal(None, shown := io.StringIO(), quiet=False)
    assert mistakes(given) == []
    report = CheckRun(*check_arguments(given), terminal).run()
    numbers = {line.what: line.numbers for line in report.lines}
    assert report.exit_code == 0 and numbers["success"]["pass_1"] == 1.0, shown.getvalue()
    assert numbers["time"]["completion_tokens"] == 6 * 16 and numbers["calls"]["calling"] == 1.0
    assert {"step", "weights", "memory"}.isdisjoint(numbers)
    server.says = lambda body: (401, b"who are you")
    report = CheckRun(*check_arguments(given), terminal).run()
    assert report.exit_code == 1 and "refuses the key in TOOLGRPO_CHAT_KEY" in report.lines[-1].said


AT = "--engine chat_api --base_url http://h/v1"
BAD = [
    (f"train --model big {AT}", NO_TOKENS),
    ("train --model nano --base_url http://h/v1", "is used only by `toolgrpo evaluate` and `check`"),
    (f"gateway --model big {AT} --port 0", NO_TOKENS),
    (f"chat big {AT}", NO_TOKENS),
    ("evaluate --model big --engine chat_api", "add --base_url"),
    ("evaluate --model nano --baseline chat_api:big", "baseline chat_api:big"),
    ("evaluate --model nano --base_url http://h/v1", "add --engine chat_api"),
    ("evaluate --model chat_api:big --base_url http://h/v1", "write --engine chat_api and the name alone"),
    ("evaluate --model big --engine chat_api --base_url h/v1", "base_url must be an address"),
    ("evaluate --model big --engine chat_api --base_url http://me:pw@h/v1", "base_url must be an address"),
    ("evaluate --model big --engine chat_api --base_url http://h/v1?key=1", "without a password"),
    (f"evaluate --model big {AT} --agent true", "leave agent out"),
    (f'evaluate --model big {AT} --context {{"max_tokens":9}}', "leave context out"),
    (f"check --model big {AT} --estimate", "leave estimate out"),
    ("sft --model nano --from_run none", "none is not a folder"),
    ("sft --model nano --from_run x --dataset_id_or_path y", "both name conversations"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[line for line, _ in BAD])
def test_a_mistake_is_one_clear_error_before_pytorch(line: str, said: str, tmp_path: Path) -> None:
    command, *flags = line.split()
    data = ["--dataset_id_or_path", "arithmetic", "--reward", "exact_match"]
    more = data if command in ("train", "check", "evaluate") else []
    more += [] if command in ("gateway", "chat") else ["--output_dir", str(tmp_path / "out")]
    (error, *_) = mistakes(read(command, [*flags, *more]))
    assert said in str(error) and isinstance(error, ConfigError), error


def test_names_of_an_endpoint_are_no_folders_and_a_file_may_say_it_all(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    lines = ["model_name_or_path: a/b/c", "engine: chat_api", "base_url: http://h/v1", "baseline: chat_api:x/y/z"]
    lines += ["dataset_id_or_path: arithmetic", "fail_if: worse", f"output_dir: {tmp_path}/out"]
    file.write_text("\n".join(lines))
    assert mistakes(read("evaluate", ["--config", str(file)])) == []
    with pytest.raises(ConfigError, match=re.escape(NO_TOKENS)):
        choose_engine(EngineOptions(engine="chat_api"))
