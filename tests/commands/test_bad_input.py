"""For each flag the wrong thing was tried; each mistake is one sentence that says what, what was got, and what to do.

The table holds by class of error the flag, what stands behind it, and what the message names; a flag with a list of values, or that is true or
false, needs no row. The wrong files are written by `wrong_files`. What may be wrong inside a file is tried where it is read (tests/data, tests/tools, tests/rewards). Everything is loaded up
to the model, which is never reached here (`test_the_model_flag` does).
"""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from trl import GRPOConfig

from toolgrpo.commands.arguments import ScriptArguments, parse_arguments
from toolgrpo.commands.evaluate import evaluation_arguments
from toolgrpo.commands.given import ALIASES
from toolgrpo.commands.job import HELDOUT_ROWS, TRAINING_ROWS
from toolgrpo.commands.main import mistakes, read
from toolgrpo.commands.table import EvaluationArguments, flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun
from toolgrpo.errors import ConfigError, DataError, ModelError, PluginError, RewardError, ToolGRPOError
from toolgrpo.trainer.config import ToolGRPOConfig

ROW = '{"prompt": "1+1?", "answer": "2"}\n'

FILES: dict[str, str | bytes] = {
    **{f"empty.{kind}": "" for kind in ("jsonl", "json", "yaml")},
    **{f"binary.{kind}": bytes(range(256)) * 64 for kind in ("jsonl", "json", "parquet", "yaml")},
    "long.json": json.dumps({"mcpServers": {"a": {"command": "a" * 10_000_000}}}),
    "syntax.py": "def (\n",
    "beside.py": "x = 1\n",
    "number.py": "reward_func = 3\nTOOL_FUNCTIONS = 3\nThing = 3\n",
    "signature.py": "def reward_func(a, b): return []\n",
    "good.py": "def reward_func(completions, **_): return [0.0] * len(completions)\n",
    "needs_gold.py": "def reward_func(completions, gold): return [0.0] * len(completions)\n",
    "other_name.py": "def score(completions): return [0.0] * len(completions)\n",
    "one.jsonl": ROW,
    "rows.jsonl": ROW * 8,
    "no_prompt.jsonl": ROW.replace("prompt", "question"),
    "no_answer.jsonl": '{"prompt": "1+1?"}\n',
    "tools.jsonl": '{"prompt": "1+1?", "answer": "2", "tools": [{"name": "add"}]}\n',
    "rows.txt": "hello\n",
    "wrong_type.yaml": "training:\n  learning_rate: fast\n",
    "heading.yaml": "modle:\n  a: 1\n",
    "plain": "x",
}

