"""`toolgrpo show` and `toolgrpo replay`, over a recording that holds every kind of trouble."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolgrpo.build import load_tokenizer
from toolgrpo.commands.main import main, read
from toolgrpo.commands.replay import ReplayRun, replay_arguments
from toolgrpo.commands.run_file import keep_run_config, run_text
from toolgrpo.commands.show import run_show
from toolgrpo.commands.terminal import Terminal
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.errors import ConfigError
from toolgrpo.models import NANO
from toolgrpo.observe.console import SteadyConsole
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.sft.encoder import read_conversations
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]not markup[/red]\u202e"
TOOLS = "tools_funcs/arithmetic_tools.py"
EVALUATE = "evaluate --model nano --dataset_id_or_path arithmetic"


def episode(*turns: str, answers: Sequence[ToolResult | str] = ()) -> Trajectory:
    left = list(answers)
    tools = ScriptedTools({name: lambda **_: left.pop(0) for name in ("add", "divide")})
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns])
    return run_episode(engine, tools, max_turns=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two groups of two episodes; the first called arithmetic_tools, and would get the same again."""
    place: Path = tmp_path_factory.mktemp("run")
    slow = ToolResult("Error: divide: gave up", "divide", ToolErrorKind.TIMEOUT)
    trajectories = [
        episode('call add {"a": 1, "b": 2}', "It is 3.", answers=["3"]),
        episode('call divide {"a": 1, "b": 0}', "No idea.", answers=[slow]),
        episode("call add {", HOSTILE),
        episode(HOSTILE),
    ]
    rows = [{"prompt": f"question {n // 2}{HOSTILE}", "answer": "3"} for n in range(4)]
    grades = [Grade({"accuracy": total}, total) for total in (1.0, 0.0, 0.5, -1.0)]
    recorder = EpisodeRecorder(place / "episodes.jsonl")
    for step in (0, 1):
        batch = RolloutBatch(episodes=tuple(map(Scored, rows, trajectories)), step=step, group_size=2)
        recorder.batch_done(batch.numbered(4 * step).graded(grades, lambda one: one.total == 1.0))
    recorder.close()
    tokens = ({"id": n, "text": chr(n) if n < 256 else "|"} for n in range(258))
    (place / "vocabulary.jsonl").write_text("".join(json.dumps(token) + "\n" for token in tokens))
    given = ["--tools_script", TOOLS, "--reward", "accuracy", "--dataset_id_or_path", "arithmetic"]
    given += ["--model_name_or_path", "nano", "--output_dir", str(place)]
    keep_run_config(run_text(read("train", given)), place)
    return place


def show(*arguments: object, width: int = 140) -> str:
    console = SteadyConsole(file=(shown := io.StringIO()), width=width, force_terminal=False)
    run_show(read("show", [*map(str, arguments)]), console)
    return shown.getvalue()


def test_the_groups_of_the_last_step_of_all_processes(folder: Path, tmp_path: Path) -> None:
    shown = show(folder)
    assert "step 2: 2 groups, 4 episodes" in shown and "steps 1 to 2" in shown and " \n" not in shown
    worst, best = (line for line in shown.splitlines() if "question" in line)
    assert all(text in worst for text in ("question 1", "-1 to 0.5", "0/2", "6-7"))
    assert all(text in best for text in ("question 0", "0 to 1", "1/2"))
    assert "step 1: 2 groups" in show(folder, "--step", 1)
    for name in ("episodes", "episodes.rank1"):
        shutil.copy(folder / "episodes.jsonl", tmp_path / f"{name}.jsonl")
    assert "step 2: 2 groups, 8 episodes" in show(tmp_path)


