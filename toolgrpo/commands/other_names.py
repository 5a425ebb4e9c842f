"""Read the keys of other GRPO recipes and of TRL's scripts: those that mean one thing are taken, the rest are answered.

    model: {name, lora_r}    data: {dataset, max_samples}    training: {lr, group_size, kl_coef, batch_size, ...}
    model_name_or_path    dataset_name    dataset_config    reward_funcs    datasets: [{path, name, split, fraction}]

A known key is never read as another, with one exception: `num_iterations` counts optimizer steps in the first form, and
passes over a batch in TRL's; a file that mixes both is asked. Keys that may count something else are in `ANSWERS`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_OF_TRL: Mapping[str, str] = {  # keys of TRL's scripts, and of its older configs
    "torch_dtype": "dtype",
    "dataset_name": "dataset_id_or_path",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "test_split_size": "eval_share",
    "reward_funcs": "reward",
    "warmup_ratio": "warmup_steps",  # below 1, steps are a share of all
}

_OF_RECIPES: Mapping[str, str] = {  # keys of others that can only mean one field of ours
    **dict.fromkeys(("model_name", "model_id", "model_path"), "model_name_or_path"),
    **dict.fromkeys(("dataset", "dataset_path"), "dataset_id_or_path"),
    "max_samples": "max_rows",
    "lr": "learning_rate",
    "group_size": "num_generations",
    **dict.fromkeys(("kl_coef", "kl_beta"), "beta"),
    **dict.fromkeys(("clip_eps", "clip_range"), "epsilon"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    "grad_accum_steps": "gradient_accumulation_steps",
    "max_grad_clip": "max_grad_norm",
    "save_dir": "output_dir",
    **dict.fromkeys(("tools_file", "tools_path"), "tools_script"),
    **dict.fromkeys(("reward_file", "reward_path"), "reward_fn"),
}

MEANS: Mapping[str, str] = {**_OF_TRL, **_OF_RECIPES}

UNDER_HEADING: Mapping[tuple[str, str], str] = {  # keys that only mean something under their heading
    **{("model", name): "model_name_or_path" for name in ("name", "path", "id")},
    ("data", "name"): "dataset_id_or_path",
    ("data", "path"): "dataset_id_or_path",
    ("data", "split"): "dataset_split",
    ("tools", "script"): "tools_script",
    ("reward", "function"): "reward_function_name",
    ("reward", "name"): "reward",
}

_COUNTED = (  # words for the size of a step and the length of a training, beside which the other form would count it twice
    *("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"),
    *("num_generations", "learning_rate", "beta", "max_steps", "num_train_epochs"),
    *("grad_accum_steps", "epochs", "num_epochs"),
)

PASSED_OVER: Mapping[str, str] = {  # keys that change nothing here, and why
    **dict.fromkeys(("dataset_streaming", "streaming"), "rows are kept on the disk and read from there"),
    "ignore_bias_buffers": "it was made for models of other kinds",
    "max_prompt_length": "prompts are never cut",
    "overwrite_output_dir": "an earlier run in the folder moves into earlier-N in it",
}

_THE_DEFAULT = ("dataset_prompt_column", "prompt")  # of Open-R1
_VARIABLES = {f"wandb_{name}": f"WANDB_{name.upper()}" for name in ("project", "entity", "run_group")}  # of Open-R1

_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
LAUNCHER_FLAGS = {"accelerate_config": str, "main_process_ip": str} | dict.fromkeys(_NUMBERS, int)

_REWARDS_OF_OPEN_R1 = (
    *("accuracy", "format", "tag_count", "reasoning_steps", "cosine", "repetition_penalty", "length", "code"),
    *("binary_code", "ioi_code", "cf_code", "code_format", "soft_overlong_punishment"),
)
_SET_THEM = ("code_", "cosine_", "ioi_", "e2b_", "morph_", "repetition_n_", "repetition_max_", "parallel_code_")

_STAGES = {  # of this package once, and the stage that each became
    **{"length_penalty": "penalty", "overlong": "overlong", "void_turns": "void_turns"},
    "turn_credit": "credit turn_reward turn_reward_fn turn_reward_weights",
}

ANSWERS: Mapping[str, str] = {  # keys that may mean several things, or nothing here
    "batch_size": "write per_device_train_batch_size, which counts episodes: tasks of a step x num_generations",
    "mini_batch_size": "write per_device_train_batch_size, episodes a pass, and gradient_accumulation_steps, passes a step",
    **dict.fromkeys(("steps", "num_steps", "total_steps"), "write max_steps, the optimizer steps"),
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "write max_completion_length, or max_turn_tokens for one turn"),
    "max_length": "write max_completion_length, the tokens of an episode after its prompt",
    "device": "leave it out: the launcher decides (LAUNCH=cpu, single_gpu, multi_gpu, ...)",
    "mixed_precision": "write bf16: true (or fp16: true)",
    "use_lora": "write use_peft: true",
    "env": "it holds `NAME: value` lines, in a config that you give (never in the run.yaml of a run)",
    "datasets": "write the datasets into a mixture file, and give it as dataset_id_or_path (docs/how-to/data.md)",
    "dataset_mixture": "write `datasets:` as TRL has it, with path, name, split, columns and fraction of each",
    "dataset_config": "it belongs to a dataset_name, and there is none",
    "dataset_prompt_column": "rename that column of the rows to `prompt`",
    "chat_template": "put it into the model's folder as chat_template.jinja",
    "vllm_device": "leave it out: vLLM runs on the devices of the training, or on a server (engine: vllm_server)",
    "hub_model_revision": "leave it out: the model is pushed to the main branch of hub_model_id",
    "callbacks": "leave it out: callbacks are given to ToolGRPOTrainer in Python",
    "benchmarks": "leave it out: `toolgrpo evaluate` measures the trained model",
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


@dataclass(frozen=True, slots=True)
class GivenKey:
    """One key of a YAML file; the heading is None for one that stands under none, `meant` is a key of ours."""

    heading: str | None
    name: str
    value: Any
    where: str  # file and line
    meant: str = ""


@dataclass(slots=True)
class Reading:
    """Keys of a file as they are meant here."""

    keys: list[GivenKey]
    said: list[str] = field(default_factory=list)  # how keys of others were read
    complaints: list[str] = field(default_factory=list)
    launcher: dict[str, Any] = field(default_factory=dict)  # keys of accelerate's launcher

    def named(self, name: str) -> GivenKey | None:
        return next((one for one in self.keys if one.name == name), None)

    def read_as(self, key: GivenKey, meant: str = "", value: Any = None, said: str = "") -> None:
        """Take a key as one of ours, or out."""
        place = self.keys.index(key)
        self.keys[place : place + 1] = [replace(key, meant=meant, value=value)] if meant else []
        self.said += [f"{key.name} {key.value}: {said}"] if said else []

    def refuse(self, key: GivenKey, why: str) -> None:
        self.read_as(key)
        self.complaints.append(f"{key.where}: {key.name} {why}")


def in_our_words(keys: Sequence[GivenKey], typed: Mapping[str, Any], known: Mapping[str, Any], file: str) -> Reading:
    """Read the keys of a file, over which these values were typed; set the variables that it asks for."""
    read = Reading(list(keys))
    for key in keys:
        if key.name == "scale_rewards" and isinstance(key.value, bool):
            read.read_as(key, key.name, "group" if key.value else "none")
        elif key.name in known:
            continue
        elif (key.value is None and key.name in (*MEANS, *ANSWERS)) or (key.name, key.value) == _THE_DEFAULT:
            read.read_as(key)
        elif key.name in PASSED_OVER:
            read.read_as(key, said=PASSED_OVER[key.name] if key.value is not False else "")
        elif key.name in LAUNCHER_FLAGS:
            read.launcher[key.name] = key.value
            read.read_as(key)
        elif key.name in _VARIABLES or (key.name == "env" and isinstance(key.value, Mapping)):
            _set_variables(read, key)
    if "reward" in known:  # not a supervised training's
        _read_data_of_trl(read, typed, file)
        _read_counts(read, typed, known)
    return read


def _set_variables(read: Reading, key: GivenKey) -> None:
    read.read_as(key)
    for name, value in (key.value if key.name == "env" else {_VARIABLES[key.name]: key.value}).items():
        if value is None:  # `wandb_entity:` says nothing
            continue
        try:
            os.environ[str(name)] = str(value)
        except (OSError, ValueError) as error:  # its name is empty, say
            read.complaints.append(f"{key.where}: {key.name} cannot set the variable {name!r}: {error}")


def _read_data_of_trl(read: Reading, typed: Mapping[str, Any], file: str) -> None:
    """Read what TRL's scripts say of data and rewards."""
    config, name, test = map(read.named, ("dataset_config", "dataset_name", "dataset_test_split"))
    mixture, rewards = map(read.named, ("datasets", "reward_funcs"))
    if mixture is not None and isinstance(mixture.value, list) and file.lower().endswith((".yaml", ".yml")):
        for key in filter(None, (name, config, read.named("dataset_train_split"), test)):
            read.read_as(key, said="`datasets` are read instead, as TRL does")
        read.said.append(f"datasets: a mixture of {len(mixture.value)}")
        read.read_as(mixture, "dataset_id_or_path", file)
    elif config is not None and name is not None:
        from toolgrpo.data.load import with_config  # brings pydantic's weight, which help does not need

        read.read_as(name, "dataset_id_or_path", with_config(str(name.value), str(config.value)))
        read.read_as(config)
    values = {**{one.name: one.value for one in read.keys}, **typed}
    evaluates = values.get("eval_strategy", "no") not in ("no", False)
    if test in read.keys and test and not (evaluates or {"eval_questions", "eval_steps"} & values.keys()):
        read.read_as(test, said="nothing is measured on it, as eval_strategy is no and no eval_questions are asked for")
    asked = [] if rewards is None else rewards.value if isinstance(rewards.value, list) else [rewards.value]
    there = [one for one in _REWARDS_OF_OPEN_R1 if one in asked]
    if there and rewards is not None:
        read.refuse(
            rewards,
            f"{', '.join(there)}: Open-R1's rewards are not here; accuracy_reward compares as its accuracy does, and a file "
            f"takes the others (reward_fn: FILE.py)",
        )