# Flags, and what the message names: `=>` before the words, or every word of the flags themselves. What begins with `!` is
# told before PyTorch is imported too, in the same words.
WRONG: dict[type[ToolGRPOError], str] = {
    ConfigError: """
        --config DIR/none.yaml
        --config DIR/empty.yaml
        --config DIR/binary.yaml
        ! --config DIR/wrong_type.yaml => wrong_type.yaml 2 learning_rate 'fast'
        --config DIR/heading.yaml => heading.yaml 1 'modle' 'model'
        --tools_script '' => --tools_script
        --agent DIR/good.py --max_tool_calls 3 => max_tool_calls agent
        --agent DIR/good.py --tools_script DIR/good.py => --agent --tools_script
        --agent DIR/good.py --agent_host 0.0.0.0 => agent_host '0.0.0.0'
        --agent DIR/good.py --agent_host 203.0.113.1 => agent_host '203.0.113.1'
        --agent_host 10.0.0.1 => --agent_host --agent
        ! --mcp_config DIR/none.json => none.json
        --mcp_config DIR/long.json => long.json 262,144
        --tool_workers 0
        ! --tool-workers=two => tool_workers 'two'
        --tool_timeout 0
        --reward_timeout 0
        ! --reward_fn DIR/good.py DIR/good.py => 'good.reward_func' --reward_weights
        ! --reward accuracy accuracy => 'accuracy' --reward_weights
        ! --reward acuracy => 'acuracy' 'accuracy' by_task
        ! --reward_weights 0.5 0.5 => reward_weights 2 1 accuracy
        --stop_when plateau:0
        --success_threshold high
        --max_rows 0
        --eval_questions -1
        --system_prompt
        --eval_share 0.1 --eval_split test => eval_share eval_split
        ! --eval_share 1
        ! --num_generations 3 => num_generations 3 per_device_train_batch_size 9
        ! --num_generations 1
        ! --reward exact_match --reward accuracy => --reward twice
        --per_device_train_batch_size 0
        --max_completion_length 0
        --max_grpo_completion_length -5 => max_completion_length -5
        --max_turns 0
        --max_user_turns 0
        --max_tool_calls -1
        --max_turn_tokens 0
        --max_tool_response_tokens 0
        --episode_timeout 0
        --max_concurrent_episodes 0
        --temperature -1
        --temperature 0 => temperature 0 evaluation
        --engine transformers --vllm_server_urls http://x => engine 'transformers' vllm_server_urls
        --max_tool_calling_iterations 5 => max_tool_calling_iterations max_turns
        --chat_template_kwargs thinking
        --record_tokens -1
        --credit turns => --credit recipes/stages/turn_credit.py
        --penalty {"turns":2} => --penalty recipes/stages/length_penalty.py
        --max_staleness 1 --vllm_enable_sleep_mode true => max_staleness vllm_enable_sleep_mode
        --max_staleness -1
        --rollout_correction bypass --vllm_importance_sampling_mode token_mask => rollout_correction bypass vllm_importance_sampling_mode
        --correction_band 1.0
        ! --correction_band 3 4
        --max_infrastructure_failures 2
        --max_groups_drawn 0.5
        --context {"max_tokens":0} => max_tokens context 0
        --context {"strategy":"summarize"}
        --max_dropped_share 2
        --engine_timeout 0
        --vllm_kv_cache_gib 0
        --max_tokens_per_pass 0
        --learning_rate fast
        --beta -0.1
        --dtype float12 => dtype 'float12' 'auto' 'bfloat16'
        --lora_r 8 => lora_r --use_peft
        ! --output_dir DIR/plain
        --output_dir DIR/n\0l
        --record_episodes perhaps
        --max_step 3 => --max_step --max_steps
        ! --num_iterations 100 => max_steps 100
        ! --model_init_kwargs {"dtype":"bfloat16"} => model_init_kwargs dtype
        --lr 1e-5 => --lr learning_rate
        --max_steps
        stray""",
    PluginError: """
        ! --tools_script DIR/none.py => none.py
        ! --tools_script DIR/syntax.py => syntax.py 1
        --tools_script DIR/beside.py => TOOL_FUNCTIONS beside.py
        --tool_functions_module no_such_module => 'no_such_module'
        ! --environment DIR/none.py:Thing => none.py
        --environment DIR/number.py => number.py path.py:YourClass
        ! --agent DIR/none.py => none.py
        --agent no-such-agent
        --reward_fn DIR/none.py => none.py
        ! --reward_fn DIR/syntax.py => syntax.py 1
        ! --reward_fn DIR/good.py DIR/none.py => none.py
        --reward_fn DIR/signature.py => signature.py `completions`
        --reward_fn DIR/signature.py --reward_function_name nope => signature.py nope reward_func --reward_function_name
        --reward_fn DIR/other_name.py => other_name.py score --reward_function_name""",
    RewardError: """
        --reward_fn DIR/needs_gold.py => needs_gold.py 'gold'
        ! --dataset_id_or_path DIR/no_answer.jsonl => accuracy 'answer'
        --eval_questions 4 --eval_dataset_id_or_path DIR/no_answer.jsonl => held-out accuracy 'answer'""",
    DataError: """
        ! --dataset_id_or_path DIR/none.jsonl => none.jsonl
        --dataset_id_or_path DIR/folder => folder .jsonl
        --dataset_id_or_path DIR/empty.jsonl => empty.jsonl 0
        --dataset_id_or_path DIR/binary.jsonl => binary.jsonl
        --dataset_id_or_path DIR/binary.parquet => binary.parquet Parquet
        ! --dataset_id_or_path DIR/no_prompt.jsonl => no_prompt.jsonl 1 question answer 'prompt'
        --dataset_id_or_path DIR/tools.jsonl => tools.jsonl 1 'tools' list
        --dataset_id_or_path DIR/rows.txt => rows.txt .jsonl
        --dataset_id_or_path gsm8k:DIR/rows.jsonl => rows.jsonl 1 'question'
        --dataset_id_or_path reasoning_gym:gsm_symbolik => 'gsm_symbolik' gsm_symbolic
        --dataset_id_or_path nope => 'nope'
        --dataset_split nope => 'nope' train heldout
        --eval_questions 4 --eval_dataset_id_or_path DIR/none.jsonl => none.jsonl
        --eval_questions 4 --dataset_id_or_path DIR/rows.jsonl => rows.jsonl --eval_dataset_id_or_path
        --eval_questions 4 --eval_split nope => 'nope' train heldout
        --dataset_id_or_path DIR/one.jsonl --num_generations 4 => one.jsonl 1 2
        --dataset_id_or_path DIR/rows.jsonl --num_generations 2 --per_device_train_batch_size 32 => rows.jsonl 8 16""",
}
WRONG_MODELS: dict[type[ToolGRPOError], str] = {
    ConfigError: """
        --model_name_or_path '' => --model_name_or_path""",
    PluginError: """
        --stage_fn DIR/none.py => none.py
        --stage_fn DIR/good.py => good.py `stage`""",
    ModelError: """
        --model DIR/plain
        --model_name_or_path outputs/not_made_yet => outputs/not_made_yet working
        --model_name_or_path tests/not_made_yet => tests/not_made_yet working
        --model_name_or_path DIR/folder => folder config.json
        --model_name_or_path DIR/broken_model => broken_model config.json""",
}
WRONG_EVALUATIONS: dict[type[ToolGRPOError], str] = {
    ConfigError: """
        --samples 0
        --samples many
        --samples 4 --ks 8
        --baseline '' => --baseline
        --fail_if worse => fail_if --baseline
        --fail_if better --baseline nano => fail_if 'better' 'worse'
        --base_url http://localhost:1/v1 => base_url chat_api
        --report DIR/folder
        --report DIR/plain/in/a/file.json"""
}