def test_an_evaluation_comes_after_a_step_and_a_narrow_table_cuts_prompts_alone(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    of_eval = {**json.loads(lines[-1]), "step": 2, "mode": "eval", "episode": 99}
    (tmp_path / "episodes.jsonl").write_text("\n".join([*lines, json.dumps(of_eval)]) + "\n")
    assert "step 2: 2 groups, 4 episodes" in show(tmp_path) and "steps 1 to 2" in show(tmp_path)
    assert "episode 99, evaluation after step 2" in show(tmp_path, 99)
    (tmp_path / "episodes.jsonl").write_text(json.dumps({**of_eval, "step": 0}) + "\n")
    assert "evaluation: 1 group, 1 episode\n" in show(tmp_path) and "steps" not in show(tmp_path)  # without a training
    (tmp_path / "episodes.jsonl").write_text("\n".join([*lines, json.dumps(of_eval)]) + "\n")
    narrow = show(tmp_path, width=80).splitlines()
    titles = next(line for line in narrow if "reward" in line)
    assert titles.split() == ["group", "episodes", "reward", "success", "turns", "calls", "failed", "ends", "prompt"]
    assert max(map(len, narrow[:-1])) <= 80


def test_an_episode_as_a_conversation(folder: Path) -> None:
    shown = show(folder, 5)
    for text in (
        *("episode 5, step 2, group 4, reward 0, no success, ended: finished", "user: question 0"),
        *("calls: divide(a=1, b=0)", "timeout: Error: divide: gave up", "says: No idea.", "accuracy 0  together 0"),
        'row: {"answer": "3"}',
    ):
        assert text in shown, text


def test_why_an_episode_was_dropped(folder: Path, tmp_path: Path) -> None:
    record = json.loads((folder / "episodes.jsonl").read_text().splitlines()[0])
    record |= {"reward_given": None, "drop": {"cause": "agent", "reason": "the agent failed: NotFoundError"}}
    (tmp_path / "episodes.jsonl").write_text(json.dumps(record) + "\n")
    for cause in ("dropped", "agent"):
        assert "\ndropped (agent): the agent failed: NotFoundError\n" in show(tmp_path, "--cause", cause)


def test_what_an_environment_said_first_stands_behind_the_prompt() -> None:
    from toolgrpo.observe.episode_view import conversation_lines

    tools = ScriptedTools({}, observation=lambda row: " (seen)")
    played = run_episode(ScriptedEngine([ByteChat.say("3")]), tools, question="How many?")
    prompt = [{"role": "user", "content": "How many?"}]
    record = {**played.to_record(), "episode": 1, "step": 0, "group": 0, "prompt": prompt, "reward_given": 1.0}
    assert "user: How many? (seen)" in "\n".join(line.plain for line in conversation_lines(record))


def test_where_a_segment_begins() -> None:
    from toolgrpo.observe.episode_view import conversation, tokens

    ledger = Ledger([1])
    ledger.sampled([2, 3], [-0.1, -0.1])
    ledger.turn(Turn(0, 2, "so far", None))
    ledger.rewrite([1, 5, 6])
    ledger.sampled([4], [-0.1])
    ledger.turn(Turn(5, 6, "last", None))
    record = {**ledger.finish(StopReason.FINISHED).to_record(), "episode": 1, "step": 0, "group": 0, "prompt": []}
    record["reward_given"] = 1.0
    console = Console(file=(shown := io.StringIO()), width=140)
    console.print(conversation(record), tokens(record, {}))
    said, of_tokens = shown.getvalue().split("probability of a sampled token")
    begins = "segment 2 begins, with a history of 3 tokens"
    assert said.index("so far") < said.index(begins) < said.index("last")
    assert of_tokens.index("[3]") < of_tokens.index(begins) < of_tokens.index("[5]")


BAD = {
    "--cause tiemout": r"'tiemout'.*invalid_json",
    "99": "there is no episode 99 .* the last one is 7",
    "--step 9": "is of step 9; there are steps 1 to 2",
    "--worst 1 --best 1": "exclude each other",
    "--worst 0": "worst must be at least 1, got 0",
    "seven": r"EPISODE.*'seven'.*DIR",
    "--as_examples x.jsonl": "--successes",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence(folder: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=BAD[words]):
        show(folder, *words.split())


def test_successes_become_examples_once_each_and_are_not_lost(folder: Path, tmp_path: Path) -> None:
    examples, page = tmp_path / "rows.jsonl", tmp_path / "new" / "page.html"
    assert "2 episodes" in show(folder, "--successes", "--worst", 9)
    for _ in range(2):
        shown = show(folder, "--successes", "--as_examples", examples)
        assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "1 of 8 episodes (6 without success; 1 that repeat an earlier one)" in shown.replace("\n", " ")
    with pytest.raises(ConfigError, match=r"no episode|none of them"):
        show(folder, "--successes", "--as_examples", examples, "--step", 99)
    (row,) = read_conversations(examples)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    call = row["messages"][1]["tool_calls"][0]["function"]
    assert call["name"] == "add" and call["arguments"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("command", ["report {} --out", "show {} --successes --as_examples", f"{EVALUATE} --report"])
def test_nothing_is_written_over_what_is_something_else(
    folder: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, place := tmp_path / "run")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    words = command.format(place).split()
    for name in (*before, "..", "episodes.jsonl/x", "n\0l", "x" * 300, "x" * 252):
        assert main([*words, str(place / name)]) != 0, name
        said = capsys.readouterr().err
        assert "cannot be written to" in said and f"give another place with {words[-1]}" in said, said
        assert "Traceback" not in said
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_a_worked_question_of_a_prompt_is_not_learnt_again(folder: Path, tmp_path: Path) -> None:
    worked = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    changed = [{**line, "prompt": [*worked, *line["prompt"]]} for line in lines]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    show(tmp_path, "--successes", "--as_examples", tmp_path / "rows.jsonl")
    (row,) = read_conversations(tmp_path / "rows.jsonl")
    assert row["n_prompt"] == 3 and row["messages"][1]["content"] == "4"


def test_examples_whose_episodes_had_tools_of_their_own_are_taken_from_the_run(folder: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    changed = [{**line, "row": {**line.get("row", {}), "tools": ["add"]}} for line in lines]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    shown = show(tmp_path, "--successes", "--as_examples", tmp_path / "rows.jsonl").replace("\n", " ")
    assert "had their own tools" in shown and f"--from_run {tmp_path} --output_dir" in shown


def test_a_folder_whose_name_is_no_text_has_a_report(folder: Path, tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))
    shutil.copytree(folder, place)
    assert main(["report", str(place)]) == 0
    assert "<title>run\\udcff · toolgrpo report</title>" in (place / "report.html").read_text()


def replaying(folder: Path, *arguments: str) -> tuple[ReplayRun, io.StringIO]:
    parsed = replay_arguments(read("replay", [str(folder), *arguments]))
    return ReplayRun(*parsed, Terminal(None, shown := io.StringIO(), quiet=False)), shown


def replay(folder: Path, *arguments: str) -> tuple[bool, str]:
    run, shown = replaying(folder, *arguments)
    return run.run(), shown.getvalue()


def test_calls_and_rewards_are_the_same_again_or_shown_then_and_now(folder: Path) -> None:
    differs, shown = replay(folder, "4")
    assert not differs, shown
    assert "same     turn 1: add(a=1, b=2) -> 3" in shown and "same     reward accuracy 1" in shown
    assert "differs  reward together 1, now 0.5" in replay(folder, "4", "--reward_weights", "0.5")[1]
    differs, shown = replay(folder, "5")
    assert differs and "differs  turn 1: divide(a=1, b=0)" in shown
    assert "then  [timeout] Error: divide: gave up" in shown and "now   [raised] Error: divide" in shown
    differs, shown = replay(folder, "6")
    assert differs and "same     turn 1: call add { -> [invalid_json]" in shown
    assert "differs  reward accuracy 0.5, now 0.1" in shown


def test_every_episode_under_another_reward(folder: Path, tmp_path: Path) -> None:
    """The rewards that are given stand in place of the run's; each batch is asked as in the run."""
    reward = tmp_path / "turns.py"
    reward.write_text("def reward_func(completions, **_): return [1.0 * (len(one) > 1) for one in completions]\n")
    differs, shown = replay(folder, "--all", "--reward_fn", str(reward))
    assert differs and "6 of 8 episodes get another reward" in shown, shown
    assert "mean reward 0.125, now 0.750; successes 2, now 6" in shown
    table = shown.partition("reward then")[2]
    assert table.index(" -1 ") < table.index(" 0.5 "), "the largest difference comes first"
    with pytest.raises(ConfigError, match="reward_weights has 2 numbers for 1 reward"):
        replay(folder, "--all", "--reward_fn", str(reward), "--reward_weights", "1", "1")


def test_to_show_and_to_replay_without_a_model_needs_no_torch(folder: Path) -> None:
    code = """
import sys
from toolgrpo.commands.main import main
calls = (["show"], ["show", "4"], ["replay", "4"], ["replay", "--all"])
codes = [main([words[0], sys.argv[1], *words[1:]]) for words in calls]
sys.exit(2 in codes or bool({"torch", "transformers", "datasets"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], timeout=200, capture_output=True)
    assert done.returncode == 0 and b"loading" not in done.stdout, done.stdout + done.stderr


@pytest.mark.e2e
def test_a_whole_episode_is_rendered_with_the_arguments_that_the_run_gave_its_template(folder: Path) -> None:
    flags = ("--with_model", "nano", "--engine", "transformers", "--use_cpu", "true", "--max_completion_length", "2")
    run, _ = replaying(folder, "4", *flags, "--chat_template_kwargs", '{"enable_thinking": false}')
    now = run.sampled_again("nano", None)
    assert load_tokenizer(str(NANO)).decode(now.prompt_ids).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"reward_fn": ["{}/own.py"]}, "--all"),
        ({"reward_fn": ["{}/sub/../own.py"]}, "4"),
        ({"tools_script": "{}/own.py"}, "4"),
        ({"environment": "{}/own.py:Game"}, "4"),
        ({"mcp_config": "{}/mcp.json"}, "4"),
        ({"agent": "python --file={}/own.py"}, "4 --with_model nano"),
        ({"trust_remote_code": True}, "4 --with_model {}"),
    ],
)
def test_files_of_a_recording_need_a_flag(folder: Path, tmp_path: Path, given: dict[str, Any], typed: str) -> None:
    """Whoever made the recording wrote them; what the user's own flags name is run without it."""
    shutil.copy(folder / "episodes.jsonl", tmp_path)
    (tmp_path / "sub").mkdir()
    runs = "open(__file__ + '.ran', 'w')\ndef reward_func(completions, **_): return [1.0] * len(completions)\n"
    (tmp_path / "own.py").write_text(runs)
    (tmp_path / "mcp.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(json.dumps(given).replace("{}", str(tmp_path)))
    words = typed.format(tmp_path).split()
    with pytest.raises(ConfigError, match="--run_its_files"):
        replay(tmp_path, *words)
    assert not (tmp_path / "own.py.ran").exists()
    assert replay_arguments(read("replay", [str(tmp_path), *words, "--run_its_files"]))
    if "reward_fn" in given:
        named = f"runs      {given['reward_fn'][0].format(tmp_path)} (reward_fn)\n"
        assert named in replay(tmp_path, *words, "--run_its_files")[1]
        assert "own.py (reward_fn)\n" in replay(tmp_path, *words, "--reward_fn", str(tmp_path / "own.py"))[1]
        assert (tmp_path / "own.py.ran").exists()


def test_a_full_disk_is_no_recording_that_cannot_be_read(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "toolgrpo", "show", str(folder)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "recording" not in done.stderr