def _read_counts(read: Reading, typed: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Read `batch_size` and `num_iterations` as published recipes count; refuse the latter where TRL's words stand beside."""
    theirs = [one.name for one in sorted(read.keys, key=lambda key: key.heading != "training") if _is_theirs(one)]
    ours = [one.name for one in read.keys if one.name in _COUNTED]
    batch, steps, group = map(read.named, ("batch_size", "num_iterations", "group_size"))
    if steps is not None and theirs and (ours or steps.heading != "training"):
        read.refuse(
            steps,
            f"is optimizer steps beside {theirs[0]}, and passes over a batch {f'beside {ours[0]}' if ours else 'in TRL'}; "
            f"write max_steps {steps.value} for steps, or the whole file in TRL's words",
        )
    if not theirs or ours:
        return
    renamed = ", ".join(f"{one.name} is {MEANS[one.name]}" for one in read.keys if one.name in _OF_RECIPES)
    read.said += [renamed] if renamed else []
    if steps in read.keys and steps is not None:
        _read_count(read, steps, "max_steps", steps.value, typed, f"{steps.value} optimizer steps (max_steps)")
    if batch is not None and batch.heading == "training" and group is not None:
        episodes, accumulated = typed.get("num_generations", group.value), typed.get("gradient_accumulation_steps", 1)
        trains = "max_steps" in known and not known["max_steps"].of_training
        processes = int(os.environ.get("WORLD_SIZE", "1")) if trains else 1
        whole = all(type(one) is int and one > 0 for one in (batch.value, episodes, accumulated))
        said = f"{batch.value} tasks per step, {episodes} episodes each"
        shared = whole and batch.value * episodes % (processes * accumulated) == 0
        if whole and not shared and "per_device_train_batch_size" not in typed:
            read.refuse(batch, f"{said}: {processes} processes with {accumulated} passes each cannot share them")
        else:
            at_once = batch.value * episodes // (processes * accumulated) if whole else 0
            _read_count(read, batch, "per_device_train_batch_size", at_once, typed, said)


def _read_count(read: Reading, key: GivenKey, meant: str, value: Any, typed: Mapping[str, Any], said: str) -> None:
    if type(key.value) is not int or key.value < 1:
        read.refuse(key, f"must be a whole number above 0, got {key.value!r:.200}")
    else:
        read.read_as(key, meant, value, "" if meant in typed else said)


def _is_theirs(key: GivenKey) -> bool:
    """Return whether a key shows that a file counts as published recipes do."""
    return key.name in ("lr", "group_size", "kl_coef", "kl_beta", "batch_size") or (
        key.heading in ("model", "data") and (key.name in _OF_RECIPES or (key.heading, key.name) in UNDER_HEADING)
    )


def meant_by(name: str, heading: str | None, known: Collection[str]) -> str:
    """Return the known key that a key means, or the key itself."""
    if name in known:
        return name
    meant = UNDER_HEADING.get((heading, name)) if heading is not None else None
    return meant or MEANS.get(name, name)


def answer_to(name: str) -> str | None:
    """Return what to write instead of a key that other recipes have, or None."""
    if name.startswith(_SET_THEM):
        return "leave it out: it sets one of Open-R1's rewards, which are not here"
    return f"it is {MEANS[name]} here" if name in MEANS else ANSWERS.get(name)
