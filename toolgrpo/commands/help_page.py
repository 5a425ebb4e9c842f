"""`toolgrpo COMMAND --help`: the flags to begin with, a line each, and the list of themes.

`--help THEME` shows one theme, `--help all` also every flag of TRL and Transformers that is read.
Nothing heavy is imported for it (`flags.py`). A flag of ours that no theme names stands under "more", so
none is missing.
"""

from __future__ import annotations

import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.commands.arguments import flags_of
from toolgrpo.commands.flags import Flag
from toolgrpo.errors import ConfigError
from toolgrpo.named_files import nearest
from toolgrpo.trainer.trl.fields import WITHOUT_EFFECT

_COLUMN = 34


@dataclass(frozen=True, slots=True)
class Page:
    """The help of one command: names of flags under themes, and what a command means by one."""

    purpose: str
    themes: Mapping[str, Sequence[str]]
    defaults: Mapping[str, str] = field(default_factory=dict)  # where a command has its own


_MODEL = ("model_name_or_path", "model_revision", "dtype", "trust_remote_code", "attn_implementation")
_LORA = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit")
_TOOLS = ("tools_script", "tool_functions_module", "environment", "mcp_config", "agent", "agent_host")
_TOOLS_LIMITS = ("cache_tools", "tool_workers", "tool_timeout", "max_tool_response_tokens")
_REWARDS = ("reward", "reward_fn", "reward_function_name", "reward_weights", "reward_timeout", "success_threshold")
_DATA = ("dataset_id_or_path", "dataset_split", "max_rows", "system_prompt", "skip_bad_rows", "long_prompts")
_HELD_OUT = ("eval_questions", "eval_share", "eval_dataset_id_or_path", "eval_split")
_WHILE_TRAINING = ("eval_steps", "num_generations_eval", "keep", "stop_when")
_EPISODE = (
    *("max_completion_length", "max_turns", "max_user_turns", "max_turn_tokens", "max_tool_calls", "episode_timeout"),
    *("context", "temperature", "top_p", "top_k", "enable_thinking", "call_markers", "unmarked_calls"),
    "max_concurrent_episodes",
)
_ANSWERS = ("temperature", "top_p", "top_k", "max_turn_tokens", "enable_thinking", "call_markers", "unmarked_calls")
_ENGINE = (
    *("engine", "vllm_server_urls", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_enforce_eager"),
    *("vllm_enable_sleep_mode", "vllm_kv_cache_gib", "vllm_lora_sync", "engine_timeout"),
)
_TRAINING = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations"),
    *("num_iterations", "beta", "epsilon", "epsilon_high", "loss_type", "scale_rewards", "max_grad_norm"),
    *("mask_truncated_completions", "gradient_checkpointing", "prefix_sharing", "max_tokens_per_pass", "seed"),
)
_DRAWING = (*("dynamic_sampling", "max_groups_drawn", "skip_dead_rows"),)
_CREDIT = (
    *("advantage", "credit", "turn_reward", "turn_reward_fn", "turn_reward_weights", "penalty", "overlong"),
    *("void_turns", "max_dropped_share"),
)
_CORRECTION = (
    *("rollout_correction", "correction_band", "importance_sampling_level", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "off_policy_mask_threshold"),
)
_OVERLAP = ("max_staleness", "carry_over")
_SAVING = ("output_dir", "save_strategy", "save_steps", "save_total_limit", "resume_from_checkpoint")
_WATCHING = (
    *("logging_steps", "max_infrastructure_failures", "quiet", "report_to", "run_name"),
    *("log_completions", "record_episodes", "record_tokens", "dry_run"),
)

# The flags of the first page, where a command has more.
_FIRST = (
    *("model_name_or_path", "use_peft", "tools_script", "environment", "mcp_config", "reward", "reward_fn"),
    *("reward_weights", "dataset_id_or_path", "system_prompt", "eval_questions", "max_completion_length", "max_turns"),
    *("temperature", "engine", "learning_rate", "max_steps", "per_device_train_batch_size", "num_generations"),
    *("gradient_accumulation_steps", "output_dir", "save_steps", "resume_from_checkpoint", "report_to", "dry_run"),
)

