"""For each flag the wrong thing was tried; each mistake is one sentence that says what, what was got, and what to do.

The table holds the flag, what stands behind it, and what the sentence says; a flag with a list of values, or that is true or
false, needs no row. The wrong files are written by `wrong_files`. What may be wrong inside a file is tried where it is read (tests/data, tests/tools, tests/rewards). Everything is loaded up
to the model, which is never reached here (`test_the_model_flag` does).
"""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from trl import GRPOConfig

from toolgrpo.commands.arguments import ScriptArguments, parse_arguments
from toolgrpo.commands.evaluate import evaluation_arguments
from toolgrpo.commands.given import ALIASES
from toolgrpo.commands.job import HELDOUT_ROWS, TRAINING_ROWS
from toolgrpo.commands.main import read
from toolgrpo.commands.table import EvaluationArguments, flags_of
from toolgrpo.commands.terminal import Terminal
from toolgrpo.commands.train import TrainingRun
from toolgrpo.errors import ToolGRPOError
from toolgrpo.trainer.config import ToolGRPOConfig

TEN_MB = "a" * 10_000_000
ROW = json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n"
BINARY = bytes(range(256)) * 64

FILES: dict[str, str | bytes] = {
    **{f"empty.{kind}": "" for kind in ("jsonl", "json", "yaml")},
    **{f"binary.{kind}": BINARY for kind in ("jsonl", "json", "parquet", "yaml")},
    "long.json": json.dumps({"mcpServers": {"a": {"command": TEN_MB}}}),
    "long.jsonl": json.dumps({"prompt": TEN_MB, "answer": "1"}) + "\n",
    "syntax.py": "def (\n",
    "beside.py": "x = 1\n",
    "number.py": "reward_func = 3\nTOOL_FUNCTIONS = 3\nThing = 3\n",
    "signature.py": "def reward_func(a, b): return []\n",
    "good.py": "def reward_func(completions, **_): return [0.0] * len(completions)\n",
    "needs_gold.py": "def reward_func(completions, gold): return [0.0] * len(completions)\n",
    "other_name.py": "def score(completions): return [0.0] * len(completions)\n",
    "one.jsonl": ROW,
    "rows.jsonl": ROW * 8,
    "no_prompt.jsonl": json.dumps({"question": "1+1?", "answer": "2"}) + "\n",
    "no_answer.jsonl": json.dumps({"prompt": "1+1?"}) + "\n",
    "user_turns.jsonl": json.dumps({"prompt": "1+1?", "answer": "2", "user_turns": [{"role": "user"}]}) + "\n",
    "tools.jsonl": json.dumps({"prompt": "1+1?", "answer": "2", "tools": [{"name": "add"}]}) + "\n",
    "rows.txt": "hello\n",
    "wrong_type.yaml": "training:\n  learning_rate: fast\n",
    "brackets.json": "[" * 100_000,
    "heading.yaml": "modle:\n  a: 1\n",
    "plain": "x",
}

NO_TOOLS = "No TOOL_FUNCTIONS found in"