class Row(NamedTuple):
    flags: str
    error: type[ToolGRPOError]
    names: list[str]
    is_early: bool = False


def rows(wrong: dict[type[ToolGRPOError], str]) -> list[Row]:
    found = []
    for error, text in wrong.items():
        for line in map(str.strip, text.strip().splitlines()):
            flags, _, names = line.removeprefix("! ").partition(" => ")
            words = (names or flags.replace("DIR/", "").replace("--", "")).split()
            found.append(Row(flags, error, words, line.startswith("! ")))
    return found


def tried(found: list[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", found, ids=[row.flags.replace("DIR/", "") for row in found])


# Every flag of ours that has a list of values, or is true or false, with a word that is none of them.
FLAGS = [flag for flag in flags_of("train").values() if flag.ours]
CHOSEN = {flag.name: [repr(choice) for choice in flag.choices] for flag in FLAGS if flag.choices}
CHOSEN |= {flag.name: ["true", "false"] for flag in FLAGS if bool in flag.members}
NONSENSE = [Row(f"--{name} nonsense", ConfigError, [name, "'nonsense'", *words]) for name, words in CHOSEN.items()]


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder").mkdir()
    (folder / "broken_model").mkdir()
    (folder / "broken_model" / "config.json").write_text("{")
    return folder


def arguments(text: str, folder: Path) -> list[str]:
    given = ["" if part == "''" else part.replace("DIR", str(folder)) for part in text.split()]
    defaults = {
        **{"--model_name_or_path": "nano", "--dataset_id_or_path": "arithmetic", "--reward": "accuracy"},
        **{"--output_dir": str(folder / "out"), "--per_device_train_batch_size": "8", "--use_cpu": "true"},
    }
    if "--model" in given:
        del defaults["--model_name_or_path"]
    return [*given, *(part for flag, value in defaults.items() if flag not in given for part in (flag, value))]


def load(text: str, folder: Path) -> TrainingRun:
    """Everything before the model."""
    script, config, model = parse_arguments(arguments(text, folder))
    run = TrainingRun(script, config, model, Terminal(None, io.StringIO(), quiet=False))
    rows = run.job.training_rows()
    heldout = run.job.heldout_rows()
    tools = run.job.toolbox()
    try:
        if (player := run.job.player()) is not None:
            player.close()
        rewards = run.job.rewards()
        for some, name in ((rows, TRAINING_ROWS), (heldout, HELDOUT_ROWS)):
            if some is not None:
                run.job.rows_to_score(some, tools, rewards, name)
    finally:
        if tools is not None:
            tools.close()
    return run


def early(argv: list[str], command: str = "train") -> str | None:
    """Return what is said of a command line before the imports."""
    try:
        errors = mistakes(read(command, argv))
    except ToolGRPOError as error:  # the file cannot be read
        errors = [error]
    return f"{type(errors[0]).__name__}: " + "\n".join(map(str, errors)) if errors else None


def assert_named(caught: pytest.ExceptionInfo[ToolGRPOError], names: list[str]) -> None:
    message = str(caught.value)
    assert [name for name in names if name not in message] == [], message
    assert len(message) < 2000, "10 MB of somebody's file are no message"


@tried([*rows(WRONG), *NONSENSE])
def test_a_mistake_is_one_clear_error(wrong_files: Path, row: Row) -> None:
    with pytest.raises(row.error) as caught:
        load(row.flags, wrong_files)
    assert_named(caught, row.names)
    if row.is_early:
        assert early(arguments(row.flags, wrong_files)) == f"{type(caught.value).__name__}: {caught.value}"


@tried(rows(WRONG_MODELS))
def test_the_model_flag(wrong_files: Path, row: Row) -> None:
    with pytest.raises(row.error) as caught:
        run = load(row.flags, wrong_files)
        run.job.trainer(reward_funcs=run.job.rewards(), train_dataset=run.job.training_rows())
    assert_named(caught, row.names)


LOOKS_WRONG = """
    --dataset_id_or_path DIR/one.jsonl
    --dataset_id_or_path DIR/rows.jsonl --num_generations 32 --per_device_train_batch_size 32
    --dataset_id_or_path DIR/no_answer.jsonl --reward tool_use
    --max_rows 1
    --num_iterations 8"""


def test_what_only_looks_wrong_is_taken(wrong_files: Path) -> None:
    """One row where a group takes the whole batch, a group larger than the data, a reward that needs no answer."""
    for flags in LOOKS_WRONG.strip().splitlines():
        load(flags, wrong_files)


@tried(rows(WRONG_EVALUATIONS))
def test_the_flags_of_the_evaluation(wrong_files: Path, row: Row) -> None:
    words = arguments(row.flags, wrong_files)
    of_training = words.index("--per_device_train_batch_size")
    del words[of_training : of_training + 2]
    with pytest.raises(row.error) as caught:
        evaluation_arguments(read("evaluate", words))
    assert_named(caught, row.names)


def test_no_flag_of_ours_was_left_out() -> None:
    trls = {field.name for field in dataclasses.fields(GRPOConfig)}
    ours = {field.name for kind in (ScriptArguments, EvaluationArguments) for field in dataclasses.fields(kind)}
    ours |= {field.name for field in dataclasses.fields(ToolGRPOConfig)} - trls
    found = [*rows(WRONG), *NONSENSE, *rows(WRONG_MODELS), *rows(WRONG_EVALUATIONS)]
    given = {word[2:].partition("=")[0] for row in found for word in row.flags.split() if word.startswith("--")}
    assert (ours | {"config", "model_name_or_path", "output_dir", *ALIASES}) - given == set()
