"""`toolgrpo check`: what it says of a good job, and of each thing that can be wrong with one."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolgrpo.commands.check import CheckRun, check_arguments, first_commands
from toolgrpo.commands.check_lines import (
    CheckLine,
    CheckReport,
    CheckVerdict,
    add_budget,
    add_calls,
    add_road,
    add_success,
    add_tried,
)
from toolgrpo.commands.evaluate import evaluation_arguments
from toolgrpo.commands.main import read
from toolgrpo.commands.run_file import same_command
from toolgrpo.commands.table import flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.draw.play import ToolFault, Tried
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.evaluation.before_training import Untrained
from toolgrpo.rollout import EpisodeLimits, RolloutBatch, Scored
from toolgrpo.support.plain_text import duration
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode

ROOT = Path(__file__).parents[2]
GOOD = ["--config", "recipes/configs/nano.yaml", "--engine", "transformers", "--per_device_train_batch_size", "8"]


def look(folder: Path, *flags: str) -> tuple[CheckReport, str]:
    """The report of a check, and what stands on the terminal."""
    shown = io.StringIO()
    parsed = check_arguments(
        read("check", [*GOOD, "--output_dir", str(folder), "--questions", "3", "--samples", "2", *flags])
    )
    report = CheckRun(*parsed, Terminal(None, shown, quiet=False)).run()
    return report, shown.getvalue()


@pytest.mark.e2e
def test_a_good_job_passes_everything_and_a_step_is_done(tmp_path: Path) -> None:
    """Real nano, real tools, a real step: what is looked at, in order, and what was measured."""
    report, shown = look(tmp_path)
    assert report.exit_code == 0 and report.count(CheckVerdict.FAILURE) == 0, shown
    whats = [line.what for line in report.lines]
    in_order = ["data", "tools", "reward", "model", "engine", "chat", "prompts", "calls", "length", "success", "step"]
    assert whats[-1] == "road"
    assert [what for what in dict.fromkeys(whats) if what in in_order] == in_order
    numbers = {line.what: line.numbers for line in report.lines}
    assert 0 < numbers["weights"]["difference"] < 1e-4, "the engine drew from the weights of the step"
    assert numbers["step"]["seconds"] > 0 and numbers["time"]["step_s"] > 0 and numbers["memory"]["peak_gib"] > 0
    tried = [line.numbers["answered"] for line in report.lines if "answered" in line.numbers]
    assert tried == [4], "each tool was called with drawn arguments"
    assert 0 < numbers["prompts"]["median"] <= numbers["prompts"]["longest"] < numbers["prompts"]["window"]
    lines = shown.splitlines()
    assert len(lines) == len(report.lines), "a line is a line"
    assert all(line.split()[0] in ("pass", "warning") for line in lines)
    as_json = json.loads(report.as_json())
    assert as_json["passed"] and [check["what"] for check in as_json["checks"]] == whats
    assert list(tmp_path.iterdir()) == [], "nothing of it is kept"


@pytest.mark.e2e
def test_samples_that_a_reward_drops_are_a_failure_of_their_line(tmp_path: Path) -> None:
    drops = "from toolgrpo import DropEpisode\ndef reward_func(completions, **_): return [DropEpisode('x')] * len(completions)"
    (tmp_path / "reward.py").write_text(drops)
    report, _ = look(tmp_path / "out", "--reward_fn", str(tmp_path / "reward.py"), "--reward_weights", *"111")
    assert report.lines[-1].what == "samples" and "6 of 6 episodes" in report.lines[-1].said


@pytest.mark.parametrize(
    ("file", "text", "flag", "said"),
    [
        ("tools.py", "def f(x: int) -> int:\n    return x\nTOOL_FUNCTIONS = [g]\n", "--tools_script", "g"),
        ("reward.py", "def another(completions, **kwargs):\n    return 0\n", "--reward_fn", "reward_func"),
        ("data.jsonl", '{"prompt": "1 + 1?", "answer": "2"}\n', "--dataset_id_or_path", "has 1 row"),
    ],
)
def test_what_cannot_be_loaded_is_a_failure_of_its_line(
    tmp_path: Path, file: str, text: str, flag: str, said: str
) -> None:
    path = tmp_path / file
    path.write_text(text)
    more = ["--reward_weights", "1.0", "1.0", "1.0"] if flag == "--reward_fn" else []
    more += ["--per_device_train_batch_size", "16"] if flag == "--dataset_id_or_path" else []
    report, shown = look(tmp_path / "out", flag, str(path), *more)
    assert report.exit_code == 1 and report.lines[-1].verdict is CheckVerdict.FAILURE, shown
    assert said in report.lines[-1].said and file.split(".")[0] in shown


@pytest.mark.parametrize(
    ("score", "calls", "verdict"),
    [(0.5, True, CheckVerdict.FAILURE), (0.0, False, CheckVerdict.FAILURE), (0.0, True, CheckVerdict.WARNING)],
)
def test_a_reward_that_cannot_tell_gold_from_nonsense_fails_unless_only_a_call_may_earn(
    tmp_path: Path, score: float, calls: bool, verdict: CheckVerdict
) -> None:
    (tmp_path / "reward.py").write_text(
        f"def reward_func(completions, **kwargs):\n    return [{score}] * len(completions)\n"
    )
    flags = ["--model_name_or_path=nano", "--dataset_id_or_path=arithmetic", f"--output_dir={tmp_path / 'out'}"]
    parsed = check_arguments(read("check", [*flags, "--reward_fn", str(tmp_path / "reward.py")]))
    run = CheckRun(*parsed, Terminal(None, io.StringIO(), quiet=False))
    run.made_up(list(run.job.training_rows())[:20], run.job.rewards(), calls=calls)
    assert run.report.lines[-1].verdict is verdict
    assert f"score {score:.2f}, nonsense {score:.2f}" in run.report.lines[-1].said
    assert ("call no tool" in run.report.lines[-1].do) == (verdict is CheckVerdict.WARNING)


@pytest.mark.parametrize(("paid", "verdict"), [("gold_calls", CheckVerdict.PASS), ("tool_use", CheckVerdict.WARNING)])
def test_answers_without_calls_need_no_full_marks_where_the_calls_of_the_row_are_paid(
    tmp_path: Path, paid: str, verdict: CheckVerdict
) -> None:
    flags = ["--model_name_or_path=nano", "--dataset_id_or_path=arithmetic", f"--output_dir={tmp_path / 'out'}"]
    parsed = check_arguments(read("check", [*flags, "--reward", "tool_result", paid, "--reward_weights", "0.5", "0.5"]))
    run = CheckRun(*parsed, Terminal(None, io.StringIO(), quiet=False))
    called = {"name": "add", "arguments": {"a": 1, "b": 2}}
    run.made_up([{"prompt": "1 + 2?", "answer": "3", "gold_calls": [called]}], run.job.rewards(), calls=True)
    assert run.report.lines[-1].verdict is verdict and "score 0.50, nonsense 0.00" in run.report.lines[-1].said


@pytest.mark.parametrize(
    ("malformed", "failed", "calls", "verdict", "said"),
    [
        (
            {"invalid_json": 17, "unclosed": 15},
            {},
            76,
            CheckVerdict.WARNING,
            "the model does not know the form of calls",
        ),
        ({"invalid_json": 16}, {}, 76, CheckVerdict.WARNING, "what stands in the call is no JSON"),
        ({"invalid_json": 7, "unclosed": 7}, {"bad_arguments": 20}, 76, CheckVerdict.WARNING, "does not know the form"),
        ({"invalid_json": 9}, {}, 12, CheckVerdict.WARNING, "9 of them cannot be run"),
        ({"invalid_json": 5, "unclosed": 4}, {}, 18, CheckVerdict.WARNING, "does not know the form"),
        ({"invalid_json": 10, "unclosed": 10}, {}, 76, CheckVerdict.PASS, "20 of them cannot be run"),
        ({}, {"exception": 20}, 76, CheckVerdict.PASS, "20 fail"),
    ],
)
def test_calls_that_cannot_be_run_warn_as_the_doctor_does(
    malformed: dict[str, int], failed: dict[str, int], calls: int, verdict: CheckVerdict, said: str
) -> None:
    facts = untrained(calls=calls, malformed=Counter(malformed), failed=Counter(failed))
    report = CheckReport(lambda line: None)
    add_calls(report, facts, RolloutBatch(episodes=()), [])
    (line,) = report.lines
    assert line.verdict is verdict and said in line.said


def test_a_task_without_a_success_is_named_beside_others_that_have_some() -> None:
    report = CheckReport(lambda line: None)
    for facts in (untrained(), untrained(never={"chains": 8, "sums": 12})):
        add_success(report, facts)
    passed, warned = report.lines
    assert passed.verdict is CheckVerdict.PASS and warned.verdict is CheckVerdict.WARNING
    assert "not one episode succeeds of task chains (8), sums (12)" in warned.said and "toolgrpo sft" in warned.do


@pytest.mark.parametrize(
    ("facts", "verdict", "said"),
    [
        ({"pass_1": 0.97, "mixed": 1}, CheckVerdict.WARNING, "leave it: 97 % of the episodes succeed"),
        ({"mixed": 2}, CheckVerdict.PASS, "reinforce: in 2 of 16 groups some episodes succeed and some fail"),
        ({"mixed": 2, "failed": Counter(bad_arguments=32)}, CheckVerdict.PASS, "reinforce: "),
        (
            {"mixed": 1, "failed": Counter(bad_arguments=12, raised=5)},
            CheckVerdict.WARNING,
            "fix the schema or the prompt",
        ),
        ({"mixed": 1, "failed": Counter(bad_arguments=11, raised=6)}, CheckVerdict.WARNING, "train on own successes"),
        ({"mixed": 1, "failed": Counter(bad_arguments=15)}, CheckVerdict.WARNING, "train on own successes"),
        ({"mixed": 0, "live": 1.0}, CheckVerdict.WARNING, "show worked calls: where a group fails, all of it fails"),
        ({"mixed": 0, "calls": 0, "pass_1": 0.0}, CheckVerdict.WARNING, "show worked calls"),
    ],
)
def test_the_last_line_says_which_road_fits(facts: dict[str, Any], verdict: CheckVerdict, said: str) -> None:
    report = CheckReport(lambda line: None)
    add_road(report, untrained(**facts), "toolgrpo train t", "toolgrpo evaluate e", "toolgrpo sft s", 5400.0)
    (line,) = report.lines
    assert line.verdict is verdict and line.said.startswith(said)
    told = f"{line.said} {line.do}"
    command = re.findall(r"toolgrpo (\w+)", told)
    road = line.numbers["road"]
    assert command == {"leave it": [], "reinforce": ["train"], "show worked calls": ["sft"]}.get(
        road, ["evaluate", "sft" if road == "train on own successes" else "show"]
    )


def test_the_commands_have_what_was_typed_as_far_as_they_take_it_and_no_secret() -> None:
    kept = [
        "--model_name_or_path",
        "my model",
        "--dataset_id_or_path",
        "arithmetic",
        "--reward",
        "exact_match",
        "tool_use",
    ]
    kept += ["--bf16", "false", "--context", '{"strategy": "drop_results"}']
    given = read("check", [*kept, "--learning_rate", "0.1", "--samples", "8", "--hub_token", "hf_abcdefghijklmnop"])
    for command, more in (("train", ["--learning_rate", "0.1"]), ("evaluate", [])):
        line = same_command(given, command, flags_of(command), without=["samples"])
        assert shlex.split(line) == ["toolgrpo", command, *kept, *more]
        assert not read(command, [*kept, *more]).complaints


@pytest.mark.parametrize("held_out", ["eval_split: heldout", "eval_share: 0.2", "eval_dataset_id_or_path: chains"])
def test_what_is_drawn_to_learn_from_is_trained_on_and_examples_come_with_the_tools(
    tmp_path: Path, held_out: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{(ROOT / 'recipes/configs/nano.yaml').read_text()}  {held_out}\n")
    given = read("check", ["--config", str(file), "--dataset_split", "easy"])
    train, draw, teach = map(shlex.split, first_commands(given, check_arguments(given)[1]))
    assert train == ["toolgrpo", "train", "--config", str(file), "--dataset_split", "easy"]
    _, script, *_ = evaluation_arguments(read("evaluate", draw[2:]))
    assert script.heldout_source() == ("arithmetic", "easy") and not script.eval_share
    shown = read("sft", [*teach[2:], "--from_run", str(tmp_path)])
    assert not shown.complaints and shown.values["tools_script"] == "tools_funcs/arithmetic_tools.py"


@pytest.mark.parametrize(
    ("stops", "cap", "do"),
    [
        ({"length": 7, "finished": 25}, 2, "raise --max_turn_tokens (7)"),
        ({"length": 7, "finished": 25}, None, "raise --max_completion_length (7)"),
        ({"max_turns": 2, "context_full": 2, "finished": 28}, 2, "--vllm_max_model_length (2), --max_turns (2)"),
        ({"length": 1, "finished": 31}, 2, ""),
    ],
)
def test_episodes_that_were_cut_are_a_warning_that_names_the_limit(
    stops: dict[str, int], cap: int | None, do: str
) -> None:
    cut = run_episode(ScriptedEngine([ByteChat.say("1234")]), max_turn_tokens=2)
    ends = [replace(cut, stop_reason=StopReason(reason)) for reason, n in stops.items() for _ in range(n)]
    report = CheckReport(lambda line: None)
    batch = RolloutBatch(episodes=tuple(Scored({"prompt": "q"}, one) for one in ends))
    limits = EpisodeLimits(max_completion_length=64, max_turn_tokens=cap)
    add_budget(report, untrained(stops=Counter(stops)), batch, len, limits)
    (line,) = report.lines
    assert line.verdict is (CheckVerdict.WARNING if do else CheckVerdict.PASS) and line.do.endswith(do)


def test_a_tool_that_fails_whatever_its_arguments_are_is_a_warning_and_others_are_counted() -> None:
    report = CheckReport(lambda line: None)
    fault = ToolFault("lookup", "hangs", "no answer within 10 s")
    add_tried(report, Tried([fault], {"lookup": 0, "add": 6}, ["lend"]))
    warned, passed = report.lines
    assert warned.verdict is CheckVerdict.WARNING and warned.said == "lookup: no answer within 10 s"
    assert passed.verdict is CheckVerdict.PASS and passed.said.startswith(
        "1 of 2 answered drawn arguments (not lookup)"
    )
    assert passed.said.endswith("readOnlyHint: lend") and passed.numbers["not_called"] == ["lend"]


def test_a_time_is_told_in_its_own_unit() -> None:
    told = [duration(seconds) for seconds in (0.04, 9, 89, 95, 5399, 5401)]
    assert told == ["0.0 s", "9.0 s", "89.0 s", "1.6 min", "90.0 min", "1.5 h"]


def untrained(**changes: Any) -> Untrained:
    facts: dict[str, Any] = {name: Counter() for name in ("malformed", "failed", "stops")}
    facts |= {"n": 16, "k": 2, "episodes": 32, "calls": 32, "calling": 0.5, "rewards": (0.0, 1.0)}
    facts |= {"live": 0.5, "mixed": 4, "pass_1": 0.3, "pass_k": 0.5, "copied": 0, "never": {}}
    return Untrained(**{**facts, **changes})


def test_lines_are_one_line_and_nothing_in_them_steers_a_terminal() -> None:
    seen: list[str] = []
    report = CheckReport(lambda line: seen.append(line.shown().plain))
    report.add("tools", "add")
    report.add("calls", "none\nof them\x1b[2J", warning="Teach the form first", share=0.0)
    assert report.exit_code == 0
    report.failed("data", "it is missing")
    assert report.exit_code == 1 and report.closing() == "3 checks: 1 failed, 1 with a warning, 1 passed"
    assert seen[1] == "warning  calls       none of them\\x1b[2J. Teach the form first"
    assert json.loads(report.as_json())["checks"][1]["numbers"] == {"share": 0.0}


QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3 |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": QWEN3,
    "Qwen/Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
        **{"num_attention_heads": 14, "num_key_value_heads": 2},
    },
}
SHAPES["Qwen/Qwen2.5-Coder-0.5B-Instruct"] = SHAPES["Qwen/Qwen2.5-0.5B-Instruct"]
LOCAL = {"gsm8k": "gsm8k:recipes/data/gsm8k_30.jsonl", "mbpp": "mbpp:recipes/data/mbpp_10.jsonl"}
NAMED = re.compile(r"GPU of (\d+) GB")
PROMISES = [path for path in sorted((ROOT / "recipes" / "configs").rglob("*.yaml")) if NAMED.search(path.read_text())]


def estimated(folder: Path, name: str, gb: str, *flags: str) -> dict[str, CheckLine]:
    """What is said of a model of which there is nothing but the config."""
    sizes = {**SHAPES[name], "vocab_size": 151936, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes))
    given = ["--model_name_or_path", str(folder), "--output_dir", str(folder / "out"), "--card", f"{gb}GB"]
    parsed = check_arguments(read("check", [*flags, *given]))
    return {line.what: line for line in CheckRun(*parsed, Terminal(None, io.StringIO(), quiet=False)).run().lines}


@pytest.mark.parametrize("path", PROMISES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_gpu_that_it_names(path: Path, tmp_path: Path) -> None:
    """By the estimate. T4, L4 and A10 leave less of their memory than other cards of their size."""
    (gb,) = NAMED.findall(path.read_text().splitlines()[0])
    without_engine: list[str] = []
    if path.parent.name == "sft":  # the same model and adapter, in batches of as many
        path = ROOT / "recipes" / "configs" / "gsm8k_qwen3_1.7b.yaml"
        without_engine = ["--engine", "vllm_server", "--vllm_server_urls", "http://none"]
    recipe = {key: value for part in yaml.safe_load(path.read_text()).values() for key, value in part.items()}
    spec = recipe["dataset_id_or_path"]
    if path.stem == "mbpp_qwen2.5_0.5b":  # its examples are read, with tasks that are here
        mixture = tmp_path / "mixture.yaml"
        mixture.write_text((ROOT / spec).read_text().replace("data: mbpp\n", f"data: {LOCAL['mbpp']}\n"))
        spec = str(mixture)
    flags = ["--config", str(path), "--dataset_id_or_path", LOCAL.get(spec, spec), *without_engine]
    flags += ["--eval_questions", "0"] if spec in LOCAL or spec.startswith(str(tmp_path)) else []
    for share, fits in ((1, True), (0.94, True), (0.3, False)):
        lines = estimated(tmp_path, recipe["model_name_or_path"], f"{share * int(gb):g}", *flags)
        assert (lines["memory"].verdict is CheckVerdict.PASS) is fits, lines["memory"].said
        if fits or recipe.get("use_peft"):  # whole weights run out of memory while the engine still has room
            assert without_engine or (lines["cache"].verdict is not CheckVerdict.FAILURE) is fits, lines["cache"].said


def test_the_command_of_the_readme_fits_the_gpu_that_it_names(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    ((sentence, command),) = re.findall(r"(One command trains.*?)```\n(toolgrpo train .*?)```", text, re.DOTALL)
    words = command.replace("\\\n", " ").split()[2:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert {"--tools_script", "--reward_fn"} <= given.keys(), "the files that the page shows; others are as long"
    given |= {"--tools_script": "tools_funcs/calculator_tools.py", "--reward_fn": "rewards/math_reward.py"}
    given["--dataset_id_or_path"] = LOCAL["gsm8k"]
    (gb,) = NAMED.findall(sentence)
    flags = [word for pair in given.items() for word in pair]
    lines = estimated(tmp_path, given["--model_name_or_path"], gb, *flags)
    assert lines["memory"].verdict is CheckVerdict.PASS and lines["cache"].verdict is CheckVerdict.PASS
    assert "float32, 596 M are trained" in lines["model"].said
    assert estimated(tmp_path, "Qwen/Qwen3-1.7B", gb, *flags)["memory"].verdict is CheckVerdict.FAILURE


@pytest.mark.e2e
def test_json_stands_alone_on_standard_output_and_a_failure_is_the_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "recipes/check.py", *GOOD, "--tools_script", str(tmp_path / "none.py"), "--json"),
            *("--output_dir", str(tmp_path / "out")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert checks[-1]["what"] == "tools" and checks[-1]["verdict"] == "failure" and "none.py" in checks[-1]["said"]
