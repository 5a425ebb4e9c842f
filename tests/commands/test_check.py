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

from toolgrpo.commands import check_lines
from toolgrpo.commands.check import CheckRun, check_arguments, first_commands
from toolgrpo.commands.check_lines import CheckLine, CheckReport, CheckVerdict
from toolgrpo.commands.evaluate import evaluation_arguments
from toolgrpo.commands.main import read
from toolgrpo.commands.run_file import same_command
from toolgrpo.commands.table import flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.draw.play import ToolFault, Tried
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.evaluation.before_training import Untrained
from toolgrpo.rollout import EpisodeLimits, RolloutBatch, Scored
from toolgrpo.rollout.compaction import ContextLimit
from toolgrpo.support.plain_text import duration
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode

ROOT = Path(__file__).parents[2]
GOOD = ["--config", "recipes/configs/nano.yaml", "--engine", "transformers", "--per_device_train_batch_size", "8"]


def run_of(*flags: str) -> tuple[CheckRun, io.StringIO]:
    """A check, and what will stand on the terminal."""
    given = read("check", [*flags])
    return CheckRun(*check_arguments(given), Terminal(None, shown := io.StringIO(), quiet=False)), shown


def look(folder: Path, *flags: str) -> tuple[CheckReport, str]:
    run, shown = run_of(*GOOD, "--output_dir", str(folder), "--questions", "3", "--samples", "2", *flags)
    return run.run(), shown.getvalue()


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
    assert [line.split()[0] for line in shown.splitlines()] == [line.verdict for line in report.lines], (
        "a line is a line"
    )
    as_json = json.loads(report.as_json())
    assert as_json["passed"] and [check["what"] for check in as_json["checks"]] == whats
    assert list(tmp_path.iterdir()) == [], "nothing of it is kept"


DROPS = (
    "from toolgrpo import DropEpisode\ndef reward_func(completions, **_): return [DropEpisode('x')] * len(completions)"
)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("stage", "flags", "text", "said"),
    [
        (
            "data",
            "--per_device_train_batch_size 16 --dataset_id_or_path",
            '{"prompt": "1?", "answer": "2"}',
            "has 1 row",
        ),
        ("reward", "--reward_weights 1 1 1 --reward_fn", "def another(completions): return 0", "reward_func"),
        ("samples", "--reward_weights 1 1 1 --reward_fn", DROPS, "6 of 6 episodes"),
    ],
)
def test_what_goes_wrong_is_a_failure_of_its_line_and_the_end(
    tmp_path: Path, stage: str, flags: str, text: str, said: str
) -> None:
    path = tmp_path / ("mine.jsonl" if stage == "data" else "mine.py")
    path.write_text(f"{text}\n")
    report, shown = look(tmp_path / "out", *flags.split(), str(path))
    line = report.lines[-1]
    assert (report.exit_code, line.what, line.verdict) == (1, stage, CheckVerdict.FAILURE), shown
    assert said in line.said


@pytest.mark.parametrize(
    ("reward", "calls", "verdict", "scores"),
    [
        ("0.5", True, CheckVerdict.WARNING, "score 0.50, nonsense 0.50"),
        ("0.0", False, CheckVerdict.WARNING, "score 0.00, nonsense 0.00"),  # it may want another form
        ("0.0 - ('3' in str(completions))", False, CheckVerdict.FAILURE, "score -1.00, nonsense 0.00"),
        ("0.0 if '3' in str(completions) else None", False, CheckVerdict.WARNING, "score 0.00, nonsense None"),
        (
            "0.0 if 'weather' in str(completions) else None",
            False,
            CheckVerdict.WARNING,
            "nonsense scores 0.00; gold answers score None",
        ),
        ("0.0", True, CheckVerdict.WARNING, "score 0.00, nonsense 0.00"),  # only a call may earn something
        ("gold_calls", True, CheckVerdict.PASS, "score 0.50, nonsense 0.00"),  # the calls of the row are paid
        ("tool_use", True, CheckVerdict.WARNING, "score 0.50, nonsense 0.00"),
    ],
)
def test_a_reward_that_gives_nonsense_more_fails_and_one_that_cannot_tell_warns(
    tmp_path: Path, reward: str, calls: bool, verdict: CheckVerdict, scores: str
) -> None:
    paid = ["--reward", "tool_result", reward, "--reward_weights", "0.5", "0.5"]
    if reward[0] == "0":
        (tmp_path / "mine.py").write_text(f"def reward_func(completions, **_): return [{reward}] * len(completions)\n")
        paid = ["--reward_fn", str(tmp_path / "mine.py")]
    run, _ = run_of("--model=nano", "--dataset_id_or_path=arithmetic", f"--output_dir={tmp_path / 'out'}", *paid)
    called = {"name": "add", "arguments": {"a": 1, "b": 2}}
    run.made_up([{"prompt": "1 + 2?", "answer": "3", "gold_calls": [called]}], run.job.rewards(), calls=calls)
    line = run.report.lines[-1]
    assert line.verdict is verdict and scores in line.said
    assert ("call no tool" in line.do) == ((reward, calls) == ("0.0", True))