TABLE: list[tuple[str, str]] = [
    # the config file
    ("--config DIR/none.yaml", "there is no such file"),
    ("--config DIR/empty.yaml", "is empty; it should hold lines such as"),
    ("--config DIR/binary.yaml", "is not text"),
    ("--config DIR/wrong_type.yaml", "learning_rate must be a number, got 'fast'"),
    ("--config DIR/heading.yaml", "the nearest is 'model'"),
    # tools
    ("--tools_script DIR/none.py", "No such file"),
    ("--tools_script DIR/syntax.py", "line 1"),
    ("--tools_script DIR/beside.py", NO_TOOLS),
    ("--tools_script ''", "--tools_script is given without a value"),
    ("--tool_functions_module no_such_module", "No module named 'no_such_module'"),
    ("--environment DIR/none.py:Thing", "No such file"),
    ("--environment DIR/number.py", "or name the class: path.py:YourClass"),
    ("--agent DIR/none.py", "No such file"),
    ("--agent no-such-agent", "there is no such command"),
    ("--agent DIR/good.py --max_tool_calls 3", "max_tool_calls bounds our own loop"),
    ("--agent DIR/good.py --tools_script DIR/good.py", "exclude each other"),
    ("--agent DIR/good.py --agent_host 0.0.0.0", "stands for all addresses"),
    ("--agent DIR/good.py --agent_host 203.0.113.1", "is no address of this machine: Cannot assign"),
    ("--agent_host 10.0.0.1", "there is none; give --agent too"),
    ("--mcp_config DIR/none.json", "No such file"),
    ("--mcp_config DIR/long.json", "has more than 262,144 bytes"),
    ("--tool_workers 0", "tool_workers must be at least 1, got 0"),
    ("--tool_timeout 0", "tool_timeout must be a positive number of seconds"),
    ("--reward_timeout 0", "reward_timeout must be a positive number of seconds"),
    # rewards
    ("--reward_fn DIR/none.py", "No such file"),
    ("--reward_fn DIR/syntax.py", "line 1"),
    ("--reward_fn DIR/signature.py", "it must take `completions` by name"),
    ("--reward_fn DIR/needs_gold.py", "asks for 'gold', which the data does not have"),
    ("--reward_fn DIR/signature.py --reward_function_name nope", "has no nope"),
    ("--reward_fn DIR/good.py DIR/good.py", "two rewards have the name 'good.reward_func'"),
    ("--reward_fn DIR/other_name.py", "It has score; choose one with --reward_function_name"),
    ("--reward accuracy accuracy", "two rewards have the name 'accuracy'"),
    ("--reward acuracy", "there is no built-in reward 'acuracy'"),
    ("--reward_weights 0.5 0.5", "reward_weights has 2 numbers for 1 reward (accuracy)"),
    ("--stop_when plateau:0", "stop_when must be solved, or plateau:K"),
    ("--success_threshold high", "must be a number, got 'high'"),
    # data
    ("--dataset_id_or_path DIR/none.jsonl", "does not exist"),
    ("--dataset_id_or_path DIR/folder", "holds no data files"),
    ("--dataset_id_or_path DIR/empty.jsonl", "is empty (0 bytes)"),
    ("--dataset_id_or_path DIR/binary.jsonl", "is a binary file, not text"),
    ("--dataset_id_or_path DIR/binary.parquet", "is not a Parquet file"),
    ("--dataset_id_or_path DIR/long.jsonl", "line 1: the line has 10,000,030 bytes"),
    ("--dataset_id_or_path DIR/brackets.json", "is not valid JSON: nested too deeply"),
    ("--dataset_id_or_path DIR/no_prompt.jsonl", "its columns are question, answer. If no row has one, rename"),
    ("--dataset_id_or_path DIR/no_answer.jsonl", "asks for 'answer', which the data does not have"),
    ("--dataset_id_or_path DIR/user_turns.jsonl", "entry 1 of the column 'user_turns' must be text, not dict"),
    ("--dataset_id_or_path DIR/tools.jsonl", "the column 'tools' must be a list of names of loaded tools"),
    ("--dataset_id_or_path DIR/rows.txt", "files of this kind are not read"),
    ("--dataset_id_or_path gsm8k:DIR/rows.jsonl", "it has no text in 'question'"),
    ("--dataset_id_or_path reasoning_gym:gsm_symbolik", "the nearest are gsm_symbolic"),
    ("--dataset_id_or_path nope", "there is no data named 'nope'"),
    ("--dataset_split nope", "the arithmetic tasks have the splits train and heldout"),
    ("--max_rows 0", "max_rows must be at least 1, got 0"),
    ("--eval_questions -1", "eval_questions must be at least 0, got -1"),
    ("--eval_questions 4 --eval_dataset_id_or_path DIR/none.jsonl", "does not exist"),
    (
        "--eval_questions 4 --eval_dataset_id_or_path DIR/no_answer.jsonl",
        "the held-out rows: reward accuracy (built in) asks for 'answer'",
    ),
    ("--system_prompt", "--system_prompt needs a value after it"),
    ("--eval_questions 4 --dataset_id_or_path DIR/rows.jsonl", "give another file (--eval_dataset_id_or_path FILE)"),
    ("--eval_share 0.1 --eval_split test", "eval_share takes held-out rows from the training data"),
    ("--eval_share 1", "eval_share must be a share of the rows, at least 0 and below 1; got 1.0"),
    ("--eval_questions 4 --eval_split nope", "the splits train and heldout, got 'nope'"),
    # groups and batches
    (
        "--dataset_id_or_path DIR/one.jsonl --num_generations 4",
        "has 1 row, but one step takes 2 different prompts",
    ),
    (
        "--dataset_id_or_path DIR/rows.jsonl --num_generations 2 --per_device_train_batch_size 32",
        "has 8 rows, but one step takes 16 different prompts",
    ),
    ("--num_generations 3", "must be divisible by num_generations (3); try per_device_train_batch_size 9"),
    ("--num_generations 1", "num_generations must be at least 2"),
    ("--per_device_train_batch_size 0", "per_device_train_batch_size must be at least 1, got 0"),
    # episodes, engine, training
    ("--max_completion_length 0", "max_completion_length must be at least 1, got 0"),
    ("--max_grpo_completion_length -5", "max_completion_length must be at least 1, got -5"),
    ("--max_turns 0", "max_turns must be at least 1, got 0"),
    ("--max_user_turns 0", "max_user_turns must be at least 1, got 0"),
    ("--max_tool_calls -1", "max_tool_calls must be at least 0, got -1"),
    ("--max_turn_tokens 0", "max_turn_tokens must be at least 1, got 0"),
    ("--max_tool_response_tokens 0", "max_tool_response_tokens must be at least 1, got 0"),
    ("--episode_timeout 0", "episode_timeout must be a positive number of seconds"),
    ("--max_concurrent_episodes 0", "max_concurrent_episodes must be at least 1, got 0"),
    ("--temperature -1", "temperature must be at least 0, got -1.0"),
    ("--temperature 0", "temperature must be above 0 in training"),
    ("--engine transformers --vllm_server_urls http://x", "vllm_server_urls is given, but engine is 'transformers'"),
    ("--max_tool_calling_iterations 5", "has no effect here; use max_turns"),
    ("--chat_template_kwargs thinking", "must be a dictionary (on the command line in JSON), got 'thinking'"),
    ("--record_tokens -1", "record_tokens must be a number of episodes, 0 or more, got -1"),
    # stages, and tokens of another policy
    ("--credit turns", "unknown flag --credit; write stage_fn: recipes/stages/turn_credit.py"),
    ('--penalty {"turns":2}', "unknown flag --penalty; write stage_fn: recipes/stages/length_penalty.py"),
    ("--max_staleness 1 --vllm_enable_sleep_mode true", "vllm_enable_sleep_mode gives the engine's memory"),
    ("--max_staleness -1", "max_staleness must be at least 0, got -1"),
    (
        "--rollout_correction bypass --vllm_importance_sampling_mode token_mask",
        "vllm_importance_sampling_mode belongs to TRL's own correction, but rollout_correction is bypass",
    ),
    ("--correction_band 1.0", "correction_band must be two numbers around 1"),
    ("--max_infrastructure_failures 2", "max_infrastructure_failures must be"),
    # what a step teaches
    ("--max_groups_drawn 0.5", "max_groups_drawn must be at least 1 times the groups of a step, got 0.5"),
    ('--context {"max_tokens":0}', "max_tokens of context must be a whole number of at least 1, got 0"),
    ('--context {"strategy":"summarize"}', "context needs max_tokens, and knows max_tokens, keep_last_turns, strategy"),
    ("--max_dropped_share 2", "max_dropped_share must be between 0 and 1, got 2"),
    ("--engine_timeout 0", "engine_timeout must be a positive number of seconds, got 0"),
    ("--vllm_kv_cache_gib 0", "vllm_kv_cache_gib must be at least 1, got 0"),
    ("--max_tokens_per_pass 0", "max_tokens_per_pass must be a positive number"),
    ("--learning_rate fast", "--learning_rate must be a number, got 'fast'"),
    ("--beta -0.1", "beta must be at least 0, got -0.1"),
    ("--dtype float12", "must be one of 'auto', 'bfloat16'"),
    ("--lora_r 8", "lora_r is given, but not use_peft"),
    ("--output_dir DIR/plain", "cannot be a folder to write to"),
    ("--output_dir DIR/n\0l", "cannot be a folder to write to: embedded null byte"),
    ("--record_episodes perhaps", "must be true or false"),
    ("--max_step 3", "the nearest known flag is --max_steps"),
    ("--max_steps", "--max_steps needs a value after it"),
    ("stray", "'stray' belongs to no flag"),
]