# What TRL and Transformers say at length, of the flags that the short page shows.
_IN_SHORT = {
    "model_name_or_path": "A folder, a hub id, nano or smollm2.",
    "model_revision": "Branch, tag or commit on the hub.",
    "dtype": "What the weights are loaded as.",
    "trust_remote_code": "Run code that comes with the model or tokenizer.",
    "attn_implementation": "Attention, as Transformers names it (sdpa, flash_attention_2, ...).",
    "use_peft": "Train a LoRA adapter instead of all weights.",
    "lora_r": "Rank of the adapter.",
    "lora_alpha": "Scale of the adapter.",
    "lora_dropout": "Dropout of the adapter; default: 0, for TRL's 0.05 scores another policy than sampled (sft: 0.05).",
    "lora_target_modules": "Modules that get one; default: the projections of every layer.",
    "load_in_4bit": "Hold the base model in 4 bits (with use_peft).",
    "reward_weights": "One for each reward: --reward, then files.",
    "temperature": "Of sampling.",
    "top_p": "Sample from the likeliest tokens that hold this share.",
    "top_k": "Sample from this many of the likeliest tokens; 0: all.",
    "vllm_gpu_memory_utilization": "Share of the GPU that colocated vLLM takes.",
    "vllm_max_model_length": "Context window of the engine; default: the model's.",
    "vllm_enable_sleep_mode": "Give vLLM's GPU memory to the training pass between rollouts.",
    "learning_rate": "Peak learning rate.",
    "lr_scheduler_type": "How it falls.",
    "warmup_steps": "Steps over which it rises; below 1: a share of all.",
    "max_steps": "Optimizer steps; -1: num_train_epochs.",
    "num_train_epochs": "Passes over the rows.",
    "per_device_train_batch_size": "Episodes of one pass in one process.",
    "gradient_accumulation_steps": "Passes of one optimizer step.",
    "steps_per_generation": "Passes that one rollout is for; default: gradient_accumulation_steps.",
    "num_generations": "Episodes of one prompt: a group.",
    "num_iterations": "Times that a rollout is trained on.",
    "beta": "Weight of the distance from the reference model; 0: none is loaded.",
    "epsilon": "How far a probability ratio may go before it is clipped.",
    "epsilon_high": "The same upward; default: epsilon.",
    "loss_type": "Which loss (TRL's names).",
    "scale_rewards": "What advantages are divided by: group, batch or none.",
    "importance_sampling_level": "A ratio for each token, or one for the sequence.",
    "vllm_importance_sampling_mode": "With rollout_correction trl: how TRL's ratios weigh.",
    "vllm_importance_sampling_clip_max": "With rollout_correction trl: the largest ratio that counts.",
    "off_policy_mask_threshold": "Leave out sequences of negative advantage that are further off than this.",
    "max_grad_norm": "Larger gradients are scaled down to this.",
    "mask_truncated_completions": "Do not train on episodes that were cut.",
    "gradient_checkpointing": "Compute activations twice and hold fewer.",
    "seed": "Of rows, sampling and initial weights.",
    "output_dir": "Folder of model, log and episodes.",
    "save_strategy": "When checkpoints are written.",
    "save_steps": "Steps between two checkpoints.",
    "save_total_limit": "Checkpoints that are kept.",
    "resume_from_checkpoint": "A checkpoint's folder, or auto: the last one.",
    "eval_steps": "Steps between two evaluations on the held-out rows.",
    "num_generations_eval": "Episodes of a held-out row; default: num_generations.",
    "report_to": "wandb, tensorboard, trackio, ...",
    "run_name": "What trackers call the run.",
    "log_completions": "Send tables of episodes to the trackers.",
}