@pytest.mark.parametrize(
    ("malformed", "failed", "calls", "warns", "said"),
    [
        ({"invalid_json": 17, "unclosed": 15}, {}, 76, True, "the model does not know the form of calls"),
        ({"invalid_json": 16}, {}, 76, True, "the call holds no valid JSON"),
        ({"invalid_json": 7, "unclosed": 7}, {"bad_arguments": 20}, 76, True, "does not know the form"),
        ({"invalid_json": 9}, {}, 12, True, "9 of them cannot be run"),
        ({"invalid_json": 5, "unclosed": 4}, {}, 18, True, "does not know the form"),
        ({"invalid_json": 10, "unclosed": 10}, {}, 76, False, "20 of them cannot be run"),
        ({}, {"exception": 20}, 76, False, "20 fail"),
    ],
)
def test_calls_that_cannot_be_run_warn_as_the_doctor_does(
    malformed: dict[str, int], failed: dict[str, int], calls: int, warns: bool, said: str
) -> None:
    facts = untrained(calls=calls, malformed=Counter(malformed), failed=Counter(failed))
    report = CheckReport(lambda line: None)
    check_lines.add_calls(report, facts, RolloutBatch(episodes=()), [])
    (line,) = report.lines
    assert line.verdict is (CheckVerdict.WARNING if warns else CheckVerdict.PASS) and said in line.said


def test_a_task_without_a_success_is_named_beside_others_that_have_some() -> None:
    report = CheckReport(lambda line: None)
    for facts in (untrained(), untrained(never={"chains": 8, "sums": 12})):
        check_lines.add_success(report, facts)
    passed, warned = report.lines
    assert passed.verdict is CheckVerdict.PASS and warned.verdict is CheckVerdict.WARNING
    assert "no episode succeeds of task chains (8), sums (12)" in warned.said and "toolgrpo sft" in warned.do


COMMANDS = {"leave it": [], "reinforce": ["train"], "show worked calls": ["sft"]}
CALLS, LIMITS = "fix tools, prompt or limits: hardly", "fix tools, prompt or limits: a limit"
COMMANDS |= {CALLS: ["evaluate", "show"], LIMITS: []}