# Every flag of ours that has a list of values, or is true or false, with a word that is none of them.
FLAGS = [flag for flag in flags_of("train").values() if flag.ours]
TABLE += [
    (f"--{flag.name} nonsense", f"must be one of {', '.join(map(repr, flag.choices))}; got 'nonsense'")
    for flag in FLAGS
    if flag.choices
]
TABLE += [(f"--{flag.name} nonsense", "or false, got 'nonsense'") for flag in FLAGS if bool in flag.members]

MODELS: list[tuple[str, str]] = [
    ("--model DIR/plain", "is a file; give the folder"),
    ("--stage_fn DIR/none.py", "No such file"),
    ("--stage_fn DIR/good.py", "needs a function `stage` or a list of them"),
    ("--model_name_or_path ''", "--model_name_or_path is missing"),
    ("--model_name_or_path ./no_such_model", "there is no such folder"),
    ("--model_name_or_path outputs/not_made_yet", "there is no such folder (the working folder is"),
    ("--model_name_or_path tests/not_made_yet", "there is no folder tests/not_made_yet (the working folder is"),
    ("--model_name_or_path DIR/folder", "is a folder without config.json"),
    ("--model_name_or_path DIR/plain", "is a file; give the folder"),
    ("--model_name_or_path DIR/broken_model", "no tokenizer could be loaded from"),
]


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