PAGES: dict[str, Page] = {
    "train": Page(
        "Teach a model to use tools by reinforcement learning.",
        {
            "model": (*_MODEL, *_LORA),
            "tools": (*_TOOLS, *_TOOLS_LIMITS),
            "rewards": _REWARDS,
            "data": _DATA,
            "evaluation": (*_HELD_OUT, *_WHILE_TRAINING),
            "episode": _EPISODE,
            "engine": _ENGINE,
            "training": _TRAINING,
            "drawing": _DRAWING,
            "credit": _CREDIT,
            "correction": _CORRECTION,
            "overlap": _OVERLAP,
            "saving": _SAVING,
            "watching": _WATCHING,
        },
        {"output_dir": "trainer_output"},
    ),
    "check": Page(
        "Look at everything that a training needs: load it, draw some episodes, do one step. Nothing is kept.",
        {
            "drawn": ("questions", "samples", "step", "json"),
            "model": (*_MODEL, *_LORA),
            "tools": (*_TOOLS, *_TOOLS_LIMITS),
            "rewards": _REWARDS,
            "data": _DATA,
            "episode": _EPISODE,
            "engine": _ENGINE,
            "training": _TRAINING,
        },
    ),
    "evaluate": Page(
        "Measure a model, or two side by side, on held-out questions.",
        {
            "measurement": ("baseline", "samples", "ks", "report", *_HELD_OUT),
            "model": _MODEL,
            "tools": (*_TOOLS, *_TOOLS_LIMITS),
            "rewards": _REWARDS,
            "data": _DATA,
            "episode": _EPISODE,
            "engine": _ENGINE,
            "saving": ("output_dir", "record_episodes", "dry_run", "seed"),
        },
        {"eval_questions": "100", "output_dir": "trainer_output"},
    ),
    "replay": Page(
        "toolgrpo replay DIR EPISODE: do the tool calls and rewards of a recorded episode again, or all of it. What "
        "the run was given is in DIR/run.yaml.",
        {
            "replayed": ("with_model", "all", "run_its_files"),
            "tools": (*_TOOLS, *_TOOLS_LIMITS),
            "rewards": _REWARDS,
            "episode": _EPISODE,
            "engine": _ENGINE,
        },
    ),
    "chat": Page(
        "toolgrpo chat MODEL: talk to a model in the terminal. A folder that a training wrote brings the tools and the "
        "system message of its run.",
        {
            "tools": (*_TOOLS, *_TOOLS_LIMITS, "system_prompt"),
            "answers": _ANSWERS,
            "model": _MODEL,
            "engine": _ENGINE,
        },
    ),
    "data": Page(
        "toolgrpo data FILE: show rows as a reward will see them, and with a model their prompts as it reads them. FILE "
        "may be a hub id or a named task set too.",
        {
            "shown": ("show", "model_name_or_path", "dataset_split", "max_rows", "system_prompt"),
            "tools": ("tools_script", "tool_functions_module", "environment", "mcp_config"),
        },
    ),
    "gateway": Page(
        "Serve a model by itself over OpenAI's API, as agents see it in a training.",
        {
            "where": ("port", "host", "api_key"),
            "model": _MODEL,
            "answers": ("temperature", "top_p", "top_k", "enable_thinking", "call_markers", "unmarked_calls"),
            "engine": _ENGINE,
        },
    ),
    "sft": Page(
        "Teach a model the form of tool calls from example conversations.",
        {
            "data": (
                *("model_name_or_path", "dataset_id_or_path", "tools_script", "environment", "mcp_config"),
                *("system_prompt", "call_markers", "max_length", "output_dir"),
            ),
            "training": (
                *("max_steps", "num_train_epochs", "batch_size", "micro_batch_size", "learning_rate", "warmup_steps"),
                *("bf16", "gradient_checkpointing", "use_peft", "lora_r", "lora_alpha", "dtype", "seed"),
            ),
            "saving": ("save_steps", "save_total_limit", "resume_from_checkpoint"),
        },
    ),
}