@pytest.mark.parametrize(
    ("facts", "road", "more"),
    [
        ({"pass_1": 0.97, "mixed": 1}, "leave it", "97 % of the episodes succeed"),
        ({"mixed": 4}, "reinforce", "in 4 of 16 groups some episodes succeed and some fail"),
        ({"mixed": 4, "failed": Counter(bad_arguments=32)}, "reinforce", ""),
        (
            {"mixed": 1, "failed": Counter(bad_arguments=16, raised=15)},
            CALLS,
            "most calls go wrong in one way, bad_arg",
        ),
        ({"mixed": 1, "failed": Counter(bad_arguments=15, raised=17)}, CALLS, "most calls go wrong in one way, raised"),
        ({"mixed": 1, "failed": Counter(bad_arguments=15, raised=15)}, "show worked calls", "in 1 of 16 groups"),
        ({"mixed": 3, "failed": Counter(bad_arguments=15)}, "show worked calls", ""),
        ({"mixed": 0, "malformed": Counter(unclosed=24, unknown_tool=7)}, "show worked calls", ""),
        ({"mixed": 0, "malformed": Counter(unknown_tool=17, unclosed=15)}, CALLS, "unknown_tool"),
        ({"mixed": 0, "calls": 7, "failed": Counter(bad_arguments=7)}, "show worked calls", ""),
        ({"mixed": 0, "callers": 20, "cut": 10}, LIMITS, "ends 10 of the 20 episodes that call a tool"),
        ({"mixed": 0, "callers": 20, "cut": 9}, "show worked calls", ""),
        ({"mixed": 0, "callers": 7, "cut": 7}, "show worked calls", ""),
        ({"mixed": 0, "live": 1.0}, "show worked calls", "where a group fails, all its episodes fail"),
        ({"mixed": 0, "calls": 0, "pass_1": 0.0}, "show worked calls", ""),
    ],
)
def test_the_last_line_says_which_road_fits(facts: dict[str, Any], road: str, more: str) -> None:
    report = CheckReport(lambda line: None)
    check_lines.add_road(
        report, untrained(**facts), "toolgrpo train t", "toolgrpo evaluate e", "toolgrpo sft s", None, 5400.0
    )
    (line,) = report.lines
    own = ["evaluate", "sft"] if road == "show worked calls" and facts["mixed"] else []
    assert line.said.startswith(road) and more in line.said and line.numbers["road"] == road.partition(":")[0]
    assert line.verdict is (CheckVerdict.PASS if road == "reinforce" else CheckVerdict.WARNING)
    assert re.findall(r"toolgrpo (\w+)", f"{line.said} {line.do}") == COMMANDS[road] + own


def test_rows_drawn_from_tools_bring_their_worked_calls() -> None:
    report = CheckReport(lambda line: None)
    facts = untrained(mixed=0, calls=0, pass_1=0.0)
    check_lines.add_road(report, facts, "", "", "toolgrpo sft s", Path("my rows/worked.jsonl"), None)
    assert "toolgrpo sft s --dataset_id_or_path 'my rows/worked.jsonl' (" in report.lines[0].do


def test_the_commands_have_what_was_typed_as_far_as_they_take_it_and_no_secret() -> None:
    kept = ["--model_name_or_path", "my model", "--dataset_id_or_path", "arithmetic", "--bf16", "false"]
    kept += ["--reward", "exact_match", "tool_use", "--context", '{"strategy": "drop_results"}']
    given = read("check", [*kept, "--learning_rate", "0.1", "--samples", "8", "--hub_token", "hf_abcdefghijklmnop"])
    for command, more in (("train", ["--learning_rate", "0.1"]), ("evaluate", [])):
        line = same_command(given, command, flags_of(command), without=["samples"])
        assert shlex.split(line) == ["toolgrpo", command, *kept, *more]
        assert not read(command, [*kept, *more]).complaints