@pytest.mark.parametrize(("flags", "says"), TABLE, ids=[flags.replace("DIR/", "") for flags, _ in TABLE])
def test_a_mistake_is_one_clear_error(wrong_files: Path, flags: str, says: str) -> None:
    with pytest.raises(ToolGRPOError) as caught:
        load(flags, wrong_files)
    message = str(caught.value)
    assert says in message
    assert len(message) < 2000, "10 MB of somebody's file are no message"


@pytest.mark.parametrize(("flags", "says"), MODELS, ids=[flags.replace("DIR/", "") for flags, _ in MODELS])
def test_the_model_flag(wrong_files: Path, flags: str, says: str) -> None:
    with pytest.raises(ToolGRPOError) as caught:
        run = load(flags, wrong_files)
        run.job.trainer(reward_funcs=run.job.rewards(), train_dataset=run.job.training_rows())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--dataset_id_or_path DIR/one.jsonl",  # one row, and a group takes the whole batch
        "--dataset_id_or_path DIR/rows.jsonl --num_generations 32 --per_device_train_batch_size 32",  # a group > the data
        "--dataset_id_or_path DIR/no_answer.jsonl --reward tool_use",
        "--max_rows 1",
    ],
)
def test_what_only_looks_wrong_is_taken(wrong_files: Path, flags: str) -> None:
    load(flags, wrong_files)


EVALUATION: list[tuple[str, str]] = [
    ("--samples 0", "samples must be at least 1, got 0"),
    ("--samples many", "must be a whole number, got 'many'"),
    ("--samples 4 --ks 8", "ks must lie between 1 and samples (4), got 8"),
    ("--baseline ''", "--baseline is given without a value"),
    ("--report DIR/folder", "it is a folder; give another place with --report"),
    ("--report DIR/plain/in/a/file.json", "cannot be written"),
]


@pytest.mark.parametrize(("flags", "says"), EVALUATION, ids=[flags.replace("DIR/", "") for flags, _ in EVALUATION])
def test_the_flags_of_the_evaluation(wrong_files: Path, flags: str, says: str) -> None:
    words = arguments(flags, wrong_files)
    of_training = words.index("--per_device_train_batch_size")
    del words[of_training : of_training + 2]
    with pytest.raises(ToolGRPOError) as caught:
        evaluation_arguments(read("evaluate", words))
    assert says in str(caught.value)


def test_no_flag_of_ours_was_left_out() -> None:
    trls = {field.name for field in dataclasses.fields(GRPOConfig)}
    ours = {field.name for kind in (ScriptArguments, EvaluationArguments) for field in dataclasses.fields(kind)}
    ours |= {field.name for field in dataclasses.fields(ToolGRPOConfig)} - trls
    tried = {word[2:] for flags, _ in [*TABLE, *MODELS, *EVALUATION] for word in flags.split() if word.startswith("--")}
    assert (ours | {"config", "model_name_or_path", "output_dir", *ALIASES}) - tried == set()