def asked_for(arguments: Sequence[str]) -> str | None:
    """Return the word after `--help`, "" if there is none, or None if nobody asks for help."""
    for place, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            following = arguments[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("-") else ""
    return None


def help_text(command: str, theme: str = "", *, width: int | None = None) -> str:
    """Return the page of a command, or one theme of it, or every flag ("all")."""
    page, flags = PAGES[command], _shown_flags(command)
    themes = _filled(page, flags, everything=theme == "all")
    if theme not in ("", "all"):
        if theme not in themes:
            near = nearest(theme, [*themes, "all"])[0]
            raise ConfigError(f"--help {theme}: the themes are {', '.join(themes)} and all; the nearest is {near}")
        themes = {theme: themes[theme]}
    width = width or max(60, min(shutil.get_terminal_size().columns, 110))
    parts = [
        f"usage: toolgrpo {command} [--config FILE.yaml] [--flag value ...]",
        textwrap.fill(page.purpose, width),
        textwrap.fill("Every flag is also a key of the YAML file; a flag wins over the file.", width),
    ]
    shown = _first(page, themes) if theme == "" else themes
    for name, names in shown.items():
        if theme == "":
            lines = [_entry(flags[flag], page, 1000, in_short=True) for flag in names]
            lines = [line.replace("\n" + " " * _COLUMN, "  ") for line in lines]
            parts.append("\n".join(_cut(line, width) for line in lines))
            continue
        lines = [_entry(flags[flag], page, width, in_short=theme != "all") for flag in names]
        parts.append("\n".join([f"{name}:", *lines]))
    others = "" if theme == "all" else "; --help all: every flag, TRL's and Transformers' too"
    parts.append(
        textwrap.fill(f"--help THEME: one of {', '.join(_filled(page, flags, everything=False))}{others}", width)
    )
    return "\n\n".join(parts)


def completion(shell: str, commands: Sequence[str]) -> str:
    """Return the script by which a shell completes commands, their flags, and values that can be listed."""
    flags = {command: _shown_flags(command) for command in PAGES}
    known = {
        name: one for of in reversed(flags.values()) for name, one in of.items()
    }  # of a training, where it has one
    choices = {f"--{name}": one.choices for name, one in known.items() if one.choices}
    if shell == "fish":
        begin = f"complete -c toolgrpo -n __fish_use_subcommand -fa '{' '.join(commands)} --help --version'"
        seen = (
            f"complete -c toolgrpo -n '__fish_seen_subcommand_from {command}' -l {name}"
            + (f" -xa '{' '.join(map(str, one.choices))}'" if one.choices else " -r" if one.type is not bool else "")
            for command, of in flags.items()
            for name, one in of.items()
        )
        return "\n".join([begin, *seen])
    cases = [
        f"    {command}) words='{' '.join(f'--{name}' for name in of)} --help' ;;" for command, of in flags.items()
    ]
    values = [f"    {flag}) words='{' '.join(map(str, of))}' ;;" for flag, of in sorted(choices.items())]
    return "\n".join(
        [
            *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
            "_toolgrpo() {",
            '  local words="" cur="${COMP_WORDS[COMP_CWORD]}"',
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  case "${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            '    --*) [[ "$cur" == --* ]] || words="" ;;',
            "  esac",
            f"  (( COMP_CWORD == 1 )) && words='{' '.join(commands)} --help --version'",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o default -F _toolgrpo toolgrpo  # files, where no word fits",
        ]
    )


def _shown_flags(command: str) -> dict[str, Flag]:
    return {
        name: flag
        for name, flag in flags_of(command).items()
        if not flag.of_training and (flag.ours or name not in WITHOUT_EFFECT)
    }


def _first(page: Page, themes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the flags to begin with as one nameless theme: all where they are few, else the command's own and `_FIRST`."""
    named = [flag for name, names in themes.items() if name != "more" for flag in names]
    own = [] if page is PAGES["train"] else next(iter(themes.values()))
    return {"": named if len(named) <= len(_FIRST) else [flag for flag in named if flag in _FIRST or flag in own]}


def _filled(page: Page, flags: Mapping[str, Flag], *, everything: bool) -> dict[str, list[str]]:
    """Return the themes with the flags that there are; what no theme names comes last."""
    themes = {name: [flag for flag in names if flag in flags] for name, names in page.themes.items()}
    named = {flag for names in themes.values() for flag in names}
    of_training = flags_of("train") if page is not PAGES["train"] else {}
    more = [flag.name for flag in flags.values() if flag.ours and flag.name not in named | of_training.keys()]
    themes["more"] = more
    if everything:
        themes["TRL and Transformers"] = [name for name in flags if name not in named | set(more)]
    return {name: names for name, names in themes.items() if names}


def _entry(flag: Flag, page: Page, width: int, *, in_short: bool) -> str:
    default = page.defaults.get(flag.name, _shown(flag.default))
    text = _IN_SHORT.get(flag.name, flag.help) if in_short and not flag.ours else flag.help
    value = "" if flag.default is False else _value(flag)
    written = f"  --{flag.name} {value}".rstrip()
    shows_default = default is not None and default != "false" and "default:" not in text.lower()
    shown = f" [{default}]" if shows_default else ""
    filled = textwrap.wrap(text + shown, width - _COLUMN) or [""]
    first = f"{written:<{_COLUMN}}{filled[0]}"
    if len(written) >= _COLUMN - 1:
        first = f"{written}\n{' ' * _COLUMN}{filled[0]}"
    return "\n".join([first, *(" " * _COLUMN + line for line in filled[1:])])


def _shown(default: Any) -> str | None:
    """Return a default as it is written behind a flag."""
    if default is None or default == "":
        return None
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) or "none" if isinstance(default, list | tuple) else str(default)


def _value(flag: Flag) -> str:
    """Return what stands behind a flag."""
    if flag.choices:
        return "|".join(map(str, flag.choices))
    if any(typing.get_origin(member) is list for member in flag.members):
        return "A B ..."
    kinds = {str: "TEXT", float: "X", int: "N", bool: "true|false"}
    return next((name for kind, name in kinds.items() if kind in flag.members), "TEXT")


def _cut(line: str, width: int) -> str:
    end = " ..." + (f" [{line.rpartition(' [')[2]}" if line.endswith("]") else "")
    return line if len(line) <= width else line[: width - len(end) + 1].rpartition(" ")[0] + end