@pytest.mark.parametrize("held_out", ["eval_split: heldout", "eval_share: 0.2", "eval_dataset_id_or_path: chains"])
def test_what_is_drawn_to_learn_from_is_trained_on_and_brings_the_tools(tmp_path: Path, held_out: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{(ROOT / 'recipes/configs/nano.yaml').read_text()}  {held_out}\n")
    typed = ["--seed", "7", "--dataset_split", "easy"]  # the file has a seed too
    given = read("check", ["--config", str(file), *typed])
    train, draw, teach = map(shlex.split, first_commands(given, check_arguments(given)[1]))
    assert train == ["toolgrpo", "train", "--config", str(file), *typed]
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
def test_episodes_that_were_cut_name_the_limit(stops: dict[str, int], cap: int | None, do: str) -> None:
    cut = run_episode(ScriptedEngine([ByteChat.say("1234")]), max_turn_tokens=2)
    ends = [replace(cut, stop_reason=StopReason(reason)) for reason, n in stops.items() for _ in range(n)]
    report = CheckReport(lambda line: None)
    batch = RolloutBatch(episodes=tuple(Scored({"prompt": "q"}, one) for one in ends))
    limits = EpisodeLimits(max_completion_length=64, max_turn_tokens=cap)
    check_lines.add_budget(report, untrained(stops=Counter(stops)), batch, len, limits)
    (line,) = report.lines
    assert line.verdict is (CheckVerdict.WARNING if do else CheckVerdict.PASS) and line.do.endswith(do)


def test_a_budget_of_several_segments_may_be_above_the_window() -> None:
    report = CheckReport(lambda line: None)
    for context in (None, ContextLimit(max_tokens=400)):
        check_lines.add_prompts(report, [135], 1536, EpisodeLimits(max_completion_length=4096, context=context))
    assert [line.verdict for line in report.lines] == [CheckVerdict.WARNING, CheckVerdict.PASS]


def test_a_tool_that_fails_whatever_its_arguments_are_is_a_warning_and_others_are_counted() -> None:
    report = CheckReport(lambda line: None)
    check_lines.add_tried(
        report, Tried([ToolFault("lookup", "hangs", "no answer within 10 s")], {"lookup": 0, "add": 6}, ["lend"])
    )
    warned, passed = report.lines
    assert warned.verdict is CheckVerdict.WARNING and warned.said == "lookup: no answer within 10 s"
    assert passed.verdict is CheckVerdict.PASS and passed.said.startswith("1 of 2 ") and "lookup" in passed.said
    assert passed.said.endswith(": lend") and passed.numbers["not_called"] == ["lend"]


def test_a_time_is_told_in_its_own_unit() -> None:
    told = [duration(seconds) for seconds in (0.04, 9, 89, 95, 5399, 5401)]
    assert told == ["0.0 s", "9.0 s", "89.0 s", "1.6 min", "90.0 min", "1.5 h"]


def untrained(**changes: Any) -> Untrained:
    facts: dict[str, Any] = {name: Counter() for name in ("malformed", "failed", "stops")}
    facts |= {"n": 16, "k": 2, "episodes": 32, "calls": 32, "rewards": (0.0, 1.0)}
    facts |= {"live": 0.5, "mixed": 4, "pass_1": 0.3, "pass_k": 0.5, "copied": 0, "never": {}, "callers": 16, "cut": 0}
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
QWEN2: dict[str, Any] = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
QWEN2 |= {"num_attention_heads": 14, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": QWEN3,
    "Qwen/Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": QWEN2,
}
LOCAL = {"gsm8k": "gsm8k:recipes/data/gsm8k_30.jsonl", "mbpp": "mbpp:recipes/data/mbpp_10.jsonl"}
NAMED = re.compile(r"GPU of (\d+) GB")
PROMISES = [path for path in sorted((ROOT / "recipes" / "configs").rglob("*.yaml")) if NAMED.search(path.read_text())]


def estimated(folder: Path, name: str, gb: str, *flags: str) -> dict[str, CheckLine]:
    """What is said of a model of which there is nothing but the config."""
    sizes = {**SHAPES[name], "vocab_size": 151936, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes))
    given = ["--model_name_or_path", str(folder), "--output_dir", str(folder / "out"), "--card", f"{gb}GB"]
    return {line.what: line for line in run_of(*flags, *given)[0].run().lines}


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
    assert lines["memory"].verdict is lines["cache"].verdict is CheckVerdict.PASS
    assert "float32, 596 M are trained" in lines["model"].said
    assert estimated(tmp_path, "Qwen/Qwen3-1.7B", gb, *flags)["memory"].verdict is CheckVerdict.FAILURE


@pytest.mark.e2e
def test_json_stands_alone_on_standard_output_and_a_failure_is_the_exit_code(tmp_path: Path) -> None:
    flags = ["--tools_script", str(tmp_path / "none.py"), "--json", "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "recipes/check.py", *GOOD, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    last = json.loads(done.stdout)["checks"][-1]
    assert (last["what"], last["verdict"]) == ("tools", "failure") and "none.py" in last["said"]
