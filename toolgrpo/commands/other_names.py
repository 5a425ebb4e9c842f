"""Read the keys of other GRPO recipes: those that mean one thing are taken, the rest are answered.

    model: {name, dtype}    data: {dataset, max_samples}    training: {lr, group_size, kl_coef, ...}

A known key is never read as another. Not covered: values that count something else elsewhere; where
that is likely, the key is in `ANSWERS` and not in `MEANS`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MEANS: Mapping[str, str] = {  # keys that can only mean one field of ours
    "model_name": "model_name_or_path",
    "model_id": "model_name_or_path",
    "model_path": "model_name_or_path",
    "torch_dtype": "dtype",
    "dataset": "dataset_id_or_path",
    "dataset_name": "dataset_id_or_path",
    "dataset_path": "dataset_id_or_path",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "reward_funcs": "reward",
    "max_samples": "max_rows",
    "lr": "learning_rate",
    "group_size": "num_generations",
    "kl_coef": "beta",
    "kl_beta": "beta",
    "clip_eps": "epsilon",
    "clip_range": "epsilon",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "grad_accum_steps": "gradient_accumulation_steps",
    "max_grad_clip": "max_grad_norm",
    "save_dir": "output_dir",
    "tools_file": "tools_script",
    "tools_path": "tools_script",
    "reward_file": "reward_fn",
    "reward_path": "reward_fn",
}

UNDER_HEADING: Mapping[tuple[str, str], str] = {  # keys that only mean something under their heading
    ("model", "name"): "model_name_or_path",
    ("model", "path"): "model_name_or_path",
    ("model", "id"): "model_name_or_path",
    ("data", "name"): "dataset_id_or_path",
    ("data", "path"): "dataset_id_or_path",
    ("data", "split"): "dataset_split",
    ("tools", "script"): "tools_script",
    ("reward", "function"): "reward_function_name",
    ("reward", "name"): "reward",
}

_STAGES = {  # of this package once, and the stage that each became
    **{"length_penalty": "penalty", "overlong": "overlong", "void_turns": "void_turns"},
    "turn_credit": "credit turn_reward turn_reward_fn turn_reward_weights",
}

ANSWERS: Mapping[str, str] = {  # keys that may mean several things, or nothing here
    "batch_size": (
        "write per_device_train_batch_size, which counts episodes: prompts x num_generations (a batch of 4 prompts in "
        "groups of 8 is 32)"
    ),
    "mini_batch_size": (
        "write per_device_train_batch_size for the episodes of one pass, and gradient_accumulation_steps for how many "
        "passes make one optimizer step"
    ),
    "steps": "write max_steps, the optimizer steps",
    "num_steps": "write max_steps, the optimizer steps",
    "total_steps": "write max_steps, the optimizer steps",
    "max_new_tokens": "write max_completion_length for the whole episode, or max_turn_tokens for one turn",
    "max_tokens": "write max_completion_length for the whole episode, or max_turn_tokens for one turn",
    "max_length": "write max_completion_length, the tokens of an episode after its prompt",
    "max_prompt_length": "leave it out: prompts are never cut",
    "device": "leave it out: the launcher decides (LAUNCH=cpu, single_gpu, multi_gpu, ...)",
    "mixed_precision": "write bf16: true (or fp16: true)",
    "use_lora": "write use_peft: true",
    "dataset_config": "write it behind the data set: dataset_id_or_path: OWNER/NAME:CONFIG",
    "dataset_streaming": "leave it out: rows are kept on the disk and read from there",
    "datasets": "write the data sets into a mixture file and give that as dataset_id_or_path (docs/how-to/data.md)",
    "test_split_size": "write eval_share, the share of the rows to hold out",
    "ignore_bias_buffers": "leave it out: it was made for models of other kinds",
    **dict.fromkeys(
        ("reward_model", "reward_model_path", "reward_model_name_or_path"),
        "the commands take functions (reward_fn, reward); a reward model is given to ToolGRPOTrainer in Python",
    ),
    **{
        name: f"write stage_fn: recipes/stages/{file}.py, and set what it takes in a copy of that file"
        for file, names in _STAGES.items()
        for name in names.split()
    },
}

_MOST_ITERATIONS = 8


def meant_by(name: str, heading: str | None, known: Collection[str]) -> str:
    """Return the known key that a key means, or the key itself."""
    if name in known:
        return name
    meant = UNDER_HEADING.get((heading, name)) if heading is not None else None
    return meant or MEANS.get(name, name)


def answer_to(name: str) -> str | None:
    """Return what to write instead of a key that other recipes have, or None."""
    if name in ANSWERS:
        return ANSWERS[name]
    return f"it is {MEANS[name]} here" if name in MEANS else None


def question_iterations(num_iterations: int) -> str | None:
    """Return what is odd about a number of iterations, if anything is."""
    if num_iterations <= _MOST_ITERATIONS:
        return None
    return (
        f"num_iterations is {num_iterations}: in TRL, and so here, that is how many optimizer passes each batch of "
        f"episodes is used for, and after a few of them nothing of it is left to learn. If training steps are meant, "
        f"write max_steps {num_iterations}. More than {_MOST_ITERATIONS} passes are taken from a Python script only "
        f"(ToolGRPOConfig(num_iterations=...))"
    )
